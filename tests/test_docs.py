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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path):
    targets = LINK.findall(document.read_text(encoding="utf-8"))

    missing = [target for target in targets if not (document.parent / target).exists()]

    assert not missing
