"""Whose inputs make up a rank's result of a reduction, and the result of no inputs."""

from __future__ import annotations

from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.words import Call, Context

_PATTERN_BYTES = 16 << 10


@inline
def n_operands(call: Call, rank: int, world_size: int) -> int:
    """Return `Collective.n_operands` of a rank, or -1 if the rank gets no result."""
    if call.operands == Operands.UP_TO_OWN:
        return rank + 1
    if call.operands == Operands.BEFORE_OWN:
        return rank
    if call.flow == Flow.TO_ROOT and rank != call.root:
        return -1
    return world_size


@inline
def fill_with_identity(context: Context, call: Call, start: int, stop: int) -> None:
    """Fill a part of the destination with the op's identity; everything before it is filled."""
    destination, copy = call.destination, context.copy_plain
    if start == 0:
        start = min(call.item_bytes, stop)
        call_copy(copy, destination, call.identity, start, 0)
    while start < stop:
        step = min(start, _PATTERN_BYTES, stop - start)  # from memory that is still in the caches
        call_copy(copy, destination + start, destination, step, 0)
        start += step
