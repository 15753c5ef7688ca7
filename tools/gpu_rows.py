"""Rows of results as a file that is whole at every moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_rows"]


def write_rows(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Write all rows so far in the file's place, in one step."""
    new = output.with_suffix(".new")
    new.write_text(json.dumps(rows), encoding="utf-8")
    new.replace(output)
