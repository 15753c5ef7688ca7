"""Run a call's reduce kernel over the context's tables of addresses, for ranks that get results.

The tables are by rank: the address of each rank's input, and that of its result.
"""

from __future__ import annotations

from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_reduce
from gpucoll.transport.shared.operands import n_operands
from gpucoll.transport.shared.words import Call, Context


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
