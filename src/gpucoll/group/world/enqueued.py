"""Compare calls on GPU arrays between hosts.

The ranks of a host post into their own rings and compare those with the same compiled loop as on
one host alone. After these rings, the segment has one ring for each other host. The other host's
leader reports what all its ranks have called, and this host's leader writes it into that ring
(`Mirror`). So each rank compares its own call with those of the ranks here and of the other hosts,
whichever is late or differs. A ring stays full as long as some host has not compared the oldest
call in it.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpucoll.group.host.enqueued import EnqueuedCalls
from gpucoll.group.host.members import Members
from gpucoll.group.host.records import difference
from gpucoll.group.world.hosts import Hosts
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.words import Context, Status

_CALL: Final = struct.Struct("<Iqq")
"""One call of a host: digest of its signature; what is sent and received, summed over its ranks."""
_LOW: Final = 0xFFFFFFFF


def row_of(host: int, here: int, n_here: int) -> int:
    """Return the row of another host's calls in this host's segment."""
    return n_here + host - (host > here)


class WorldEnqueuedCalls(EnqueuedCalls):
    """This rank's ring of calls on GPU arrays, and how far all ranks of all hosts agree.

    Parameters
    ----------
    members : Members
        The ranks of this host.
    context : array
        A context of this rank for these calls alone.
    hosts : Hosts
        Which ranks are on which host.
    here : int
        This host's number.
    has_closed : callable
        Returns whether a rank has closed the communicator.
    ring : callable
        Makes the leader look for news on this host.
    """

    def __init__(
        self,
        members: Members,
        context: npt.NDArray[np.int64],
        hosts: Hosts,
        here: int,
        has_closed: Callable[[int], bool],
        ring: Callable[[], None],
    ) -> None:
        context[Context.world_size] = members.layout.enqueued_rows
        super().__init__(members, context)
        self._others = [host for host in range(hosts.count) if host != here]
        self._hosts = hosts
        self._has_closed = has_closed
        self._ring = ring
        self._told = 0, 0
        """The last call posted, and the last compared, when this rank last rang the leader."""

    def compare(self) -> Status:
        """Compare as far as all ranks have posted; return OK, MORE (a rank is late) or MISMATCH.

        Before that it has the leader report this rank's new calls to the other hosts.
        """
        self._tell_news()
        status = super().compare()
        self._tell_news()
        return status

    def _tell_news(self) -> None:
        """Ring the leader if its news let the other hosts go on."""
        sequence, compared = self.sequence, self.compared
        told_sequence, told_compared = self._told
        quarter = _quarter(self._members)
        if sequence != told_sequence or difference(compared, told_compared) >= quarter:
            self._told = sequence, compared
            self._ring()

    @property
    def late_rank(self) -> int:
        """A rank that the last `compare` found late, or -1."""
        row, n_here = super().late_rank, self._members.world_size
        if row < n_here:
            return row if row < 0 else self._members.number(row)
        ranks = self._hosts.ranks[self._others[row - n_here]]
        return next((rank for rank in ranks if self._has_closed(rank)), ranks[0])

    def say_failed(self) -> None:
        """Tell the ranks that wait for this rank's GPU that it will not connect."""
        super().say_failed()
        self._ring()

    def failed_ranks(self) -> list[int]:
        """Return the ranks whose GPU will not connect; of each other host, at most one."""
        members, found = self._members, super().failed_ranks()
        told = (
            members.load(members.enqueued_offset(row) + layout.ENQUEUED_FAILED)
            for row in range(members.world_size, members.layout.enqueued_rows)
        )
        return [*map(members.number, found), *(word - 1 for word in told if word)]


