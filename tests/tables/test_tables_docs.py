"""The examples of docs/tables.md run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs/tables.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


IMPORTS = "\n".join(re.findall(r"^(?:from|import) .*$", "".join(EXAMPLES), re.MULTILINE))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_guide(comm, code):
    assert "assert" in code
    names = {"comm": comm, "np": np}
    exec(IMPORTS, names)  # noqa: S102  (a document of this project)
    exec(compile(code, "tables.md", "exec"), names)  # noqa: S102
    comm.barrier()
