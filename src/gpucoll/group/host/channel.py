"""The control channel's collectives: give every rank's bytes to every rank; the barrier.

A payload has the same size on all ranks and fits into a slot; longer data goes in pieces. An
exchange without payload is a barrier.

Callers send pickled objects over the channel. Neither the channel nor the object collectives
unpickle anything that another user's process could have written: only processes of this user, as
the kernel has certified, are given the descriptors of the segment.
"""

from __future__ import annotations

import numpy as np

from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.group.host.group import HostGroup
from gpucoll.kernels.cpu.jit import compiled
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.steps import (
    NOT_SHARED,
    begin,
    close_record,
    make_ready,
    payload_of,
    post,
    wait_all_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Path, Status

_LENGTH_BYTES = 8
_FIRST_PIECE_BYTES = 1024
_MOST_KEPT = 64


@compiled
def exchange_loop(context: Context, call: Call) -> int:
    """Gather every rank's payload, in rank order, at the destination; return a status."""
    size_bytes = call.size_bytes
    status = make_ready(context, size_bytes, size_bytes)
    if status == Status.OK:
        status = begin(context, call)
    if status != Status.OK:
        return status
    sequence = context.sequence
    copy = context.copy_plain
    if size_bytes > 0:
        mine = payload_of(context, sequence, context.rank, size_bytes)
        call_copy(copy, mine, call.source, size_bytes, 0)
    post(context, call, NOT_SHARED, NOT_SHARED)
    status = wait_all_arrived(context, call)
    if status != Status.OK:
        return status
    if size_bytes > 0:
        for rank in range(context.world_size):
            payload = payload_of(context, sequence, rank, size_bytes)
            call_copy(copy, call.destination + rank * size_bytes, payload, size_bytes, 0)
    context.path = Path.ONE_SHOT
    close_record(context)
    return Status.OK


class ControlChannel:
    """Moves bytes between all ranks of a `HostGroup`."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._piece_bytes = group.members.tuning.one_shot_bytes
        self._exchanges: dict[tuple[Collective, int, int], _Exchange] = {}
        self._barrier = CallBlock(Collective.BARRIER, exchange_loop.address)
        self._barrier.set_arrays((0,), 0, 0)
        self.run_barrier = group.prepare(self._barrier)
        """Runs a barrier and returns its `Status`; not while asynchronous calls are queued."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has arrived."""
        self._group.run(self._barrier, timeout_s)

    def all_gather_bytes(
        self,
        data: bytes,
        collective: Collective,
        root: int = NO_ROOT,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        """Return every rank's bytes, by rank.

        Cost: one exchange if the longest rank's data is at most 1 KiB, and one more for each
        further slot.
        """
        first = min(_FIRST_PIECE_BYTES, self._piece_bytes)
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: first - _LENGTH_BYTES]
        heads = self._exchange(head.ljust(first, b"\0"), collective, root, timeout_s)
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "little") for part in heads]
        bodies = [bytearray(part[_LENGTH_BYTES:]) for part in heads]
        position = first - _LENGTH_BYTES
        while position < max(lengths):
            size = min(self._piece_bytes, max(lengths) - position)
            piece = data[position : position + size].ljust(size, b"\0")
            for body, part in zip(
                bodies, self._exchange(piece, collective, root, timeout_s), strict=True
            ):
                body += part
            position += size
        return [bytes(body[:length]) for body, length in zip(bodies, lengths, strict=True)]

    def _exchange(
        self, piece: bytes, collective: Collective, root: int, timeout_s: float | None
    ) -> list[bytes]:
        key = collective, root, len(piece)
        # It is taken out while it is in use: a call of another thread makes one of its own.
        exchange = self._exchanges.pop(key, None) or _Exchange(self._group, *key)
        parts = exchange.run(piece, timeout_s)
        if len(piece) <= _FIRST_PIECE_BYTES and len(self._exchanges) < _MOST_KEPT:
            self._exchanges[key] = exchange
        return parts


class _Exchange:
    """A prepared exchange of pieces of `size_bytes`.

    Parameters
    ----------
    group : HostGroup
        The ranks.
    collective, root
        What ranks compare.
    size_bytes : int
        Size of each rank's piece.
    """

    def __init__(
        self, group: HostGroup, collective: Collective, root: int, size_bytes: int
    ) -> None:
        self._group = group
        self._source = np.empty(size_bytes, np.uint8)
        self._gathered = np.empty((group.world_size, size_bytes), np.uint8)
        self._call = CallBlock(collective, exchange_loop.address, root=root)
        addresses = self._source.ctypes.data, self._gathered.ctypes.data
        self._call.set_arrays((size_bytes,), *addresses)
        self._run = group.prepare(self._call, queued=True)

    def run(self, piece: bytes, timeout_s: float | None) -> list[bytes]:
        """Return every rank's piece, by rank."""
        self._source[:] = np.frombuffer(piece, np.uint8)
        self._group.run_prepared(self._run, timeout_s)
        return [row.tobytes() for row in self._gathered]