class Mirror:
    """A leader's part: reports the calls of the ranks here, and writes what other hosts report.

    Parameters
    ----------
    members : Members
        The ranks of this host.
    hosts : Hosts
        Which ranks are on which host.
    here : int
        This host's number.
    tell : callable
        Sends facts and data to every other host, in order.
    """

    def __init__(
        self,
        members: Members,
        hosts: Hosts,
        here: int,
        tell: Callable[[Mapping[str, Any], bytes], None],
    ) -> None:
        self._members = members
        self._here = here
        self._tell = tell
        self._lock = threading.RLock()
        self._is_open = False
        self._early: list[tuple[Mapping[str, Any], bytes]] = []
        self._heard = [0] * hosts.count
        """By host, the number of its ranks' last call that has been written here."""
        self._waiting: dict[int, list[tuple[int, Callable[[], None]]]] = defaultdict(list)
        self.told = 0
        """The number of the last call of the ranks here that was reported to the other hosts."""
        self._told_compared = self._told_failed = 0

    def open(self) -> None:
        """Write what has come and what comes from here on: the rings have memory now."""
        with self._lock:
            self._is_open = True
            early, self._early = self._early, []
            for facts, data in early:
                self.hear(facts, data)

    # --- of the ranks here ------------------------------------------------------------------------

    def take(self) -> bool:
        """Report what is new here to the other hosts; return whether anything was."""
        with self._lock:
            if not self._is_open:
                return False
            first, calls = self.told, self._new_calls()
            compared, failed = self._compared(), self._failed()
            quarter = _quarter(self._members)
            n_compared = difference(compared, self._told_compared)
            if not calls and failed == self._told_failed and n_compared < quarter:
                return False
            self._told_compared, self._told_failed = compared, failed
            facts = {"first": first, "compared": compared, "failed": failed}
            self._tell(facts, b"".join(calls))
            return True

    def _new_calls(self) -> list[bytes]:
        """Return the calls that all ranks here have posted, in order."""
        members = self._members
        found: list[bytes] = []
        places = range(members.world_size)
        while len(found) < members.tuning.enqueued_records:
            sequence = self.told + 1 & _LOW
            headers = {members.enqueued_header(place, sequence) for place in places}
            if any(header & _LOW != sequence for header in headers):
                break
            with members.held():
                records = [members.enqueued_words(place, sequence) for place in places]
                sent, received = (
                    _wrapped(sum(int(record[field]) for record in records))
                    for field in (Record.sent, Record.received)
                )
            if len(headers) > 1:  # they differ on this host already: make it differ everywhere
                sent = _wrapped(received + 1)
            found.append(_CALL.pack(headers.pop() >> 32 & _LOW, sent, received))
            self.told = sequence
        return found

    def _compared(self) -> int:
        """Return the number of the last call that all ranks here have compared."""
        members, least = self._members, self.told
        for place in range(members.world_size):
            word = members.load(members.enqueued_offset(place) + layout.ENQUEUED_COMPARED)
            if difference(word & _LOW, least) < 0:
                least = word & _LOW
        return least

    def _failed(self) -> int:
        """Return 1 plus the first rank here that could not connect its GPU; 0: there is none."""
        members = self._members
        for place in range(members.world_size):
            if members.load(members.enqueued_offset(place) + layout.ENQUEUED_FAILED):
                return members.number(place) + 1
        return 0

    # --- of other hosts ---------------------------------------------------------------------------

    def hear(self, facts: Mapping[str, Any], data: bytes) -> None:
        """Write what another host reports to where the ranks here compare it."""
        with self._lock:
            if not self._is_open:
                self._early.append((facts, data))
                return
            host, members = int(facts["from"]), self._members
            row = row_of(host, self._here, members.world_size)
            sequence = int(facts["first"])
            for digest, sent, received in _CALL.iter_unpack(data):
                sequence = sequence + 1 & _LOW
                self._write(row, sequence, digest, sent, received)
            line = members.enqueued_offset(row)
            members.store(line + layout.ENQUEUED_COMPARED, int(facts["compared"]) & _LOW)
            members.store(line + layout.ENQUEUED_FAILED, int(facts["failed"]))
            self._heard[host] = sequence
            waiting = self._waiting.pop(host, [])
        for number, function in waiting:
            self.after(host, number, function)

    def _write(self, row: int, sequence: int, digest: int, sent: int, received: int) -> None:
        members = self._members
        with members.held():
            record = members.enqueued_words(row, sequence)
            record[Record.sent], record[Record.received] = sent, received
        members.store_enqueued_header(row, sequence, _wrapped(digest << 32 | sequence))

    def after(self, host: int, sequence: int, function: Callable[[], None]) -> None:
        """Call a function once a host's calls up to this one are written here."""
        with self._lock:
            if difference(self._heard[host], sequence) < 0:
                self._waiting[host].append((sequence, function))
                return
        function()


def _quarter(members: Members) -> int:
    """Return how many compared calls are reported together, if there is nothing else to report."""
    return max(members.tuning.enqueued_records // 4, 1)


def _wrapped(value: int) -> int:
    """Return a sum, wrapped to a signed word of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63
