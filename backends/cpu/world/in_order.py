"""Reductions of large arrays in the order of the ranks, as compiled calls on slice after slice.

Compiled calls combine the inputs of all ranks from rank 0 on. Schedules between hosts do not keep
that order. So these reductions need it: ops that do not commute if ranks are not ordered by host,
scans whose partial results do not combine like inputs, and those with ``deterministic="order"``. In
a scan every byte moves to every host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.backend import BlockMaker
from gpucoll.backends.cpu.world.phases import Bytes, input_of, output_of, put_into
from gpucoll.backends.cpu.world.sizes import block_sizes
from gpucoll.backends.cpu.world.small import set_loop
from gpucoll.backends.protocol import PartOf, Request, RunByPython
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.group.in_one_piece import Deadline, in_one_piece
from gpucoll.group.world.group import WorldGroup
from gpucoll.kernels.cpu.addresses import changes_inputs
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call


def is_combined_in_order(request: Request, group: WorldGroup) -> bool:
    """Return whether a large call must go this way; the same on all ranks."""
    op, collective = request.op, request.collective
    if op is None:
        return False
    if group.keeps_order and op.depends_on_order(request.data.dtype):
        return True
    if collective.is_scan:  # hosts' partial results are combined like inputs
        changes = op.name in ("avg", "scaled_sum") or changes_inputs(op.name)
        return changes or not group.hosts.is_in_order
    return not op.commutative and not group.hosts.is_in_order


class CallInOrder(RunByPython):
    """A prepared reduction.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    blocks : BlockMaker
        Makes the call blocks of slices.
    request : Request
        The call.
    part_of : PartOf
        The call in the form in which ranks compare it.
    """

    def __init__(
        self, group: WorldGroup, blocks: BlockMaker, request: Request, part_of: PartOf
    ) -> None:
        self._group = group
        self._blocks = blocks
        self._request = request
        self._part_of = part_of
        self._calls: dict[tuple[int, int], tuple[Callable[[], int], CallBlock]] = {}
        """By root and size of a slice."""
        self._given: tuple[Bytes, Bytes] | None = None
        """Memory for compiled code, which must outlive a call that was given up."""

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        group = self._group
        deadline = Deadline(group.timeout_s if timeout_s is None else timeout_s)
        mine, output = self._given = input_of(self._request), output_of(self._request)
        with in_one_piece(group):
            for root, place, landing in self._slices(mine, output):
                run, block = self._call(root, place.stop - place.start)
                source, destination = mine.ctypes.data, output.ctypes.data
                block.words[Call.source] = source + place.start
                gets = root in (NO_ROOT, group.rank)
                block.words[Call.destination] = destination + landing if gets else 0
                group.calls.run_small(run, block, deadline.left_s)
        put_into(self._request, output)
        self._given = None

    def _slices(self, mine: Bytes, output: Bytes) -> Iterator[tuple[int, slice, int]]:
        """Yield the root of each slice, where it lies in the input, and its place in the output."""
        request, world_size = self._request, self._group.world_size
        item_bytes = request.data.item_bytes
        scans = request.collective.is_scan
        most_bytes = self._group.exchanges.most_compiled_bytes(scans=scans)
        step = max(most_bytes // world_size // item_bytes, 1) * item_bytes
        parts = [(request.root, mine.size)]
        if request.collective.spreads:
            parts = list(enumerate(block_sizes(request, world_size, mine.size)))
        start = 0
        for root, size_bytes in parts:
            for at in range(0, size_bytes, step):
                end = min(at + step, size_bytes)
                yield root, slice(start + at, start + end), at
            start += size_bytes

    def _call(self, root: int, size_bytes: int) -> tuple[Callable[[], int], CallBlock]:
        """Return what runs a slice, and its block; the address of the slice is not set yet."""
        made = self._calls.get((root, size_bytes))
        if made is None:
            request, data = self._request, self._request.data
            collective = request.collective.of_one
            if collective.spreads:
                collective = Collective.REDUCE
            like = Buffer(0, (size_bytes // data.item_bytes,), data.dtype, data.item_bytes, None)
            part = Request(collective, like, like, request.op, root, part_of=self._part_of)
            block = self._blocks.of(part)
            set_loop(block, self._group.exchanges)
            made = self._group.host.prepare(block, queued=True), block
            self._calls[root, size_bytes] = made
        return made
