"""`init` and `shutdown`, who this rank is, and what programs ask about how Horovod was built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.integrations.horovod.engine.request import ReduceOp

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.engine import Engine
    from gpucoll.integrations.horovod.process_sets import ProcessSet

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Meet the other ranks, once; see `gpucoll.init` for how they find each other."""
    raise NotImplementedError


def shutdown() -> None:
    """Leave the job; `init` may be called again, by all ranks."""
    raise NotImplementedError


def engine_of(process_set: ProcessSet | int) -> Engine:
    """Return the engine of a process set that this rank belongs to.

    Raises
    ------
    ValueError
        Not initialized, no such set, or this rank is not in it, in Horovod's words.
    """
    raise NotImplementedError


def rank() -> int:
    """Return this rank's number in the job; likewise size, local_rank, local_size, cross_..."""
    raise NotImplementedError


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    raise NotImplementedError


__all__: list[Any] = []
