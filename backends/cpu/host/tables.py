"""Run a call's reduce kernel over the context's tables of addresses, for ranks that get results.

The tables are by rank: the address of each rank's input, and that of its result.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_reduce, get
from gpucoll.transport.shared.steps import (
    COLLECTIVE,
    KERNEL,
    PARAMETER,
    PART_BYTES,
    RANK,
    ROOT,
    WORLD_SIZE,
)
from gpucoll.transport.shared.words import Call, Context
from gpucoll.types import Collective

SOURCES, DESTINATIONS = int(Context.SOURCES), int(Context.DESTINATIONS)
SCAN_KERNEL, PARAMETER_STRIDE = int(Call.SCAN_KERNEL), int(Call.PARAMETER_STRIDE)
_REDUCE = int(Collective.REDUCE)
_SCAN, _EXCLUSIVE_SCAN = int(Collective.SCAN), int(Collective.EXCLUSIVE_SCAN)


@inline
def n_inputs(context, call):
    """Return how many ranks' inputs, from rank 0 on, make up this rank's result; 0: no result."""
    kind = get(call, COLLECTIVE)
    if kind == _SCAN:
        return get(context, RANK) + 1
    if kind == _EXCLUSIVE_SCAN:
        return get(context, RANK)
    if kind == _REDUCE and get(context, RANK) != get(call, ROOT):
        return 0
    return get(context, WORLD_SIZE)


@inline
def reduce_inputs(context, call, destination, n_sources, size_bytes, ahead):
    """Reduce the first `n_sources` inputs of the table, in order, into one destination."""
    call_reduce(
        get(call, KERNEL),
        destination,
        1,
        get(context, SOURCES),
        n_sources,
        size_bytes // get(call, PART_BYTES),
        get(call, PARAMETER) + (n_sources - 1) * get(call, PARAMETER_STRIDE),
        ahead,
    )


@inline
def reduce_for_all(context, call, size_bytes, ahead):
    """Reduce all inputs of the table for every rank that gets a result."""
    world_size, results = get(context, WORLD_SIZE), get(context, DESTINATIONS)
    if get(call, COLLECTIVE) == _REDUCE:
        root = results + 8 * get(call, ROOT)
        reduce_inputs(context, call, root, world_size, size_bytes, ahead)
        return
    scans = get(call, SCAN_KERNEL)
    call_reduce(
        get(call, KERNEL) if scans == 0 else scans,
        results,
        world_size,
        get(context, SOURCES),
        world_size,
        size_bytes // get(call, PART_BYTES),
        get(call, PARAMETER),
        ahead,
    )
