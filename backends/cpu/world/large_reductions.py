"""Reductions of large arrays between hosts: each host combines its inputs, then leaders combine.

Every result combines the inputs of all ranks, grouped by host. One host, or the two hosts of a pair
in the same way, combine each byte in one order, so all ranks get the same bits. Ops that do not
commute stay in rank order: they need ranks that are ordered by host, and schedules that keep the
order of hosts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpucoll.algorithms import choice
from gpucoll.algorithms.table import Algorithm
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.world.phases import Bytes, Run, combine, cut
from gpucoll.backends.cpu.world.sizes import (
    PIECE_BYTES,
    block_sizes,
    host_edges,
    in_host_order,
    pieces_of,
    sections_of,
)
from gpucoll.collectives import Collective
from gpucoll.group.world.schedules import Section
from gpucoll.kernels.cpu.addresses import HALF_TYPES, changes_inputs, reduce_kernel
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.streams import Reduction
from gpucoll.types import ReduceOp


class _Operation:
    """How a call's inputs are combined: on each host, between hosts, and at the end.

    ``avg`` is a sum that is divided once. For half types, whose sum may be out of range even if the
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
        kernel, parameter = int(words[Call.kernel]), int(words[Call.parameter])
        parts = data.item_bytes // int(words[Call.part_bytes])  # always 1 for a user's op
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
        """Apply the last step to the combined inputs of all ranks."""
        if self.divides:
            combine(self._run, [result], result, self._run.group.world_size)

    def _typed(self, array: Bytes) -> Buffer:
        data = self._run.request.data
        count = array.nbytes // data.item_bytes
        return Buffer(array.ctypes.data, (count,), data.dtype, data.item_bytes, array)


def _choose(run: Run, collective: Collective, size_bytes: int, operation: _Operation) -> Algorithm:
    return choice.choose(collective, size_bytes, run.hosts.count, commutative=operation.commutes)


def _all_reduce(run: Run) -> None:
    run.agree()
    operation = _Operation(run)
    mine, output = run.input(), run.output()
    item_bytes = run.request.data.item_bytes
    algorithm = _choose(run, Collective.ALL_REDUCE, output.size, operation)
    pieces = pieces_of(output.size, item_bytes)
    sections = sections_of(pieces, algorithm.blocks(run.hosts.count), item_bytes)
    moving = run.begin(
        algorithm.function, sections, output.ctypes.data, reduction=operation.reduction, ready=0
    )
    for number, piece in enumerate(pieces):
        operation.reduce_here(mine[piece], output[piece], run.request.collective.of_one)
        moving.let(number + 1)
    for number, piece in enumerate(pieces):
        moving.finish_sections(number + 1)
        if run.leads:
            operation.finish(output[piece])
        run.spread(output[piece])
    moving.finish()
    run.put(output)


def _reduce(run: Run) -> None:
    run.agree()
    operation, root = _Operation(run), run.request.root
    mine, is_root = run.input(), run.group.rank == root
    output = run.output() if is_root else np.empty(0, np.uint8)
    work = np.empty(0, np.uint8)
    if run.leads:
        work = output if is_root else np.empty(mine.size, np.uint8)
    item_bytes = run.request.data.item_bytes
    pieces = pieces_of(mine.size, item_bytes)
    moving = run.begin(
        _choose(run, Collective.REDUCE, mine.size, operation).function,
        sections_of(pieces, 1, item_bytes),
        work.ctypes.data,
        root=root,
        reduction=operation.reduction,
        ready=0,
    )
    for number, piece in enumerate(pieces):
        landing = work[piece] if run.leads else None
        operation.reduce_here(mine[piece], landing, Collective.REDUCE)
        moving.let(number + 1)
    for number, piece in enumerate(pieces if root in run.here else []):
        moving.finish_sections(number + 1)
        if run.leads:
            operation.finish(work[piece])
        if run.here[0] != root:
            sizes = [piece.stop - piece.start if rank == root else 0 for rank in run.here]
            run.scatter([work[piece]] if run.leads else None, output[piece], sizes)
    moving.finish()


def _reduce_scatter(run: Run) -> None:
    run.agree()
    operation = _Operation(run)
    mine, output = run.input(), run.output()
    sizes = block_sizes(run.request, run.group.world_size, mine.size)
    edges, here = host_edges(run, sizes), run.group.here
    whole = np.empty(mine.size, np.uint8)
    order = _order_of_blocks(run, mine.size)
    if order is None:
        operation.reduce_here(mine, whole, Collective.ALL_REDUCE)
    work = in_host_order(run, whole, sizes) if run.leads else whole
    order = order or []
    gates = [order.index(block) + 1 if order else 0 for block in range(run.hosts.count)]
    moving = run.begin(
        _choose(run, Collective.REDUCE_SCATTER, mine.size, operation).function,
        [Section.of(edges, gates)],
        work.ctypes.data,
        reduction=operation.reduction,
        ready=0,
    )
    for number, block in enumerate(order):
        piece = slice(edges[block], edges[block + 1])
        operation.reduce_here(mine[piece], whole[piece], Collective.ALL_REDUCE)
        moving.let(number + 1)
    moving.finish()
    parts = None
    if run.leads:
        own = work[edges[here] : edges[here + 1]]
        operation.finish(own)
        parts = cut(own, [sizes[rank] for rank in run.here])
    run.scatter(parts, output, [sizes[rank] for rank in run.here])


def _order_of_blocks(run: Run, size_bytes: int) -> list[int] | None:
    """Return the order in which a ring needs the hosts' blocks; None: all of them together."""
    count, here = run.hosts.count, run.group.here
    if not run.hosts.is_in_order or size_bytes // count < PIECE_BYTES:
        return None
    return [(here - 1 - step) % count for step in range(count)]


LARGE_REDUCTIONS: dict[Collective, Callable[[Run], None]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
}
