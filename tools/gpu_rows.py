"""Rows of results, made step by step, in a file that is complete at any moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "Step", "did", "run_on_ranks", "run_steps", "write_rows"]

Row = dict[str, Any]
Step = tuple[str, Callable[[], Row | None]]
"""The name of a row and the function that makes it; an exception of the function is a row, too."""


def write_rows(rows: Sequence[Row], output: Path) -> None:
    """Replace the file by all rows so far, in one step."""
    new = output.with_suffix(".new")
    new.write_text(json.dumps(rows), encoding="utf-8")
    new.replace(output)


def did(step: Callable[[], Row | None], refusals: tuple[type[Exception], ...] = ()) -> Row:
    """Return the result of a step: "passed", "failed" or, for one of these errors, "refused"."""
    begin = time.perf_counter()
    try:
        row = {"status": "passed", "detail": "", **(step() or {})}
    except refusals as error:
        row = {"status": "refused", "detail": str(error)[:2000]}
    except Exception as error:  # an error must not prevent the other steps
        row = {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:2000]}
    return {**row, "elapsed_s": time.perf_counter() - begin}


def run_steps(steps: Iterable[Step], output: Path) -> int:
    """Run each step, write the rows after each one, return how many failed."""
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
    """Run each step on all ranks, which all call this; return how many failed.

    A step's row comes from a rank on which it failed, or from rank 0.

    Parameters
    ----------
    control : Communicator
        The CPU communicator through which ranks exchange the results of steps.
    steps : iterable of Step
        The same on all ranks.
    output : Path
        Written by rank 0, after each step.
    refusals : tuple of exception types
        The exceptions that a step raises on all ranks if it cannot be done.
    after_failure : callable
        Called on all ranks after a failed step.
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
