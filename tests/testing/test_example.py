"""The example that docs/testing.md shows: the same files, and they run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted((ROOT / "examples" / "testing").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_document_shows_the_file(file):
    shown = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")

    assert f"```python\n{file.read_text(encoding='utf-8')}```" in shown


def test_the_example_passes(inner):
    sources = {file.stem: file.read_text(encoding="utf-8") for file in FILES}

    inner(**sources).assert_outcomes(passed=7)
