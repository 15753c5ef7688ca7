"""Pulls and pushes between hosts: requests to the ranks that serve, and the thread that serves.

One rank of each host serves the rows of its host to the ranks of others. A request is one message
of bytes: four words, the places of the rows, and the values of a push. The requests of a call go to
all hosts before the first answer is waited for. Each answer has a tag of its own, which the request
names, so that an answer for which nobody waits any more is never taken for another one.

Pushes are not answered one by one: `Requests.flush` asks for the number of the last one that was
applied. Until then they are kept, so that after a loss those that were not applied are repeated.

A stopped rank stops nobody: the thread begins to receive each request that comes, and handles those
that are complete; it never waits for an answer to be received.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.codes import Codes
from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.types import ANY_SOURCE
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.calls.message_work import MessageWork
    from gpucoll.tables.owners import Owners, Split

__all__ = ["Pushed", "Requests", "ServedRows", "Server"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]

REQUEST, FIRST_ANSWER = 1, 2
"""Tags, on a communicator of its own."""
_MOST_ANSWERS = 1 << 30
FOR_EVER_S = 1_000_000.0
"""Deadline of the messages. Whoever waits has a deadline; a message whose own ends would break the
communicator, and a rank may be stopped for as long as it likes."""
_ASYNCHRONOUS: Any = {"async_op": True, "timeout_s": FOR_EVER_S}
IDLE_S, LOOK_S, CLOSE_S, ENDS_S = 0.5, 0.002, 0.1, 60.0
MOST_UNKNOWN_BYTES = 64 << 20
_HEAD_BYTES = 32
_LOSSES = (PeerLostError, DeadlineError, AbortedError)


class Kind(Codes):
    """What a request asks for; its first word."""

    PULL = 1
    PUSH = 2
    FLUSH = 3
    CLOCK = 4
    STOP = 5


class ServedRows(Protocol):
    """The rows of a host, as bytes, in memory that its ranks share."""

    def take(self, places: Ints, out: Bytes) -> None:
        """Copy the rows at these places."""

    def apply(self, places: Ints, values: Bytes) -> None:
        """Update the rows at these places."""


class Noted(Protocol):
    """What the ranks of a host know of those of other hosts."""

    def note_clock(self, rank: int, clock: int) -> None:
        """Note the clock of a rank."""


class Pushed(NamedTuple):
    """A push to another host that is not known to have been applied."""

    number: int
    ids: Ints
    request: Bytes

    @property
    def values(self) -> Bytes:
        """The values, of shape (ids, bytes of a row)."""
        return self.request[_HEAD_BYTES + self.ids.nbytes :].reshape(len(self.ids), -1)


class _Peer:
    """What this rank has sent to another host."""

    def __init__(self) -> None:
        self.pushed: deque[Pushed] = deque()
        self.known = self.sent = 0
        """Numbers of the last pushes that are known to have been applied, and that were sent."""


class Requests:
    """The requests of this rank to the other hosts.

    Parameters
    ----------
    comm : Communicator
        The table's ranks; only the table sends messages over it.
    owners : Owners
        The owners of the rows.
    rows : ServedRows
        The rows of this host.
    row_bytes : int
        The size of a row.
    timeout_s : float
        Deadline of each wait, in seconds.
    """

    def __init__(
        self, comm: Communicator, owners: Owners, rows: ServedRows, row_bytes: int, timeout_s: float
    ) -> None:
        self._comm, self._owners, self._rows = comm, owners, rows
        self._row_bytes, self.timeout_s = row_bytes, timeout_s
        self._answers = itertools.count()
        self._lock = threading.Lock()
        """Held while pushes are numbered and sent."""
        self._peers = [_Peer() for _ in owners.hosts]
        self._unknown_bytes = 0
        self._elsewhere = [host for host in range(len(owners.hosts)) if host != owners.here]

    def pull(self, ids: Ints, out: Bytes) -> None:
        """Copy the rows of these ids, of all hosts, to `out` of shape (ids, bytes of a row)."""
        split = self._owners.split(ids)
        here = split.part(self._owners.here)
        if here.stop - here.start == len(ids):
            return self._rows.take(split.places, out)
        found = np.empty_like(out)
        asked = [
            (host, self._ask(host, _request(Kind.PULL, split.places[part]), found[part]))
            for host, part in self._parts_elsewhere(split)
        ]
        if here.stop > here.start:
            self._rows.take(split.places[here], found[here])
        self._wait(asked, "rows")
        row = np.dtype((np.void, self._row_bytes))
        out.view(row)[split.order] = found.view(row)
        return None

    def push(self, ids: Ints, values: Bytes) -> None:
        """Update the rows of this host, and send the values of others to their hosts.

        All of it is numbered and kept before anything is sent: if sending fails, or is interrupted,
        the next push or flush sends the rest, and after a loss it is repeated.
        """
        split = self._owners.split(ids)
        parts = [(host, split.order[part], part) for host, part in self._parts_elsewhere(split)]
        requests = [
            _request(Kind.PUSH, split.places[part], values, order) for _, order, part in parts
        ]
        with self._lock:
            for (host, order, _), request in zip(parts, requests, strict=True):
                self._keep(host, ids[order], request)
        try:
            for host, _, _ in parts:
                self._send_unsent(host)
        finally:
            here = split.part(self._owners.here)
            if here.stop - here.start == len(ids):
                self._rows.apply(split.places, values)
            elif here.stop > here.start:
                mine = np.empty((here.stop - here.start, self._row_bytes), np.uint8)
                _take(values, split.order[here], mine)
                self._rows.apply(split.places[here], mine)
        if self._unknown_bytes > MOST_UNKNOWN_BYTES:
            self.flush()

    def _keep(self, host: int, ids: Ints, request: Bytes) -> None:
        """Give a push a number, and keep it; the lock is held."""
        peer = self._peers[host]
        number = 1 + (peer.pushed[-1].number if peer.pushed else peer.known)
        request[8:16].view(np.int64)[0] = number
        peer.pushed.append(Pushed(number, ids, request))
        self._unknown_bytes += request.nbytes

    def _send_unsent(self, host: int) -> None:
        """Send the pushes that were not sent; one perhaps twice, which its number tells."""
        with self._lock:
            peer = self._peers[host]
            unsent = itertools.takewhile(
                lambda each: each.number > peer.sent, reversed(peer.pushed)
            )
            for pushed in reversed([*unsent]):
                self._send(host, pushed.request)
                peer.sent = pushed.number

    def flush(self) -> None:
        """Wait until every push of this rank has been applied."""
        asked, numbers = [], np.zeros((len(self._peers), 1), np.int64)
        for host in self._elsewhere:
            if self._peers[host].pushed:
                self._send_unsent(host)
                answer = numbers[host].view(np.uint8)
                asked.append((host, self._ask(host, _request(Kind.FLUSH), answer)))
        self._wait(asked, "word of pushes")
        for host, _ in asked:
            with self._lock:
                self.forget(host, int(numbers[host, 0]))

    def forget(self, host: int, number: int) -> list[Pushed]:
        """Forget the pushes to a host up to a number; return those that are left."""
        peer = self._peers[host]
        peer.known, pushed = max(peer.known, number), peer.pushed
        while pushed and pushed[0].number <= number:
            self._unknown_bytes -= pushed.popleft().request.nbytes
        return [*pushed]

    def tell_clock(self, clock: int) -> None:
        """Tell all other hosts this rank's clock, after the pushes before it have been applied."""
        for host in self._elsewhere:
            self._send(host, _request(Kind.CLOCK, number=clock))

    def _parts_elsewhere(self, split: Split) -> list[tuple[int, slice]]:
        parts = [(host, split.part(host)) for host in self._elsewhere]
        return [(host, part) for host, part in parts if part.stop > part.start]

    def _ask(self, host: int, request: Bytes, answer: Bytes) -> MessageWork[Any]:
        """Send a request; return the receive of its answer."""
        tag = FIRST_ANSWER + next(self._answers) % _MOST_ANSWERS
        request[24:32].view(np.int64)[0] = tag
        server, how = self._owners.server(host), _ASYNCHRONOUS
        work: MessageWork[Any] = self._comm.recv(answer.reshape(-1), server, tag, **how)
        self._send(host, request)
        return work

    def _send(self, host: int, request: Bytes) -> None:
        server = self._owners.server(host)
        self._comm.send(request, server, REQUEST, **_ASYNCHRONOUS)

    def _wait(self, asked: list[tuple[int, MessageWork[Any]]], what: str) -> None:
        until_s = time.monotonic() + self.timeout_s
        for host, work in asked:
            try:
                work.wait(max(until_s - time.monotonic(), 0.0))
            except DeadlineError:
                if work.done():  # the communicator is broken
                    raise
                comm, server = self._comm, self._owners.server(host)
                raise DeadlineError(
                    f"{rank_of(comm.rank, comm.world_size)} waited {self.timeout_s:g} s for {what} "
                    f"of a table from rank {server}, which serves the rows of host "
                    f"{self._owners.hosts[host]}: is it stopped, or in a long call that keeps "
                    "Python's interpreter? The table stays usable"
                ) from None


