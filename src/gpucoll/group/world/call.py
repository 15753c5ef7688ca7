"""One collective of all hosts, as a rank runs it: exchanges, transfers, and how they end."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import NoReturn

from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    MismatchError,
    RendezvousDeadlineError,
)
from gpucoll.group.world.bulk import Bulk
from gpucoll.group.world.diagnosis import WorldDiagnosis
from gpucoll.group.world.exchanges import Exchanges
from gpucoll.group.world.failures import BROKEN
from gpucoll.group.world.news import WorldNews
from gpucoll.group.world.parts import HostPart, check_agreement
from gpucoll.group.world.schedules import Schedule
from gpucoll.group.world.state import WorldState
from gpucoll.transport.shared.layout import EVENT_ABORT
from gpucoll.transport.tcp import exchange_words
from gpucoll.transport.tcp.exchange_words import PartKind
from gpucoll.transport.tcp.streams import ALL, Outcome, Reduction, StreamStatus
from gpucoll.wording import rank_of

_WELL, _BADLY = b"\0", b"\1"
_LEAST_S = 0.001
_LONGER_S = 1.0
_TELLING_S = 1.0
"""How long to wait, after a connection has ended, for a leader's report of the reason."""
_STATUS = {
    exchange_words.Outcome.GONE: StreamStatus.GONE,
    exchange_words.Outcome.ABORTED: StreamStatus.ABORTED,
    exchange_words.Outcome.DEADLINE: StreamStatus.DEADLINE,
    exchange_words.Outcome.GARBLED: StreamStatus.MISMATCH,
}


