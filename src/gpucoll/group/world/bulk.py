"""A leader's connections for large arrays: plain TCP, beside the links, opened when first needed.

Each is authenticated by the handshake, for this group and for nothing else, and then carries bytes
as they are: what goes over it is not encrypted, and nothing but TCP's checksum guards it. A call
that does not end well leaves connections in the middle of their bytes: all are closed, which the
other leaders notice at once.
"""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections.abc import Callable, Sequence

from gpucoll.group.world.connecting import Connecting
from gpucoll.group.world.schedules import Schedule, partners, rows_of
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.handshake import encode_purpose
from gpucoll.transport.tcp.streams import Outcome, Reduction, Streams, StreamStatus

_BEGIN = b"\1"
"""What the leader that has connected says last: only then may the other one send."""
_SLICE_MS = 20
_DONE = Outcome(StreamStatus.DONE)
_NO_REDUCTION = Reduction(0, 1)
_all: weakref.WeakSet[Bulk] = weakref.WeakSet()


class Bulk:
    """The connections of one leader.

    Parameters
    ----------
    here : int
        This host's number.
    names : tuple of str
        What errors call the hosts.
    addresses : sequence of (str, int)
        By host, where its leader listens.
    secret : bytes
        By which leaders know each other.
    group : str
        What the group is called; nobody else knows it.
    listener : socket
        This leader's; belongs to this from here on.
    """

    def __init__(
        self,
        here: int,
        names: tuple[str, ...],
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        group: str,
        listener: socket.socket,
    ) -> None:
        self._here = here
        self._names = names
        self._addresses = addresses
        self._secret = secret
        self._purpose = encode_purpose("bulk", group)
        self._listener = listener
        self._ends: dict[int, socket.socket] = {}
        """By host, in the order in which they were opened: their places are the links' numbers."""
        self._links = (-1,) * len(names)
        self._streams: Streams | None = None  # the first one may have to be compiled
        _all.add(self)

    def connect(self, schedule: Schedule, look: Callable[[], None], deadline: float) -> Outcome:
        """Open what a schedule needs and is not open; all hosts that it needs do it, too.

        Parameters
        ----------
        look : callable
            Called while waiting, again and again; raises where nothing can come of it.
        deadline : float
            By the monotonic clock.

        Returns
        -------
        Outcome
            `DONE`; or `GONE`, with its host.

        Raises
        ------
        RendezvousDeadlineError
            A host could not be reached in time.
        """
        needed = partners(schedule.steps(self._here, len(self._names)))
        missing = sorted(needed - self._ends.keys())
        if not missing:
            return _DONE
        addresses = {host: self._addresses[host] for host in missing}
        task = Connecting(self._here, self._names, addresses, self._secret, self._purpose)
        made = task.connect(self._listener, look, deadline)
        try:
            for host, connection in sorted(made.items()):
                self._ends[host] = self._begun(host, connection, look)
        except OSError as error:
            self._close_all(made)
            return Outcome(StreamStatus.GONE, host, error.errno or 0)
        except BaseException:
            self._close_all(made)
            raise
        self._streams = Streams([end.fileno() for end in self._ends.values()])
        numbers = {host: number for number, host in enumerate(self._ends)}
        self._links = tuple(numbers.get(host, -1) for host in range(len(self._names)))
        return _DONE

    def _begun(
        self, host: int, connection: SealedConnection, look: Callable[[], None]
    ) -> socket.socket:
        """Go over to plain bytes, so that none of them is taken for the introduction's."""
        end = connection.detach()
        # A leader that takes nothing for long is not lost, but late: the links know the difference.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        if host > self._here:
            end.send(_BEGIN, socket.MSG_NOSIGNAL)  # a new connection has room for it
        else:
            _await_byte(end, look)
        return end

    def _close_all(self, made: dict[int, SealedConnection]) -> None:
        for connection in made.values():
            connection.close()
        self.close_connections()

    def run(
        self,
        schedule: Schedule,
        work_address: int,
        header: tuple[int, int, int],
        *,
        reduction: Reduction | None,
        deadline: float,
        abort_address: int,
    ) -> Outcome:
        """Run a schedule for which `connect` has opened everything; see `Streams.run`.

        Returns
        -------
        Outcome
            Its ``link`` is the host. After all but `DONE`, everything is closed.
        """
        rows = rows_of(schedule, self._here, len(self._names), self._links)
        assert self._streams is not None
        outcome = None
        try:
            outcome = self._streams.run(
                rows,
                work_address,
                schedule.edges[-1],
                header,
                reduction=reduction or _NO_REDUCTION,
                deadline_ns=int(deadline * 1e9),
                abort_address=abort_address,
            )
        finally:
            hosts = list(self._ends)
            if outcome is None or outcome.status != StreamStatus.DONE:
                self.close_connections()
        if outcome.link >= 0:
            return outcome._replace(link=hosts[outcome.link])
        return outcome

    def close_connections(self) -> None:
        """Close what is open; the next schedule opens anew what it needs."""
        for end in self._ends.values():
            end.close()
        self._ends = {}

    def close(self) -> None:
        """Let go of everything."""
        self.close_connections()
        self._listener.close()


def _await_byte(end: socket.socket, look: Callable[[], None]) -> None:
    """Take the one byte that the other leader sends before anything else."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while not poll.poll(_SLICE_MS):
        look()
    if end.recv(1) != _BEGIN:
        raise ConnectionError("the other end is gone")


def _after_fork() -> None:
    # A child that outlives its parent would keep the connections open, and the parent unmissed.
    for bulk in list(_all):
        bulk.close()


os.register_at_fork(after_in_child=_after_fork)
