"""The examples of the guide's section on `Table`, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gpucoll

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"


@pytest.mark.ranks(2)
def test_the_guide(comm):
    section = GUIDE.read_text("utf-8").partition("\n## Table\n")[2].partition("\n## ")[0]
    names = {"comm": comm, "np": np, "gpucoll": gpucoll}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "tables.md", "exec"), names)  # noqa: S102  (ours)
