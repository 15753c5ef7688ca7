"""docs/doctor.md lists exactly the keys of the JSON; its example is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from tests.doctor.environments import nvidia

from gpucoll.doctor.facts import Report
from gpucoll.doctor.text import render

TEXT = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text(encoding="utf-8")


def typed_dicts(kind, name="JSON"):
    """Yield each section's name and class, as the document's headings have them."""
    yield name, kind
    for key, hint in get_type_hints(kind).items():
        for part in (hint, *get_args(hint), *(x for y in get_args(hint) for x in get_args(y))):
            if hasattr(part, "__total__"):
                yield from typed_dicts(part, key if name == "JSON" else f"{name}.{key}")


SECTIONS = dict(typed_dicts(Report))


@pytest.mark.parametrize("name", SECTIONS)
def test_each_section_lists_its_keys_in_order(name):
    match = re.search(rf"^##+ {re.escape(name)}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/doctor.md has no section {name}"
    listed = re.findall(r"^\| `(\w+)` \|", match[1], re.MULTILINE)
    assert listed == list(SECTIONS[name].__annotations__)


def test_no_section_too_many():
    headings = re.findall(r"^### (\S+)$", TEXT, re.MULTILINE)
    assert sorted(headings) == sorted(set(SECTIONS) - {"JSON"})


def test_the_example_is_what_is_printed():
    match = re.search(r"<!-- example -->\n```\n(.*?)```", TEXT, re.DOTALL)
    assert match
    # The first line names this machine's Python and kernel.
    expected = render(nvidia().report()).splitlines()[1:]
    assert match[1].splitlines()[1:] == expected
