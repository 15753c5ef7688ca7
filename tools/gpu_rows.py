"""Rows of results: made step by step, in a file that is whole at every moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "Step", "did", "run_on_ranks", "run_steps", "write_rows"]

Row = dict[str, Any]
Step = tuple[str, Callable[[], Row | None]]
"""What a row is called, and what makes it; whatever that raises is a row, too."""


def write_rows(rows: Sequence[Row], output: Path) -> None:
    """Write all rows so far in the file's place, in one step."""
    new = output.with_suffix(".new")
    new.write_text(json.dumps(rows), encoding="utf-8")
    new.replace(output)


def did(step: Callable[[], Row | None], refusals: tuple[type[Exception], ...] = ()) -> Row:
    """Return how a step went: "passed", "failed" or, by one of these errors, "refused"."""
    begin = time.perf_counter()
    try:
        row = {"status": "passed", "detail": "", **(step() or {})}
    except refusals as error:
        row = {"status": "refused", "detail": str(error)[:2000]}
    except Exception as error:  # the others are of interest all the same
        row = {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:2000]}
    return {**row, "elapsed_s": time.perf_counter() - begin}


def run_steps(steps: Iterable[Step], output: Path) -> int:
    """Do each step, write the rows after each, return how many failed."""
    rows: list[Row] = []
    for name, step in steps:
        rows.append({"name": name, **did(step)})
        write_rows(rows, output)
        row = rows[-1]
        rate = f"{row['rate'] / 1e9:8.2f} GB/s" if "rate" in row else ""
        print(f"{row['status']:7} {name:58} {rate} {row['detail'][:300]}", flush=True)
    return sum(row["status"] == "failed" for row in rows)


def run_on_ranks(
    control: Any,
    steps: Iterable[Step],
    output: Path,
    refusals: tuple[type[Exception], ...] = (),
    after_failure: Callable[[], None] = lambda: None,
) -> int:
    """Do each step on all ranks, which all call this; return how many failed.

    A step's row is that of a rank on which it failed, else of rank 0.

    Parameters
    ----------
    control : Communicator
        By which ranks tell each other how a step went, on the CPU.
    steps : iterable of Step
        Alike on all ranks.
    output : Path
        Written by rank 0, after each step.
    refusals : tuple of exception types
        What a step raises alike on all ranks where it cannot be done.
    after_failure : callable
        Called on all ranks after a step that failed.
    """
    rows: list[Row] = []
    for name, step in steps:
        replies = control.all_gather_object(did(step, refusals))
        worst = next((reply for reply in replies if reply["status"] == "failed"), replies[0])
        ranks = [rank for rank, reply in enumerate(replies) if reply["status"] == worst["status"]]
        row = {"name": name, "ranks": len(replies), **worst, "on_ranks": ranks}
        rows.append(row)
        if control.rank == 0:
            write_rows(rows, output)
            if row["status"] != "passed":
                print(f"{row['status']}: {name}: {row['detail'][:300]}", flush=True)
        if row["status"] == "failed":
            after_failure()
    return sum(row["status"] == "failed" for row in rows)
