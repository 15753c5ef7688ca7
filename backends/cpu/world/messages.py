"""Messages between any two ranks of several hosts: one host's table, and connections.

The table (`gpucoll.backends.cpu.host.message_table`) numbers the ranks of this host first and then
those of all others. Users give ranks. Numbers are translated in rows and requests, and in front of
the compiled entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host import message_step
from gpucoll.backends.cpu.host.message_rows import PendingTransfers, Rows
from gpucoll.backends.cpu.host.message_table import MessageTable
from gpucoll.backends.cpu.world.message_thread import MessageThread
from gpucoll.backends.cpu.world.message_wires import Carriers
from gpucoll.backends.protocol import MessageRequest
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context, Kind, Mailbox, Transfer, TransferTable

_PEER, _FOUND_PEER = int(Transfer.peer), int(Transfer.found_peer)
_SEND = int(Kind.SEND)
_TAG_AND_TIMEOUT = 2
_CARRIED_YIELDS = 1000
"""How often a wait yields before it sleeps, if nothing wakes it immediately: a carrier does not
wake it, but the thread looks every millisecond."""


class WorldRows(Rows):
    """Rows that hold the table's numbers and show the user's ranks."""

    __slots__ = ("_ends", "_ranks")

    def translate(self, ranks: Sequence[int], ends: dict[int, int]) -> WorldRows:
        """Set the ranks by the table's numbers, and the reverse; return this object."""
        self._ranks, self._ends = ranks, ends
        return self

    def fill(
        self,
        requests: Sequence[MessageRequest],
        timeout_ns: int,
        deadline_ns: int,
        withdraws: bool = False,
    ) -> list[Any]:
        """Describe requests; return what must be kept alive until they are over."""
        kept = super().fill(requests, timeout_ns, deadline_ns, withdraws)
        for place, request in enumerate(requests):
            self.words[place * Transfer.n_words + _PEER] = self._ends.get(
                request.peer, request.peer
            )
        return kept

    def request(self) -> MessageRequest:
        """Return what the first row asked for, as a request without its buffer."""
        request = super().request()
        request.peer = self._shown(request.peer)
        return request

    def origin(self) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of the message that the first row found."""
        end, tag, size_bytes = super().origin()
        return self._shown(end), tag, size_bytes

    def settle(self, place: int, request: MessageRequest, error: Exception | None) -> None:
        """Write the outcome of a row that is over into its request."""
        request.found_peer = -1
        super().settle(place, request, error)
        request.found_peer = self._shown(request.found_peer)

    def _shown(self, end: int) -> int:
        return self._ranks[end] if end >= 0 else end


class WorldMessages(MessageTable):
    """Sends, receives and probes of one rank among the ranks of several hosts.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    carriers : Carriers, optional
        Moves bytes between hosts in place of connections; this object owns it.
    """

    def __init__(self, group: WorldGroup, carriers: Carriers | None = None) -> None:
        assert group.pairs is not None
        members = group.host.members
        self._ranks = members.job.numbers
        self._end_of = {rank: end for end, rank in enumerate(self._ranks)}
        self._is_carried = carriers is not None
        super().__init__(group.host, group)
        elsewhere = {rank: self._end_of[rank] for rank in self._ranks[members.world_size :]}
        self._unconnected = set(elsewhere)
        """Ranks of other hosts to which nothing was sent yet."""
        self._elsewhere = frozenset(elsewhere)
        self._thread = MessageThread(
            group, group.pairs, self._words, self._steps, elsewhere, carriers
        )
        self._words[TransferTable.left] = self._thread.left.ctypes.data
        self._wired_post: Callable[..., int] | None = None
        # Data for other hosts stays in this rank's own memory until they ask for it.
        self._steps[Context.single_copy_max_bytes] = 0
        self._steps[Context.fetched_min_bytes] = 0  # for ranks of this host, too: not measured
        for end in elsewhere.values():
            members.store(members.status_offset(end) + layout.STATUS_COPIES, 1)
        self._count_as_users()
        group.host.at_close(partial(_stop, self._thread, self._address))
        self._thread.start()

    def _new_context(self) -> npt.NDArray[np.int64]:
        context = super()._new_context()
        if self._is_carried:
            context[Context.yields] = _CARRIED_YIELDS
        return context

    def _post(self, rows: Rows, count: int) -> int:
        if self._wired_post is None:
            if not self._words[TransferTable.wires]:
                return super()._post(rows, count)
            self._wired_post = self._thread.post
        return self._wired_post(self._address, rows.address, count)

    def _count_as_users(self) -> None:
        """Put the translation of ranks in front of the compiled entries."""
        self.send = self._sending(self.send)
        self.begin_send = self._sending(self.begin_send)
        self.receive = self._receiving(self.receive)
        self.begin_receive = self._receiving(self.begin_receive)
        self.receive_row = self._receiving(self.receive_row)
        self.take, self.find = self._taking(self.take), self._taking(self.find)

    def _sending(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        ends, unconnected = self._end_of, self._unconnected

        def send(x: Any, dest: Any, *further: Any) -> Any:
            if type(dest) is not int or dest not in ends:
                return None
            if dest in unconnected:
                self._connect(dest)
            return entry(x, ends[dest], *further)

        return send

    def _receiving(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        ends = {**self._end_of, -1: -1}

        def receive(x: Any, source: Any, *further: Any) -> Any:
            if type(source) is not int or source not in ends:
                return None
            if len(further) <= _TAG_AND_TIMEOUT:
                return entry(x, ends[source], *further)
            dest, source, further = source, further[0], further[1:]
            if dest < 0 or type(source) is not int or source not in ends:
                return None
            if dest in self._unconnected:
                self._connect(dest)
            return entry(x, ends[dest], ends[source], *further)

        return receive

    def _taking(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        ends = {**self._end_of, -1: -1}

        def take(source: Any, tag: Any, timeout_s: Any) -> Any:
            if type(source) is not int or source not in ends:
                return None
            return entry(ends[source], tag, timeout_s)

        return take

    def _connect(self, rank: int) -> None:
        self._unconnected.discard(rank)
        self._thread.want(rank)

    def _connect_for(self, requests: Sequence[MessageRequest]) -> None:
        for request in requests:
            if request.kind == _SEND and request.peer in self._unconnected:
                self._connect(request.peer)

    # --- rows and requests ------------------------------------------------------------------------

    def _new_rows(self, count: int) -> Rows:
        return WorldRows(count).translate(self._ranks, self._end_of)

    def _rows_of(self, row: bytearray) -> Rows:
        rows = WorldRows.of(row)
        assert isinstance(rows, WorldRows)
        return rows.translate(self._ranks, self._end_of)

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return the found message: see `MessageTable.plain_array`."""
        found = super().plain_array(row)
        return None if found is None else (self._ranks[found[0]], *found[1:])

    def start(
        self, requests: Sequence[MessageRequest], timeout_s: float | None
    ) -> PendingTransfers:
        """Start requests, in this order, after all that were started before."""
        self._connect_for(requests)
        return super().start(requests, timeout_s)

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Start requests and wait until all are over, as a blocking call."""
        self._connect_for(requests)
        super().run(requests, timeout_s)

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], object]:
        """Return a function that sends or receives the same memory: see `MessageTable.plan`."""
        self._connect_for([request])
        return super().plan(request)

    # --- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Release everything; pending messages will never be over."""
        if not self._group.is_forked and not self._words[TransferTable.is_dead]:
            self._thread.say_bye(self._receivers())
        super().end()
        if not self._group.is_forked:
            _stop(self._thread, self._address)

    def _receivers(self) -> list[int]:
        """Return the ranks of other hosts to which this one has sent something."""
        sent = self._peers[:, Mailbox.out_number]
        return [rank for rank in self._elsewhere if sent[self._end_of[rank]]]

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of the messages that arrived and were not received."""
        return [(self._ranks[end], tag) for end, tag in super().unreceived()]

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and number of the messages that wait at ranks which have closed."""
        return [(self._ranks[end], count) for end, count in super().undelivered()]

    def _has_closed(self, rank: int) -> bool:
        if rank >= self._group.world_size:
            return bool(self._thread.left[rank])
        return super()._has_closed(rank)


def _stop(thread: MessageThread, table: int) -> None:
    """End the thread, and make sure that nothing uses the connections any more."""
    thread.stop()
    message_step.message_end.ctypes(table)
    thread.end_carriers()
    thread.drop()
