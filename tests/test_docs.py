"""Links between the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpucoll.transport.shared import layout

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "tests", "bench", "kernels", "backends", "examples")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")
IMAGE = re.compile(r'(?:src|srcset)="([^":]+)"')
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


PRIVATE = re.compile(r"(?<![\w.])/(?:home|root|work|Users|mnt)/\S+")
"""Paths of the machine on which a document was written."""
CALLS_LATE = re.compile(r"(?:within|up to)\s+(\w+)\s+calls\b")
FOR_USERS = [path for path in DOCUMENTS if "decisions" not in path.parts] + sorted(
    (ROOT / "src/gpucoll/api").rglob("*.py")
)


def test_how_late_a_mismatch_is_found_is_said_alike():
    """What a rank may be ahead of the others in calls that wait for fewer than all."""
    assert layout.RING - layout.AHEAD == 12
    found = {
        (path.name, number)
        for path in FOR_USERS
        for number in CALLS_LATE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) >= 5
    assert {number for _, number in found} == {"twelve"}


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    headings = HEADING.findall(FENCED.sub("", document.read_text(encoding="utf-8")))
    titles = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path):
    text = document.read_text(encoding="utf-8")
    targets = [*LINK.findall(text), *IMAGE.findall(text)]

    missing = [target for target in targets if not (document.parent / target).exists()]

    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_documents_lead_to_headings(document: Path):
    targets = ANCHOR.findall(FENCED.sub("", document.read_text(encoding="utf-8")))

    missing = [
        f"{target}#{anchor}"
        for target, anchor in targets
        if anchor not in anchors(document.parent / target if target else document)
    ]

    assert not missing


def test_no_document_names_a_private_path():
    found = {
        (path.name, name)
        for path in DOCUMENTS
        for name in PRIVATE.findall(path.read_text(encoding="utf-8"))
    }

    assert not found


def test_the_map_leads_to_every_document():
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / target).resolve() for target in LINK.findall(index.read_text("utf-8"))
    }
    assert {*index.parent.glob("*.md"), *index.parent.glob("*/README.md")} - linked == {index}
