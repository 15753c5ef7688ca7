"""Reductions between hosts.

Every leader gets the inputs of all ranks and combines them as a single host would, to the same
bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gpucoll.backends.cpu.world.phases import Bytes, Run, at_address, cut, joined
from gpucoll.collectives import Collective
from gpucoll.group.world.messages import pack, unpack
from gpucoll.kernels.cpu.addresses import REDUCE_ARGUMENTS
from gpucoll.transport.shared.words import Call

ROUND_BYTES: Final = 1 << 20
"""How much each leader receives in one round of uncombined inputs."""


@functools.cache
def _kernel(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * REDUCE_ARGUMENTS)(address)


def combine(run: Run, sources: Sequence[Bytes], destination: Bytes, n_ranks: int) -> None:
    """Combine the inputs of the first ranks, in order, with the call's operation."""
    words = run.block.words
    if not destination.size:
        return
    addresses = np.array([source.ctypes.data for source in sources], np.int64)
    landing = np.array([destination.ctypes.data], np.int64)
    count = destination.size // int(words[Call.part_bytes])
    parameter = int(words[Call.parameter])
    parameter += int(words[Call.parameter_stride]) * (n_ranks - 1)
    _kernel(int(words[Call.kernel]))(
        landing.ctypes.data, 1, addresses.ctypes.data, len(addresses), count, parameter, 0
    )


# --- uncombined inputs ----------------------------------------------------------------------------


def _rounds(run: Run, size_bytes: int) -> list[slice]:
    """Return the parts of an array that are exchanged in one round each."""
    item_bytes = max(run.request.data.item_bytes, 1)
    step = max(ROUND_BYTES // run.group.world_size // item_bytes, 1) * item_bytes
    return [slice(at, min(at + step, size_bytes)) for at in range(0, max(size_bytes, 1), step)]


def _inputs(run: Run, mine: Bytes) -> list[Bytes]:
    """Return, on the leader, the input bytes of all ranks, in rank order."""
    pieces = run.gather(mine, [mine.size] * len(run.here))
    found = run.between(lambda: pack([piece.tobytes() for piece in pieces]))
    ordered = run.hosts.in_rank_order(unpack(part) for part in found) if run.leads else []
    return [np.frombuffer(piece, np.uint8) for piece in ordered]


def _everyones(run: Run) -> list[Bytes]:
    """Return the inputs of all ranks, in rank order, on every rank."""
    mine = run.input()
    inputs = _inputs(run, mine)
    whole = np.empty(mine.size * run.group.world_size, np.uint8)
    if run.leads:
        whole[:] = joined(inputs)
    run.spread(whole)
    return cut(whole, [mine.size] * run.group.world_size)


def _is_int(run: Run) -> bool:
    """Return whether each rank must combine alone: some may have given exact Python ints."""
    data = run.request.data
    return data.dtype == "int64" and data.count == 1 and not run.request.parts


def _all_reduce_ordered(run: Run) -> None:
    if _is_int(run):
        inputs = _everyones(run)
        combine(run, inputs, run.output(), len(inputs))
        return
    mine, output = run.input(), run.output()
    for place in _rounds(run, mine.size):
        inputs = _inputs(run, mine[place])
        if run.leads:
            combine(run, inputs, output[place], len(inputs))
        run.spread(output[place])
    run.put(output)


def _reduce_ordered(run: Run) -> None:
    if _is_int(run):
        inputs = _everyones(run)
        if run.group.rank == run.request.root:
            combine(run, inputs, run.output(), len(inputs))
        return
    mine = run.input()
    gets = run.request.root in run.here
    output = run.output() if run.group.rank == run.request.root else None
    for place in _rounds(run, mine.size):
        inputs = _inputs(run, mine[place])
        if not gets:
            continue
        size = mine[place].size
        result = np.empty(size if run.leads else 0, np.uint8)
        if run.leads:
            combine(run, inputs, result, len(inputs))
        sizes = [size if rank == run.request.root else 0 for rank in run.here]
        landing = output[place] if output is not None else np.empty(0, np.uint8)
        run.scatter([result] if run.leads else None, landing, sizes)


def _scan_ordered(run: Run) -> None:
    mine, output = run.input(), run.output()
    n_operands, world_size = run.request.collective.n_operands, run.group.world_size
    if _is_int(run):
        inputs, n_ranks = _everyones(run), n_operands(run.group.rank, world_size)
        if n_ranks:
            combine(run, inputs[:n_ranks], output, n_ranks)
        else:
            output[:] = _prefix(run, inputs, 0, output.size)
        return
    for place in _rounds(run, mine.size):
        inputs = _inputs(run, mine[place])
        size = mine[place].size
        results = None
        if run.leads:
            counts = [n_operands(rank, world_size) for rank in run.here]
            results = [_prefix(run, inputs, count, size) for count in counts]
        run.scatter(results, output[place], [size] * len(run.here))


def _prefix(run: Run, inputs: list[Bytes], n_ranks: int, size: int) -> Bytes:
    """Return the combination of the first ranks' inputs; for none, the identity."""
    result = np.empty(size, np.uint8)
    if n_ranks:
        combine(run, inputs[:n_ranks], result, n_ranks)
        return result
    item_bytes = run.request.data.item_bytes
    address = int(run.block.words[Call.identity])
    identity = at_address(address, item_bytes)
    result[:] = np.tile(identity, size // item_bytes)
    return result


REDUCTIONS: dict[Collective, Callable[[Run], None]] = {
    Collective.ALL_REDUCE: _all_reduce_ordered,
    Collective.ALL_REDUCE_LIST: _all_reduce_ordered,
    Collective.REDUCE: _reduce_ordered,
    Collective.SCAN: _scan_ordered,
    Collective.EXCLUSIVE_SCAN: _scan_ordered,
}
