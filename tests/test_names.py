"""Names: what was renamed stays renamed, and the glossary has what the code is built of."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/gpucoll", "kernels", "backends", "bench", "tests", "tools")
GONE = (
    "courier", "departure", "estate", "express", "flight", "glance", "lookout", "postman", "recipe",
    "road", "shelf", "ticket", "watcher",
)  # fmt: skip
"""Words out of picture books, each of which stood for something that the field has a name for."""
_GONE = "|".join(GONE)
MAY_BE_ONE = re.compile(f"(?i:\\b(?:{_GONE})s?\\b|_(?:{_GONE})|(?:{_GONE})_)|{_GONE.title()}")
OF_THE_FIELD = re.compile("in_?flight|^OP_NO_TICKET$|^num_tickets$", re.IGNORECASE)
"""What is in flight, and what Python's `ssl` calls what TLS does."""
NO_ROOMS = ("utils", "common", "helper", "helpers", "manager", "misc")
IN_THE_GLOSSARY = (
    "Arena", "Backend", "Call block", "Communicator", "Context", "Control channel", "Device",
    "Dispatch", "Enqueued", "Entry", "Fingerprint", "Group", "In flight", "Kernel", "Launch",
    "Mailbox", "Monitor", "Operands", "Plan", "Rendezvous", "Request", "Schedule", "Segment",
    "Slot", "Work",
)  # fmt: skip


def sources() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path != Path(__file__).resolve())


def words_of(name: str) -> set[str]:
    """Return the words of an identifier: ``MostInFlight`` and ``most_in_flight`` alike."""
    spread = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return {word.lower().removesuffix("s") for word in spread.split("_") if word}


def picture_words(path: Path) -> list[str]:
    """Return the names in a source, its own among them, that have a word out of picture books."""
    text = path.read_text("utf-8")
    spelled = (path.stem + text).lower()
    if not any(word in spelled for word in GONE):  # the expression takes far longer,
        return []
    if not MAY_BE_ONE.search(path.stem + text):  # and reading tokens once more
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    names.add(path.stem)
    found = (name for name in names if words_of(name) & {*GONE} and not OF_THE_FIELD.search(name))
    return sorted(found)


def test_no_picture_book_comes_back():
    found = {
        str(path.relative_to(ROOT)): words for path in sources() if (words := picture_words(path))
    }
    assert found == {}, "docs/glossary.md has the field's own words"


def test_one_that_came_back_is_found(tmp_path):
    path = tmp_path / "courier.py"
    path.write_text("class MoreTickets: in_flight = 1  # an estate\n")
    assert picture_words(path) == ["MoreTickets", "courier"]


def test_no_room_for_everything():
    rooms = {path.stem for path in sources()} | {path.parent.name for path in sources()}
    assert not rooms & {*NO_ROOMS}


@pytest.mark.parametrize("term", IN_THE_GLOSSARY)
def test_in_the_glossary(term: str):
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    assert re.search(rf"^\*\*[^*]*\b{term}\b", text, re.MULTILINE | re.IGNORECASE), term
