"""The examples of docs/federated.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs/federated.md").read_text("utf-8")


@pytest.mark.ranks(2)
def test_the_guide_is_right(comm):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))

    exec(compile(code, "docs/federated.md", "exec"), {"comm": comm})  # noqa: S102
