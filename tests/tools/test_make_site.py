"""The site, built from nothing: no warning, no dead link, and a search that finds calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILDING_S, LOOKING_S = 300, 60
for _needed in ("sphinx", "furo", "myst_parser", "numpydoc", "sphinx_copybutton"):
    pytest.importorskip(_needed, reason="the site needs pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, str(ROOT / "tools/make_site.py"), str(place)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILDING_S)
    assert built.returncode == 0, built.stderr
    return place


def names(site: Path) -> set[str]:
    """Return the names that have a place in the reference."""
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(content).decode().splitlines()}


def test_the_reference_has_what_is_public_and_nothing_else(site):
    found = names(site)
    page = (site / "reference/communicator.html").read_text(encoding="utf-8")

    assert page.count('<dt class="sig sig-object py" id="gpucoll.Communicator.all_reduce">') == 1
    assert {"gpucoll.init", "gpucoll.MismatchError", "gpucoll.training.DiLoCo"} <= found
    assert {"gpucoll.integrations.torch.Options", "gpucoll.integrations.mxnet.Gpucoll"} <= found
    assert not [name for name in found if name.startswith("gpucoll") and re.search(r"\._", name)]
    assert "gpucoll.Communicator.Allreduce" not in found
    assert "ArrayCollectives" not in re.sub(r"<[^>]+>", "", page)


def test_documents_and_docstrings_link_to_each_other(site):
    document = (site / "docs/api.html").read_text(encoding="utf-8")
    reference = (site / "reference/training.html").read_text(encoding="utf-8")

    assert 'href="../reference/communicator.html#gpucoll.Communicator.all_reduce"' in document
    assert 'href="../docs/training.html"' in reference


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_the_search_finds_a_call_without_a_network(site, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path}", "--virtual-time-budget=30000"]
    url = (site / "search.html").as_uri()
    shown = subprocess.run(
        [*command, "--dump-dom", f"{url}?q=all_reduce"],
        capture_output=True,
        text=True,
        timeout=LOOKING_S,
        env={**os.environ, "HOME": str(tmp_path)},
    ).stdout

    _, _, results = shown.partition('id="search-results"')
    first = re.search(r'<li[^>]*><a href="([^"]+)"', results)
    assert first is not None
    assert first[1].startswith("reference/communicator.html#gpucoll.Communicator.all_reduce")
