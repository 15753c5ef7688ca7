"""Whose inputs make up a rank's result of a reduction, and the kernel that makes it."""

from __future__ import annotations

from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_reduce
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


# --- the reduce kernel over tables of addresses ---------------------------------------------------

# The tables of a context are by rank: the address of each rank's input, and that of its result.


@inline
def n_inputs(context: Context, call: Call) -> int:
    """Return how many ranks' inputs this rank needs for its result; 0 also if it gets none."""
    return max(n_operands(call, context.rank, context.world_size), 0)


@inline
def reduce_inputs(
    context: Context, call: Call, destination: int, n_sources: int, size_bytes: int, ahead: int
) -> None:
    """Reduce the first `n_sources` inputs of the table, in order, into one destination."""
    call_reduce(
        call.kernel,
        destination,
        1,
        context.sources,
        n_sources,
        size_bytes // call.part_bytes,
        call.parameter + (n_sources - 1) * call.parameter_stride,
        ahead,
    )


@inline
def reduce_for_all(context: Context, call: Call, size_bytes: int, ahead: int) -> None:
    """Reduce all inputs of the table for every rank that gets a result."""
    world_size, results = context.world_size, context.destinations
    if call.flow == Flow.TO_ROOT:
        root = results + 8 * call.root
        reduce_inputs(context, call, root, world_size, size_bytes, ahead)
        return
    scans = call.scan_kernel
    call_reduce(
        call.kernel if scans == 0 else scans,
        results,
        world_size,
        context.sources,
        world_size,
        size_bytes // call.part_bytes,
        call.parameter,
        ahead,
    )
