"""A leader's connections for large arrays: beside the links, opened when first needed.

Each is authenticated by the handshake, for this group and for nothing else. Then it is TLS, where
the job has certificates; else it carries bytes as they are: what goes over it is not encrypted, and
nothing but TCP's checksum guards it. A call
that does not end well leaves connections in the middle of their bytes: all are closed, which the
other leaders notice at once.

There may be several connections to each host (lanes), over one interface or several: a block that
is large enough goes over all of them, a piece over each.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from gpucoll.errors import AuthenticationError
from gpucoll.group.world.connecting import Connecting, unsealed
from gpucoll.group.world.schedules import Links, Schedule, Table, partners, table_of
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import encode_purpose
from gpucoll.transport.tcp.streams import Outcome, Reduction, Streams, StreamStatus

_DONE = Outcome(StreamStatus.DONE)
_NO_REDUCTION = Reduction(0, 1)
_NO_STEPS = Table(np.zeros((0, 0), np.int64), (), 0)
_all: weakref.WeakSet[Bulk] = weakref.WeakSet()


class Lane(NamedTuple):
    """One connection to each host.

    Attributes
    ----------
    listener : socket
        This leader's; its address is where connections come from, too.
    addresses : tuple of (str, int)
        By host, where its leader listens.
    """

    listener: socket.socket
    addresses: tuple[tuple[str, int], ...]


class Bulk:
    """The connections of one leader.

    Parameters
    ----------
    here : int
        This host's number.
    names : tuple of str
        What errors call the hosts.
    lanes : sequence of Lane
        As many connections to each host; all leaders have the same number of them. Listeners belong
        to this from here on.
    credentials : Credentials
        By which leaders know each other; with certificates all of it is encrypted.
    group : str
        What the group is called; nobody else knows it.
    """

    def __init__(
        self,
        here: int,
        names: tuple[str, ...],
        lanes: Sequence[Lane],
        credentials: Credentials,
        group: str,
    ) -> None:
        self._here = here
        self._names = names
        self._lanes = tuple(lanes)
        self._credentials = credentials
        self._purpose = encode_purpose("bulk", group)
        self._ends: dict[tuple[int, int], socket.socket] = {}
        """By host and lane, in the order in which they were opened, which numbers the links."""
        self._links: Links = ()
        self._table = _NO_STEPS
        """What runs, or has run last."""
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
        missing = sorted(needed - {host for host, _ in self._ends})
        if not missing:
            return _DONE
        for number in range(len(self._lanes)):
            outcome = self._open(number, missing, look, deadline)
            if outcome.status != StreamStatus.DONE:
                return outcome
        self._streams = self._made_streams()
        numbers = {end: number for number, end in enumerate(self._ends)}
        self._links = tuple(
            tuple(numbers.get((host, lane), -1) for host in range(len(self._names)))
            for lane in range(len(self._lanes))
        )
        return _DONE

    def _open(
        self, number: int, hosts: list[int], look: Callable[[], None], deadline: float
    ) -> Outcome:
        """Open one lane's connections to some hosts."""
        lane = self._lanes[number]
        addresses = {host: lane.addresses[host] for host in hosts}
        own_address = lane.listener.getsockname()[0] if len(self._lanes) > 1 else ""
        task = Connecting(
            self._here, self._names, addresses, self._credentials, self._purpose, own_address
        )
        with self._closing():
            made = task.connect(lane.listener, look, deadline)
        try:
            for host, connection in sorted(made.items()):
                self._ends[host, number] = unsealed(connection, host > self._here, look)
        except (OSError, AuthenticationError) as error:
            self._close_all(made)
            return Outcome(StreamStatus.GONE, host, getattr(error, "errno", 0) or 0)
        except BaseException:
            self._close_all(made)
            raise
        return _DONE

    def _made_streams(self) -> Streams:
        """Return what runs schedules over what is open."""
        if self._credentials.tls is not None:
            # Nothing of this is loaded where there is no TLS.
            from gpucoll.transport.tcp.secure_streams import secure_streams

            return secure_streams(list(self._ends.values()))
        return Streams([end.fileno() for end in self._ends.values()])

    def _close_all(self, made: dict[int, SealedConnection]) -> None:
        for connection in made.values():
            connection.close()
        self.close_connections()

    def begin(
        self,
        schedule: Schedule,
        work_address: int,
        header: tuple[int, int, int],
        *,
        reduction: Reduction | None,
        deadline: float,
        abort_address: int,
        ready: int,
    ) -> None:
        """Take a schedule for which `connect` has opened everything; see `Streams.begin`."""
        self._table = table_of(schedule, self._here, len(self._names), self._links)
        if not self._table.ends:
            return
        assert self._streams is not None
        with self._closing():
            self._streams.begin(
                self._table.rows,
                work_address,
                schedule.work_bytes,
                header,
                reduction=reduction or _NO_REDUCTION,
                deadline_ns=int(deadline * 1e9),
                abort_address=abort_address,
                ready=ready,
            )

    def let(self, ready: int) -> Outcome:
        """Say how many pieces are ready now, and move what can move without waiting.

        Returns
        -------
        Outcome
            Of this and of `finish`: its ``link`` is the host. After all but `DONE` and `AGAIN`
            everything is closed.
        """
        if not self._table.ends:
            return _DONE
        assert self._streams is not None
        with self._closing():
            return self._seen(self._streams.let(ready))

    def finish(self, n_steps: int | None = None) -> Outcome:
        """Go on to the end, or until so many steps are over: those of each section in turn."""
        table = self._table
        if not table.ends:
            return _DONE
        assert self._streams is not None
        with self._closing():
            if n_steps is None:
                return self._seen(self._streams.finish())
            return self._seen(self._streams.finish(table.ends[n_steps - 1]))

    def finish_sections(self, count: int) -> Outcome:
        """Go on until so many sections are over."""
        return self.finish(count * self._table.n_steps)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close everything where the block raises."""
        try:
            yield
        except BaseException:
            self.close_connections()
            raise

    def _seen(self, outcome: Outcome) -> Outcome:
        """Close everything after a call that did not end well; name the host."""
        if outcome.status in (StreamStatus.DONE, StreamStatus.AGAIN):
            return outcome
        hosts = [host for host, _ in self._ends]
        self.close_connections()
        if outcome.link >= 0:
            return outcome._replace(link=hosts[outcome.link])
        return outcome

    def describe(self) -> str:
        """Return what guards large arrays, and how many lanes there are, if there are several."""
        guarded = "authenticated when they are opened"
        if self._credentials.tls is not None:
            from gpucoll.transport.tcp.secure_streams import SecureStreams

            by = "" if self._streams is None else ", by the kernel"
            by = ", by OpenSSL" if isinstance(self._streams, SecureStreams) else by
            guarded = f"encrypted by TLS 1.3{by}"
        if len(self._lanes) == 1:
            return guarded
        own = dict.fromkeys(lane.listener.getsockname()[0] for lane in self._lanes)
        return f"{guarded}, {len(self._lanes)} to each host, from {', '.join(own)}"

    def close_connections(self) -> None:
        """Close what is open; the next schedule opens anew what it needs."""
        for end in self._ends.values():
            end.close()
        self._ends = {}

    def close(self) -> None:
        """Let go of everything."""
        self.close_connections()
        for lane in self._lanes:
            lane.listener.close()


def _after_fork() -> None:
    # A child that outlives its parent would keep the connections open, and the parent unmissed.
    for bulk in list(_all):
        bulk.close()


os.register_at_fork(after_in_child=_after_fork)
