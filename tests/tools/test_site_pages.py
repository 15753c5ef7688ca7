"""The sources of the site: links, navigation, the names of the reference, the check of links."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

import gpucoll
from gpucoll import errors, federated
from gpucoll.api.names_elsewhere import NAMES
from gpucoll.testing import device_arrays

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_site  # noqa: E402
import site_links  # noqa: E402
import site_pages  # noqa: E402
import site_reference  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

DOCUMENTS = {"README.md", "docs/api.md", "docs/a.md", "examples/README.md"}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[x](a.md#b)", "[x](a.md#b)"),
        ("[x](https://example.org/a.py)", "[x](https://example.org/a.py)"),
        ("[x](#b)", "[x](#b)"),
        ("[x](../README.md)", "[x](../index.md)"),
        ("[x](../examples)", "[x](../examples/README.md)"),
        ("[`x`](../examples/kmeans.py)", "[`x`](../examples/kmeans.py.md)"),
        ("[x](../examples/torch)", "[x](../examples/torch/index.md)"),
        ("![x](images/slow_links.svg)", "![x](images/slow_links.svg)"),
        ("```\n[x](../README.md)\n```", "```\n[x](../README.md)\n```"),
    ],
)
def test_links_lead_to_pages(written, shown):
    assert site_pages.adapted("docs/api.md", written, DOCUMENTS, site_pages.Sources()) == shown


def test_a_file_that_is_linked_has_a_page_with_its_text():
    sources = site_pages.Sources()
    site_pages.adapted("README.md", "[x](examples/kmeans.py)", DOCUMENTS, sources)

    assert "{literalinclude} /examples/kmeans.py" in sources.texts["examples/kmeans.py.md"]
    assert sources.copies == {"examples/kmeans.py"}


def test_a_picture_in_two_shades_is_two_images():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    adapted = site_pages.adapted("README.md", text, DOCUMENTS, site_pages.Sources())

    assert "<picture>" not in adapted
    assert 'src="docs/images/all_reduce-dark.svg" class="only-dark"' in adapted
    assert 'src="docs/images/all_reduce-light.svg" class="only-light"' in adapted


def test_each_document_has_one_place_in_the_navigation():
    sources = site_pages.pages()
    _, *trees = "".join(
        sources.texts[page] for page in (site_pages.LANDING, site_pages.DECISIONS)
    ).split("```{toctree}")
    named = Counter(
        line[1:] for tree in trees for line in tree.splitlines() if line.startswith("/")
    )
    documents = {name for name, text in sources.texts.items() if not text.startswith("---")}

    assert {name for name in named if not name.startswith("reference/")} == (
        documents - {site_pages.LANDING}
    )
    assert max(named.values()) == 1
    assert "\n:caption: Start\n\n/docs/README.md\n" in sources.texts[site_pages.LANDING]


def test_every_public_call_is_in_the_reference_and_no_name_of_another_library():
    text = site_reference.communicator_page()
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(".. auto")}
    methods = {name for name in dir(gpucoll.Communicator) if not name.startswith("_")}

    assert methods <= shown
    assert not shown & {*NAMES}
    listed = {name for page in site_reference.PAGES.values() for name in page.names}
    assert {*gpucoll.__all__} - listed - {*errors.__all__} == {"Communicator", "__version__"}


def test_every_integration_has_a_page():
    folders = {
        path.parent.name for path in (ROOT / "src/gpucoll/integrations").glob("*/__init__.py")
    }

    assert folders - {"engine"} == {*site_reference.PAGES["integrations"].children}


def test_members_that_are_left_out_exist():
    for name, members in site_reference.INTERNAL.items():
        homes = (gpucoll, federated, device_arrays)
        kind = next(getattr(home, name) for home in homes if name in home.__all__)
        missing = {member for member in members if not hasattr(kind, member)}
        assert not missing, name


def test_documents_that_docstrings_name_are_links():
    assert site_reference.with_links("See `docs/a_b.md`, docs/c.md#d.") == (
        "See :doc:`/docs/a_b`, :doc:`/docs/c`."
    )


def test_dead_links_and_files_from_elsewhere_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="x">', encoding="utf-8")
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x"><a href="#gone"><a href="b.html#y"><a href="c.html">'
        '<a href="https://example.org"><img src="https://example.org/z.png">',
        encoding="utf-8",
    )

    assert site_links.problems(tmp_path) == [
        "a.html: #gone leads to no heading",
        "a.html: b.html#y leads to no heading",
        "a.html: c.html leads nowhere",
        "a.html: loads https://example.org/z.png, which needs a network",
    ]


def test_a_page_goes_with_its_document(tmp_path):
    place, source = tmp_path / "site", tmp_path / "site_source"
    for path in (source / "old.md", source / "a.json", place / "old.html", place / "a.html"):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    make_site.write(site_pages.Sources({"index.md": "# Here"}), source, place)

    assert [path.name for path in source.iterdir()] == ["index.md"]
    assert [path.name for path in place.iterdir()] == ["a.html"]


def test_what_others_wrote_is_not_emptied(tmp_path):
    source, trees = tmp_path / "data_source", tmp_path / "data_trees"
    make_site.refuse_others(source, trees)
    source.mkdir()
    (source / "precious").touch()
    with pytest.raises(SystemExit, match="data_source was not made by this tool"):
        make_site.refuse_others(source, trees)
    (source / site_pages.LANDING).touch()
    make_site.refuse_others(source, trees)
