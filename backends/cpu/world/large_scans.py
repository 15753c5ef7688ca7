"""Scans of large arrays between hosts: each host scans its inputs, then adds those before it.

Only for ranks that are ordered by host, so that all inputs before a host's ranks are on other
hosts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpucoll.algorithms import choice
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.world.phases import Bytes, Run, combine
from gpucoll.collectives import Collective
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.streams import Reduction


def _scan(run: Run) -> None:
    collective = run.request.collective
    run.agree()
    mine, output = run.input(), run.output()
    size = mine.size
    kept = mine.copy() if _is_last(run) else mine  # in place, the scan overwrites it
    _scan_here(run, collective, mine, output)
    work = np.empty(2 * size if run.leads else 0, np.uint8)  # this host's; the hosts before it
    _gather_total(run, kept, output, work[:size])
    algorithm = choice.choose(Collective.EXCLUSIVE_SCAN, size, run.hosts.count, commutative=False)
    words, data = run.block.words, run.request.data
    parts = data.item_bytes // int(words[Call.part_bytes])
    kernel, parameter = int(words[Call.kernel]), int(words[Call.parameter])
    reduction = Reduction(kernel, data.item_bytes, parts, parameter)
    run.transfer(algorithm.function, [0, size, 2 * size], work, reduction=reduction)
    if run.group.here == 0:
        return
    before = work[size:] if run.leads else np.empty(size, np.uint8)
    run.spread(before)
    if collective.excludes_own and run.leads:
        output[:] = before  # no other rank of this host is before it
    else:
        combine(run, [before, output], output, 1)


def _is_last(run: Run) -> bool:
    return run.here[-1] == run.group.rank


def _gather_total(run: Run, mine: Bytes, scanned: Bytes, total: Bytes) -> None:
    """Bring the total of this host's inputs, which its last rank has, to the leader."""
    found = np.empty(0, np.uint8)
    if _is_last(run):
        found = scanned
        if run.request.collective.excludes_own:
            found = mine
            if len(run.here) > 1:
                combine(run, [scanned, mine], found, 1)
    sizes = [mine.size if rank == run.here[-1] else 0 for rank in run.here]
    run.gather_into(total if run.leads else None, found, sizes)


def _scan_here(run: Run, collective: Collective, mine: Bytes, output: Bytes) -> None:
    """Scan the inputs of this host's ranks."""
    if len(run.here) > 1 or collective.excludes_own:
        run.inside(collective, _typed(run, mine), _typed(run, output), op=run.request.op)
    elif output.ctypes.data != mine.ctypes.data:
        output[:] = mine


def _typed(run: Run, array: Bytes) -> Buffer:
    data = run.request.data
    count = array.nbytes // data.item_bytes
    return Buffer(array.ctypes.data, (count,), data.dtype, data.item_bytes, array)


LARGE_SCANS: dict[Collective, Callable[[Run], None]] = {
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
