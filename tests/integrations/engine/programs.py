"""The programs of the documents and of the examples, run as programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "engines"
LIMIT_S = 120


def document_program(heading: str) -> str:
    """Return the program below a heading of docs/engines.md."""
    text = (ROOT / "docs" / "engines.md").read_text("utf-8")
    section = text.partition(f"\n## {heading}\n")[2]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def output_of(path: Path, **variables: str) -> str:
    """Return what a program prints on its standard output."""
    ended = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.rstrip()
