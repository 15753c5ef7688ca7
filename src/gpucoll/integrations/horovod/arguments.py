"""Arguments that calls of several frameworks share, checked in Horovod's words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from gpucoll.integrations.horovod.engine.request import ReduceOp
from gpucoll.integrations.horovod.process_sets import ProcessSet

__all__ = ["reduction", "root_of", "rows_for_each"]


def reduction(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction; `average` is what programs before Horovod 0.19 passed."""
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        return op if type(op) is ReduceOp else ReduceOp(op)  # a call of an Enum takes 0.3 us
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0",
        DeprecationWarning,
        stacklevel=3,
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Return the number in a process set of a rank of the job."""
    if root_rank not in process_set.ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set"
        )
    return process_set.ranks.index(root_rank)


def rows_for_each(
    splits: Sequence[int] | None, n_rows: int, process_set: ProcessSet
) -> list[int] | None:
    """Return the rows of an alltoall for each rank; None for equal numbers."""
    size = len(process_set.ranks)
    if splits is None or len(splits) == 0:
        if n_rows % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the "
                "number of workers."
            )
        return None
    if len(splits) != size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if min(splits) < 0:
        raise ValueError("Entries in splits must not be negative.")
    if sum(splits) > n_rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return [int(rows) for rows in splits]