class Transfer:
    """A schedule between the leaders that has begun; on other ranks, nothing.

    Its methods raise `DeadlineError`, `PeerLostError` or `AbortedError` if it cannot go on.

    Parameters
    ----------
    bulk : Bulk or None
        The leader's connections; None on other ranks.
    raise_for : callable
        Raises the error for what has ended it.
    abroad : callable
        Returns a context in which this rank waits for other hosts.
    """

    def __init__(
        self,
        bulk: Bulk | None,
        raise_for: Callable[[Outcome], None],
        abroad: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._bulk = bulk
        self._raise_for = raise_for
        self._abroad = abroad

    def let(self, ready: int) -> None:
        """Announce how many pieces are ready, and move what can move without waiting."""
        if self._bulk is not None:
            self._see(self._bulk.let(ready))

    def finish(self, n_steps: int | None = None) -> None:
        """Wait for all of it, or for its first `n_steps` steps, those of each section in turn."""
        if self._bulk is not None:
            with self._abroad():
                self._see(self._bulk.finish(n_steps))

    def finish_sections(self, count: int) -> None:
        """Wait for the first `count` sections."""
        if self._bulk is not None:
            with self._abroad():
                self._see(self._bulk.finish_sections(count))

    def _see(self, outcome: Outcome) -> None:
        if outcome.status not in (StreamStatus.DONE, StreamStatus.AGAIN):
            self._raise_for(outcome)


NO_TRANSFER = Transfer(None, lambda _: None)


class WorldCall:
    """One collective of all hosts, as this rank runs it.

    Parameters
    ----------
    group : WorldState
        The group that makes the call.
    diagnosis : WorldDiagnosis
        Makes the group's errors.
    news : WorldNews
        Tells the other hosts.
    number : int
        Number of the call.
    name : str
        The user's call, for messages.
    timeout_s : float, optional
        Deadline of the call, in seconds.
    """

    def __init__(
        self,
        group: WorldState,
        diagnosis: WorldDiagnosis,
        news: WorldNews,
        number: int,
        name: str,
        timeout_s: float | None,
    ) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._news = news
        self._number = number
        self.name = name
        self.timeout_s = group.timeout_s if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self.timeout_s
        self._has_exchanged = False
        self._has_announced = False
        self._round = 0

    @property
    def leads(self) -> bool:
        """Whether this rank leads its host."""
        return self._group.links is not None

    @property
    def left_s(self) -> float:
        """The rest of the deadline, in seconds, for waits within this host."""
        left_ms = 1000 * (self._deadline - time.monotonic())
        return max(math.ceil(left_ms) / 1000, _LEAST_S)  # whole milliseconds: errors show it

    def tried(self, step: Callable[[], bytes]) -> bytes | MismatchError:
        """Return the result of a leader's step, or the mismatch that all ranks are to raise."""
        try:
            return step()
        except MismatchError as error:
            return error

    def agree(self, digest: int, described: str) -> bytes:
        """Check, before anything is moved, that all leaders make the same call; return no bytes.

        It raises the same errors as `exchange`.
        """
        self._exchange(HostPart(digest, described, "", b""), PartKind.NOTHING)
        return b""

    def exchange(self, part: bytes, digest: int, described: str) -> list[bytes]:
        """Give every leader's bytes to every leader; return them by host.

        Parameters
        ----------
        part : bytes
            This host's.
        digest : int
            Digest of the call's signature; if hosts differ in it, all of them raise.
        described : str
            The call, as its user wrote it.

        Raises
        ------
        MismatchError
            The ranks of different hosts made different calls, or those of one host did.
        DeadlineError, PeerLostError, AbortedError
            The call cannot be completed any more.
        """
        return self._exchange(HostPart(digest, described, "", part))

    def fail(self, error: MismatchError) -> None:
        """Tell the other hosts that the ranks of this host did not agree."""
        if self.leads and not self._has_exchanged:
            with contextlib.suppress(GpucollError):  # the first error is the one to raise
                self._exchange(HostPart(0, self.name, str(error), b""))

    def _exchange(self, part: HostPart, kind: PartKind = PartKind.FURTHER) -> list[bytes]:
        with self._group.host.members.abroad():
            return self._exchange_now(part, kind)

    def _exchange_now(self, part: HostPart, kind: PartKind) -> list[bytes]:
        group = self._group
        assert group.links is not None
        self._has_exchanged = True
        if not self._has_announced:
            self._has_announced = True
            if self._is_agreed(group.exchanges, part.digest, kind):
                return [b""] * group.hosts.count
        self._round += 1
        key = self._number, self._round
        encoded = group.links.exchange(key, part.encode(), self._look)
        parts = [HostPart.decode(data) for data in encoded]
        check_agreement(parts, group.hosts, rank_of(group.rank, group.world_size))
        return [part.data for part in parts]

    def _is_agreed(self, exchanges: Exchanges, digest: int, kind: PartKind) -> bool:
        """Return whether all leaders make the same call and have nothing more to exchange."""
        self.open_exchanges(exchanges)
        outcome = exchanges.announce(digest, kind, self._look)
        if outcome in _STATUS:
            self._raise_for_exchange(exchanges, outcome)
        return outcome == exchange_words.Outcome.AGREED

    def open_exchanges(self, exchanges: Exchanges) -> None:
        """Open the leader's connections for small calls, if they are not open."""
        # A host that the links still reach is not lost: if it does not connect, it is late.
        ended = exchanges.open(self._look, self._deadline + _LONGER_S)
        if ended is not None:
            self._raise_for(Outcome(StreamStatus.GONE, *ended))

    def _raise_for_exchange(
        self, exchanges: Exchanges, outcome: exchange_words.Outcome
    ) -> NoReturn:
        """Raise the error for what has ended an exchange of small parts."""
        link, errno = exchanges.ended_with
        self._raise_for(Outcome(_STATUS[outcome], link, errno, exchanges.header))

    def end_small_call(self, exchanges: Exchanges) -> NoReturn:
        """Raise, on every rank of the host, the error for what ended this call in compiled code."""
        outcome = exchanges.outcome
        if outcome in _STATUS:
            self._raise_for_exchange(exchanges, outcome)
        self._has_announced = True
        word: bytes | MismatchError | None = None
        if self.leads:
            part = HostPart(exchanges.digest, self.name, "", b"")
            word = self.tried(lambda: b"".join(self._exchange(part)))
        self.deliver(Collective.BARRIER, NO_ROOT, word)
        raise AbortedError(
            f"{self._who}: the hosts differ in how much data they bring to {self.name}. {BROKEN}"
        )

    def begin_transfer(
        self,
        schedule: Schedule,
        work_address: int,
        digest: int,
        reduction: Reduction | None = None,
        ready: int = ALL,
    ) -> Transfer:
        """Begin a schedule between the leaders, over its own connections.

        All leaders must know that they make the same call. Nothing moves before a method of the
        transfer is called.

        Parameters
        ----------
        schedule : Schedule
            The schedule, of whole blocks; it must match those of the other leaders.
        work_address : int
            Address of the working buffer; the schedule has the edges of its blocks.
        digest : int
            Digest of the call's signature.
        reduction : Reduction, optional
            How to combine elements, if the schedule reduces.
        ready : int
            How many pieces of the working buffer are ready (`Section.gates`).

        Raises
        ------
        DeadlineError, PeerLostError, AbortedError
            The call cannot be completed any more.
        """
        group = self._group
        assert group.bulk is not None
        try:
            outcome = group.bulk.connect(schedule, self._look_longer, self._deadline)
        except RendezvousDeadlineError as error:
            raise DeadlineError(f"{self._who} waited in {self.name}: {error} {BROKEN}") from None
        if outcome.status != StreamStatus.DONE:
            self._raise_for(outcome)
        group.bulk.begin(
            schedule,
            work_address,
            (0, self._number, digest),
            reduction=reduction,
            deadline=self._deadline,
            abort_address=group.host.members.at(EVENT_ABORT),
            ready=ready,
        )
        return Transfer(group.bulk, self._raise_for, group.host.members.abroad)

    def _raise_for(self, outcome: Outcome) -> NoReturn:
        """Raise the error for what has ended a transfer."""
        group = self._group
        assert group.links is not None
        if outcome.status == StreamStatus.GONE:
            # The leader that ended it reports the reason over the links, which may take longer.
            group.links.wait(lambda: group.is_aborted, _TELLING_S)
        group.raise_if_aborted()
        if outcome.status == StreamStatus.DEADLINE:
            self._raise_late()
        host = outcome.link
        if outcome.status == StreamStatus.GONE:
            reason = os.strerror(outcome.errno) if outcome.errno else "the other end is gone"
            self._news.lose(host, reason)
            group.raise_if_aborted()
        raise AbortedError(
            f"{self._who}: {group.names[host]} sent bytes of another call than {self.name}, with "
            f"the header {outcome.header}. {BROKEN}"
        )

    @property
    def _who(self) -> str:
        return rank_of(self._group.rank, self._group.world_size)

    def _look_longer(self) -> None:
        """Raise if waiting is in vain; unlike `_look`, only some time after the deadline.

        The waiting leader itself knows better why it is late.
        """
        self._group.raise_if_aborted()
        if time.monotonic() > self._deadline + _LONGER_S:
            self._raise_late()

    def _raise_late(self) -> NoReturn:
        """Raise the error for hosts that are late."""
        group = self._group
        error = self._diagnosis.late_error(self._number, self.timeout_s)
        group.raise_if_aborted()  # a rank that gave up meanwhile, near the late one, knows more
        raise error

    def _look(self) -> None:
        """Raise if waiting for other hosts is in vain."""
        group = self._group
        group.raise_if_aborted()
        if time.monotonic() > self._deadline:
            self._raise_late()

    def deliver(
        self, collective: Collective, root: int, payload: bytes | MismatchError | None
    ) -> bytes:
        """Give the ranks of this host the leader's payload; return it.

        Parameters
        ----------
        payload : bytes or MismatchError
            The leader's payload, None on other ranks; if it is an error, all ranks of the host
            raise it.
        """
        if self._group.host.world_size == 1:
            return self._own(payload)
        data = b""
        if isinstance(payload, bytes):
            data = _WELL + payload
        elif payload is not None:
            data = _BADLY + str(payload).encode()
        # The leader's own deadline error explains more, so let it come first.
        limit_s = self.left_s + (0.0 if self.leads else _LONGER_S)
        parts = self._group.channel.all_gather_bytes(data, collective, root, limit_s)
        answer = parts[0]
        if answer[:1] == _BADLY:
            leader = self._group.hosts.leader_of(self._group.here)
            text = answer[1:].decode()
            raise MismatchError(text.replace(rank_of(leader, self._group.world_size), self._who))
        return answer[1:]

    def _own(self, payload: bytes | MismatchError | None) -> bytes:
        """Return the payload of a leader that is the only rank of its host."""
        if isinstance(payload, MismatchError):
            raise payload
        return payload or b""
