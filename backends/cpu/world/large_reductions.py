"""Reductions of large arrays between hosts: each host combines its own, then the leaders theirs.

Every result is of all ranks' inputs, grouped by host; each byte of it is combined in one order on
one host, or by the two of a pair alike, so all ranks get the same bits. What does not commute stays
in rank order: then ranks are host by host, and schedules are taken that keep the order of hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from gpucoll.algorithms import chain, doubling, pairwise, ring, trees
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.world.phases import Bytes, Run, cut
from gpucoll.backends.cpu.world.reductions import combine
from gpucoll.backends.cpu.world.sizes import block_sizes, host_edges, in_host_order
from gpucoll.kernels.cpu.addresses import (
    HALF_TYPES,
    changes_inputs,
    reduce_kernel,
)
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.streams import Reduction
from gpucoll.types import Collective, ReduceOp

DOUBLING_BYTES: Final = 32 << 10
"""Up to so much is reduced by recursive doubling, in fewer steps with more bytes; a spike between
namespaces: 16 KiB 270 us against 423 of the ring, 64 KiB 1092 against 827 (2026-11-22)."""
TREE_BYTES: Final = 256 << 10
"""Up to so much goes by a tree: a chain has more steps, but less in each."""


class _Operation:
    """How a call's inputs are combined: on each host, between hosts, and what is done at the end.

    ``avg`` is a sum that is divided once. Of half types, whose sums may be out of range where their
    average is not, each input is divided instead.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        op, data = run.request.op, run.request.data
        assert op is not None
        between = op
        is_average, is_half = op.name == "avg", data.dtype in HALF_TYPES
        self.divides = is_average and not is_half
        if is_average:
            count = run.group.world_size
            between = ReduceOp.SUM
            op = ReduceOp.scaled_sum(1 / count) if is_half else between
        elif op.name == "scaled_sum":
            between = ReduceOp.SUM
        self.on_host = op
        self.commutes = op.commutative
        self._prepares = op.name == "scaled_sum" or changes_inputs(op.name)
        words = run.block.words
        kernel, parameter = int(words[Call.KERNEL]), int(words[Call.PARAMETER])
        parts = data.item_bytes // int(words[Call.PART_BYTES])  # of a user's op always 1
        if between is not run.request.op:
            kernel, parameter = reduce_kernel(data.dtype, between.name), 0
        self.reduction = Reduction(kernel, data.item_bytes, parts, parameter)

    def reduce_here(self, mine: Bytes, landing: Bytes | None, collective: Collective) -> None:
        """Combine the inputs of this host's ranks."""
        if len(self._run.here) == 1 and not self._prepares:
            if landing is not None and landing.ctypes.data != mine.ctypes.data:
                landing[:] = mine
            return
        destination = None if landing is None else self._typed(landing)
        self._run.inside(collective, self._typed(mine), destination, op=self.on_host)

    def finish(self, result: Bytes) -> None:
        """Do what is to be done to the combined inputs of all."""
        if self.divides:
            combine(self._run, [result], result, self._run.group.world_size)

    def _typed(self, array: Bytes) -> Buffer:
        data = self._run.request.data
        count = array.nbytes // data.item_bytes
        return Buffer(array.ctypes.data, (count,), data.dtype, data.item_bytes, array)


def _equal_edges(run: Run, size_bytes: int) -> list[int]:
    """Return the edges of blocks of whole items, one for each host, as equal as can be."""
    count, item_bytes = run.hosts.count, run.request.data.item_bytes
    n_items = size_bytes // item_bytes
    return [n_items * block // count * item_bytes for block in range(count + 1)]


def _all_reduce(run: Run) -> None:
    run.agree()
    operation = _Operation(run)
    mine, output = run.input(), run.output()
    operation.reduce_here(mine, output, Collective.ALL_REDUCE)
    if output.size <= DOUBLING_BYTES or not operation.commutes:
        edges, make = [0, output.size], doubling.all_reduce
    else:
        edges, make = _equal_edges(run, output.size), ring.all_reduce
    run.transfer(make, edges, output, reduction=operation.reduction)
    if run.leads:
        operation.finish(output)
    run.spread(output)
    run.put(output)


def _reduce(run: Run) -> None:
    run.agree()
    operation, root = _Operation(run), run.request.root
    mine, is_root = run.input(), run.group.rank == root
    output = run.output() if is_root else np.empty(0, np.uint8)
    # Of a call that is not reduce itself, the loop inside the host gives every rank a result.
    has_result = run.leads or int(run.block.words[Call.COLLECTIVE]) != Collective.REDUCE
    work = None
    if has_result:
        work = output if run.leads and is_root else np.empty(mine.size, np.uint8)
    operation.reduce_here(mine, work, Collective.REDUCE)
    is_tree = mine.size <= TREE_BYTES or not operation.commutes
    make = trees.reduce if is_tree else chain.reduce
    if run.leads:
        assert work is not None
        run.transfer(make, [0, mine.size], work, root=root, reduction=operation.reduction)
    if root not in run.here:
        return
    if run.leads:
        assert work is not None
        operation.finish(work)
    if run.here[0] != root:
        sizes = [mine.size if rank == root else 0 for rank in run.here]
        parts = [work] if run.leads and work is not None else None
        run.scatter(parts, output, sizes)


def _reduce_scatter(run: Run) -> None:
    run.agree()
    operation = _Operation(run)
    mine, output = run.input(), run.output()
    sizes = block_sizes(run, mine.size)
    # The loop inside the host gives every rank a result: the call is no reduce.
    whole = np.empty(mine.size, np.uint8)
    operation.reduce_here(mine, whole, Collective.ALL_REDUCE)
    parts = None
    if run.leads:
        edges = host_edges(run, sizes)
        work = in_host_order(run, whole, sizes)
        make = ring.reduce_scatter if operation.commutes else pairwise.reduce_scatter
        run.transfer(make, edges, work, reduction=operation.reduction)
        own = work[edges[run.group.here] : edges[run.group.here + 1]]
        operation.finish(own)
        parts = cut(own, [sizes[rank] for rank in run.here])
    run.scatter(parts, output, [sizes[rank] for rank in run.here])


LARGE_REDUCTIONS: dict[Collective, Callable[[Run], None]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
}
