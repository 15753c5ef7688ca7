"""The examples of docs/tables.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gpucoll

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"


@pytest.mark.ranks(2)
def test_the_guide(comm):
    names = {"comm": comm, "np": np, "gpucoll": gpucoll}
    blocks = re.findall(
        r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 7
    for block in blocks:
        exec(compile(block, "tables.md", "exec"), names)  # noqa: S102  (ours)
        comm.barrier()
