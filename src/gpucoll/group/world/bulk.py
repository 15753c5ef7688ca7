"""A leader's connections for large arrays, in addition to its links; opened when first needed.

The handshake authenticates each connection for this group and this purpose only. If the job has
certificates, the connection is TLS. Otherwise it carries plain bytes: they are not encrypted, and
only TCP's checksum protects them. A call that fails leaves connections in the middle of a transfer.
The call closes all of them then, after it has told the other leaders why: who sees only that a
connection ended takes the leader at its other end for lost.

There may be several connections to each host (lanes), over one interface or several: a large enough
block is cut into one piece for each lane.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from gpucoll.group.world.connecting import Ends
from gpucoll.group.world.schedules import Links, Schedule, Table, partners, table_of
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import encode_purpose
from gpucoll.transport.tcp.streams import Outcome, Reduction, Streams, StreamStatus

_DONE = Outcome(StreamStatus.DONE)
_NO_REDUCTION = Reduction(0, 1)
_NO_STEPS = Table(np.zeros((0, 0), np.int64), (), 0)


class Lane(NamedTuple):
    """One connection to each host.

    Attributes
    ----------
    listener : socket
        This leader's listening socket. Its address is also the one that connections are made from.
    addresses : tuple of (str, int)
        By host, the address at which its leader listens.
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
        The lanes, one connection to each host for each of them; all leaders have the same number of
        lanes. Listeners belong to this object from here on.
    credentials : Credentials
        By which leaders authenticate each other; with certificates everything is encrypted.
    group : str
        The group's secret name.
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
        self._ends = Ends(here, names, credentials, encode_purpose("bulk", group))
        self._links: Links = ()
        self._table = _NO_STEPS
        """The schedule that runs, or has run last."""
        self._streams: Streams | None = None  # making the first one may compile its loop

    def connect(self, schedule: Schedule, look: Callable[[], None], deadline: float) -> Outcome:
        """Open the connections that a schedule needs and does not have; its other hosts do so too.

        Parameters
        ----------
        look : callable
            Called again and again while waiting; raises if the wait is in vain.
        deadline : float
            As `time.monotonic` counts.

        Returns
        -------
        Outcome
            `DONE`, or `GONE` with the host that is gone.

        Raises
        ------
        RendezvousDeadlineError
            A host could not be reached in time.
        """
        needed = partners(schedule.steps(self._here, len(self._names)))
        missing = sorted(needed - {host for host, _ in self._ends.sockets})
        if not missing:
            return _DONE
        for number in range(len(self._lanes)):
            outcome = self._open(number, missing, look, deadline)
            if outcome.status != StreamStatus.DONE:
                return outcome
        self._streams = self._made_streams()
        numbers = {end: number for number, end in enumerate(self._ends.sockets)}
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
        ended = self._ends.open(
            lane.listener, addresses, look, deadline, lane=number, own_address=own_address
        )
        return _DONE if ended is None else Outcome(StreamStatus.GONE, *ended)

    def _made_streams(self) -> Streams:
        """Return an object that runs schedules over the open connections."""
        if self._credentials.tls is not None:
            # Without TLS none of this is loaded.
            from gpucoll.transport.tcp.secure_streams import secure_streams

            return secure_streams(list(self._ends.sockets.values()))
        return Streams([end.fileno() for end in self._ends.sockets.values()])

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
        """Begin a schedule for which `connect` has opened everything; see `Streams.begin`."""
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
        """Announce how many pieces are ready now, and move what can move without waiting.

        Returns
        -------
        Outcome
            The outcome, as for `finish`; its ``link`` is the host. After any outcome but `DONE` and
            `AGAIN` the connections are of no more use: close them.
        """
        if not self._table.ends:
            return _DONE
        assert self._streams is not None
        with self._closing():
            return self._seen(self._streams.let(ready))

    def finish(self, n_steps: int | None = None) -> Outcome:
        """Finish the schedule, or its first `n_steps` steps: those of each section in turn."""
        table = self._table
        if not table.ends:
            return _DONE
        assert self._streams is not None
        with self._closing():
            if n_steps is None:
                return self._seen(self._streams.finish())
            return self._seen(self._streams.finish(table.ends[n_steps - 1]))

    def finish_sections(self, count: int) -> Outcome:
        """Finish the first `count` sections."""
        return self.finish(count * self._table.n_steps)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close everything if the block raises."""
        try:
            yield
        except BaseException:
            self.close_connections()
            raise

    def _seen(self, outcome: Outcome) -> Outcome:
        """Name the host in the outcome of a transfer that failed."""
        if outcome.status in (StreamStatus.DONE, StreamStatus.AGAIN) or outcome.link < 0:
            return outcome
        hosts = [host for host, _ in self._ends.sockets]
        return outcome._replace(link=hosts[outcome.link])

    def describe(self) -> str:
        """Return how large arrays are protected and, if there are several lanes, how many."""
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
        """Close the open connections; the next schedule opens again what it needs."""
        self._ends.close()

    def close(self) -> None:
        """Release everything."""
        self.close_connections()
        for lane in self._lanes:
            lane.listener.close()