class Server:
    """The thread that serves the rows of a host to the ranks of others.

    Parameters
    ----------
    comm : Communicator
        The table's ranks; only the table sends messages over it.
    rows : ServedRows
        The rows of this host.
    row_bytes : int
        The size of a row.
    applied : array of int64
        Memory that the ranks of this host share: for each rank of `comm`, the number of its last
        push that was applied here. Zeros at first.
    noted : Noted
        Is told the clocks of other hosts' ranks.

    Attributes
    ----------
    error : Exception or None
        What has ended the thread, which then gives up the communicator.
    """

    def __init__(
        self, comm: Communicator, rows: ServedRows, row_bytes: int, applied: Ints, noted: Noted
    ) -> None:
        self.error: Exception | None = None
        self._comm, self._rows, self._row_bytes = comm, rows, row_bytes
        self._applied, self._noted = applied, noted
        self._coming: dict[int, deque[tuple[Bytes, MessageWork[Any]]]] = {}
        """By rank: its requests that are being received."""
        self._sent: list[MessageWork[Any]] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpucoll-table")
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, and withdraw the answers that nobody takes; return whether it ended.

        It ends after the request that it handles: it uses the rows until then.
        """
        self._is_over = True
        with contextlib.suppress(GpucollError):  # wakes it
            self._comm.send(_request(Kind.STOP), self._comm.rank, REQUEST, async_op=True)
        self._thread.join(ENDS_S)
        if self._thread.is_alive():
            return False
        coming = [work for requests in self._coming.values() for _, work in requests]
        for work in [*self._sent, *coming]:
            work.withdraw()
        return True

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._take_one()
                self._handle_complete()
        except Exception as error:
            if self._is_over or self._comm.is_closed:
                return
            with contextlib.suppress(GpucollError):
                self._comm.check()  # if the communicator has failed, whoever uses the table is told
                self.error = error
                self._comm.abort()

    def _take_one(self) -> None:
        """Begin to receive one request; wait for it a while if nothing else is to be done."""
        if self._coming:
            message = self._comm.probe(ANY_SOURCE, REQUEST, wait=False)
        else:
            try:
                message = self._comm.probe(ANY_SOURCE, REQUEST, timeout_s=IDLE_S)
            except DeadlineError:
                self._comm.check()
                return
        if message is None:
            _, work = next(iter(self._coming.values()))[0]
            with contextlib.suppress(DeadlineError):
                work.wait(LOOK_S)
            return
        request = np.empty(message.size_bytes, np.uint8)
        work = message.recv(request, async_op=True, timeout_s=FOR_EVER_S)
        self._coming.setdefault(message.source, deque()).append((request, work))

    def _handle_complete(self) -> None:
        for rank, coming in [*self._coming.items()]:
            while coming and coming[0][1].done():
                request, work = coming.popleft()
                work.wait()
                self._handle(rank, request)
            if not coming:
                del self._coming[rank]

    def _handle(self, rank: int, request: Bytes) -> None:
        kind, number, count, tag = request[:_HEAD_BYTES].view(np.int64).tolist()
        middle = _HEAD_BYTES + 8 * count
        places = request[_HEAD_BYTES:middle].view(np.int64)
        if kind == Kind.PULL:
            found = np.empty((count, self._row_bytes), np.uint8)
            self._rows.take(places, found)
            self._answer(rank, tag, found.reshape(-1))
        elif kind == Kind.PUSH:
            if number > self._applied[rank]:  # otherwise it was sent once more
                values = request[middle:].reshape(count, self._row_bytes)
                try:
                    self._rows.apply(places, values)
                except DeadlineError as error:  # of a row's lock: the communicator is not broken
                    raise StateError(f"a push of rank {rank} failed: {error}") from error
                self._applied[rank] = number
        elif kind == Kind.FLUSH:
            self._answer(rank, tag, self._applied[rank : rank + 1].view(np.uint8).copy())
        elif kind == Kind.CLOCK:
            self._noted.note_clock(rank, number)

    def _answer(self, rank: int, tag: int, answer: Bytes) -> None:
        if len(self._sent) > 100:
            self._sent = [work for work in self._sent if not work.done()]
        self._sent.append(self._comm.send(answer, rank, tag, **_ASYNCHRONOUS))


def close_communicator(comm: Communicator, timeout_s: float = CLOSE_S) -> None:
    """Close a table's communicator, whatever has become of its messages."""
    with contextlib.suppress(*_LOSSES, MismatchError):  # to or from a rank that is stopped
        comm.close(timeout_s=timeout_s)


_NOTHING: Ints = np.empty(0, np.int64)


def _request(
    kind: Kind,
    places: Ints = _NOTHING,
    values: Bytes | None = None,
    order: Any = None,
    *,
    number: int = 0,
) -> Bytes:
    """Return a request; the values of a push are those at the indices in `order`."""
    middle = _HEAD_BYTES + places.nbytes
    row_bytes = 0 if values is None else values.shape[1]
    request = np.empty(middle + row_bytes * len(places), np.uint8)
    request[:_HEAD_BYTES].view(np.int64)[:] = kind, number, len(places), 0
    request[_HEAD_BYTES:middle].view(np.int64)[:] = places
    if values is not None:
        _take(values, order, request[middle:].reshape(-1, row_bytes))
    return request


def _take(rows: Bytes, order: Ints, out: Bytes) -> None:
    """Copy the rows at these indices."""
    row = np.dtype((np.void, rows.shape[1]))
    np.take(rows.view(row)[:, 0], order, out=out.view(row)[:, 0])
