"""The examples of docs/compression.md run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gpucoll

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "compression.md").read_text("utf-8")
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


@pytest.mark.ranks(2)
def test_examples(comm):
    """One after the other: later ones use names of earlier ones."""
    assert CODE.count("all_reduce") >= 4

    exec(CODE, {"comm": comm, "np": np, "gpucoll": gpucoll})  # noqa: S102  (our own document)
