"""Arrays that one rank publishes and the others take, without ever waiting for each other."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import numpy as np

from gpucoll import (
    ArgumentError,
    ArgumentTypeError,
    Communicator,
    DeadlineError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.api.agreement import agree, check_communicator
from gpucoll.config import check_timeout_s
from gpucoll.finalizers import leave
from gpucoll.rendezvous.marks import WaitMark
from gpucoll.tables.board import (
    CLOSED,
    GONE,
    LEFT,
    VERSION_SHIFT,
    Board,
    end_of,
    version_of,
    wait_newer,
)
from gpucoll.tables.carriers import Carrier, Server
from gpucoll.tables.layout import Layout
from gpucoll.topology.host_identity import host_id
from gpucoll.topology.processes import start_time
from gpucoll.training.parameters import AnyArray
from gpucoll.transport.shared import ordering
from gpucoll.wording import rank_of

__all__ = ["Published"]

CALL = "Published"
_Offer: TypeAlias = tuple[str, int, int, int, "int | None"]
"""What a rank tells the others: its host, process (2), version and the source that it knows."""
_NEWEST = ctypes.c_int64((1 << 63) - 1)
"""In the place of LATEST once that is unmapped: newer than all, so that `latest` looks closer."""


class Published:
    """Arrays of which one rank, the source, publishes versions that all ranks read.

    >>> with Published(comm, weights, source=0) as published:
    ...     if comm.rank == 0:
    ...         published.publish(train(weights))
    ...     else:
    ...         version, weights = published.latest(newer_than=version, wait=True)

    A version is whole or not there: what `latest` returns is never a mixture of two versions. The
    source never waits for a reader, even if that is stopped, and readers never wait for each other.

    Parameters
    ----------
    comm : Communicator
        Collective: all ranks make the object together.
    like : array, or list, tuple or dict of arrays
        The structure, shapes and dtypes of each version, the same on all ranks. May be nested.
        Arrays of NumPy, CuPy, PyTorch or JAX, on any device. The libraries and devices may differ
        between ranks: each gets arrays of its own kind. The values do not matter.
    source : int
        The rank that publishes.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        An argument is invalid, or the ranks differ. Every rank raises one of these errors.
    SharedMemoryError
        On every rank, if a host has no memory for it.

    Notes
    -----
    Memory of a host: at most a slot of a version's size for each of its ranks (and, on the source's
    host, for each other host) and two more. A slot is taken only while readers copy from the
    others; usually there are two or three.

    Between hosts, a thread of the source sends each other host the latest version whenever that
    host has an older one: one transfer for each host. It is received by a thread of the host's
    lowest rank, the host's carrier.
    """

    def __init__(self, comm: Communicator, like: AnyArray, source: int = 0) -> None:
        check_communicator(comm)
        self._make(comm, lambda: Layout(like), source, None)

    def _make(
        self,
        comm: Communicator,
        make_layout: Callable[[], Layout],
        source: int | None,
        before: Published | None,
    ) -> None:
        problem: Exception | None = None
        settings: dict[str, str] = {}
        version = 0
        self._load: Callable[[], int] = self._raise_closed
        self._seen = _NEWEST
        """LATEST, for a look at whether it has changed."""
        self._lock = threading.Lock()
        self._size, self._rank = comm.world_size, comm.rank
        try:
            self._layout = make_layout()
            settings = self._layout.settings
            _check_source(source, comm.world_size)
            version = 0 if before is None else before.version
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        known = comm.rank if source is None and before is not None and before.is_source else source
        self._process = os.getpid()
        mine = (host_id(), self._process, start_time(self._process), version, known)
        offers: list[_Offer] = agree(comm, CALL, problem, settings, mine)
        self.source = _agreed_source([offer[4] for offer in offers], comm)
        self._newest = max(offer[3] for offer in offers)
        self._timeout_s = comm._group.timeout_s
        with contextlib.ExitStack() as undo:
            self._open(comm, offers, before, undo)
            undo.pop_all()

    def _open(
        self,
        comm: Communicator,
        offers: Sequence[_Offer],
        before: Published | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Make the board, the threads, and what the board has from before."""
        hosts = [offer[0] for offer in offers]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
        carriers = {host: hosts.index(host) for host in hosts if host != hosts[self.source]}
        n_pins = len(here) + len(carriers)  # the source's threads read, too
        self._place = here.index(comm.rank)
        self._writer = self.source if self.source in here else here[0]
        self._writer_process = offers[self._writer][1:3]
        self._board = board = Board(comm, n_pins, self._layout.size_bytes)
        undo.callback(board.memory.close)
        with_version = [rank for rank in here if offers[rank][3]]
        if before is not None and with_version and comm.rank == with_version[0]:
            before._copy_to(board)
        self._threads: list[Server | Carrier] = []
        for number, (_, carrier) in enumerate(sorted(carriers.items())):
            is_in = comm.rank in (self.source, carrier)
            key = 0 if comm.rank == self.source else 1
            if (pair := comm.split(0 if is_in else None, key)) is None:
                continue
            if comm.rank == self.source:
                thread: Server | Carrier = Server(board, pair, len(here) + number)
            else:
                thread = Carrier(board, pair)
            self._threads.append(thread)
            undo.callback(thread.close)
        if self._newest:
            comm.barrier()  # what was there before is there now
        # No Python code runs between the look at this attribute and the load: `close` changes it.
        self._load = functools.partial(ordering.load, board.latest)
        self._seen = ctypes.c_int64.from_address(board.latest)
        self._finalizer = weakref.finalize(
            self, leave, _release, board, self._threads, self.is_source, self._process
        )
        self._finalizer.atexit = False

    # --- the source -------------------------------------------------------------------------------

    @property
    def is_source(self) -> bool:
        """Whether this rank publishes."""
        return self._rank == self.source

    def publish(self, arrays: AnyArray) -> int:
        """Make a version of these arrays the latest; return its number: 1, 2, ...

        Only the source may call it. Never waits for a reader. The arrays are copied: the program
        may change them afterwards.

        Parameters
        ----------
        arrays : array, or list, tuple or dict of arrays
            Structure, shapes and dtypes of `like`; of any library.

        Raises
        ------
        StateError
            This rank is not the source, or the object is closed.
        ArgumentError, ArgumentTypeError
            The arrays differ from `like`. Nothing was published.
        SharedMemoryError
            The host has no memory for another version. Nothing was published.

        Notes
        -----
        Cost: a copy into shared memory, and a system call.
        """
        if not self.is_source:
            raise StateError(
                f"publish on {self._who}: only the source, rank {self.source}, may publish"
            )
        given = self._layout.checked("arrays", arrays)
        self._check_usable()  # a forked child must not wait for a lock of its parent's threads
        with self._lock:
            self._check_usable()
            slot = self._board.free_slot()
            self._layout.store(given, self._board.slot(slot))
            self._newest += 1
            self._board.announce(self._newest, slot)
            return self._newest

    # --- readers ----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of the latest version on this host; 0: nothing was published."""
        return version_of(self._load())

    def latest(
        self,
        newer_than: int | None = None,
        out: AnyArray = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[int, AnyArray]:
        """Return the latest version: its number and its arrays.

        Parameters
        ----------
        newer_than : int, optional
            Return no arrays unless there is a version newer than this. Default: any version.
        out : array, or list, tuple or dict of arrays, optional
            Write the version to these arrays. Structure, shapes and dtypes are those of `like`, of
            any library but JAX, whose arrays cannot be written. Default: new arrays like `like`.
        wait : bool
            Whether to wait for a version newer than `newer_than`.
        timeout_s : float, optional
            How long to wait, in seconds. Default: the deadline of the communicator.

        Returns
        -------
        version : int
            The number of the latest version; 0 if nothing was published.
        arrays
            Arrays as in `like`, or `out`. None if there is no version, or none newer than
            `newer_than`.

        Raises
        ------
        DeadlineError
            No such version came in time. All stays usable.
        PeerLostError
            With `wait`: no such version can come, since the source is gone or has closed. The last
            version can still be read.
        StateError
            The object is closed.
        ArgumentError, ArgumentTypeError
            An argument is invalid.

        Notes
        -----
        Cost: one load, below a microsecond, if nothing is newer; otherwise a copy. A rank's threads
        may read at the same time, and copy one after the other.
        """
        # No data is read behind this load, so it needs no order; and it takes 0.1 us, not 0.5.
        version = self._seen.value >> VERSION_SHIFT
        if not wait and type(newer_than) is int and version <= newer_than:
            return version, None
        outs = None if out is None else self._layout.checked("out", out, written=True)
        least = _checked_version(newer_than)
        check_timeout_s(timeout_s)
        self._check_usable()
        if wait:
            self._wait(least, self._timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            self._check_usable()
            word = self._board.pin(self._place)
            try:
                version = version_of(word)
                if version <= least:
                    return version, None
                slot = self._board.slot(word)
                if outs is None:
                    return version, self._layout.made(slot)
                self._layout.write(slot, outs)
                return version, out
            finally:
                self._board.unpin(self._place)

    def _wait(self, version: int, timeout_s: float) -> None:
        if version_of(self._load()) > version:
            return
        until_s = time.monotonic() + timeout_s
        mark = WaitMark(self._rank)
        is_here = self._writer == self.source

        def look(word: int) -> None:
            self._look(word)
            mark.note(
                f"waiting in latest() for a version newer than {version}",
                {self.source: self._writer_process[0]} if is_here else {},
                awaits_other_hosts=not is_here,
            )

        try:
            found = wait_newer(lambda: self._load(), self._board.latest, version, until_s, look)
        finally:
            mark.close()
        if not found:
            raise DeadlineError(
                f"latest on {self._who}: no version newer than {version} came within "
                f"{timeout_s:g} s (timeout_s). The source, rank {self.source}, has published none, "
                "or is stopped"
            )

    def _look(self, word: int) -> None:
        """Raise if no further version can come."""
        reason = end_of(word)
        if not reason and start_time(self._writer_process[0]) != self._writer_process[1]:
            reason = GONE if self._writer == self.source else LEFT
        if not reason:
            return
        source, writer = (rank_of(rank, self._size) for rank in (self.source, self._writer))
        what = {
            CLOSED: f"the source, {source}, has closed it",
            GONE: f"the source, {source}, is gone",
            LEFT: f"{writer}, which receives for this host, is gone, has closed it, or has no "
            "memory",
        }[reason]
        raise PeerLostError(
            f"latest on {self._who}: no version newer than {version_of(word)} follows: {what}. "
            "The last version can still be read; go on by kept_for(comm.shrink(), source=...)"
        )

    # --- other communicators, the end -------------------------------------------------------------

    def kept_for(self, comm: Communicator, source: int | None = None) -> Published:
        """Return an object for the ranks of another communicator, and close this one. Collective.

        For use after `Communicator.grow` or `shrink`. Ranks that were not there before make
        ``Published(comm, like, source)`` at the same time. All ranks of a host on which a rank was
        there before can read the last version at once, and the numbers of versions go on.

        If it raises, the object can still be kept for another communicator, and the last version
        can be read. But other hosts than the source's receive no further one, and waits there raise
        `PeerLostError`.

        Parameters
        ----------
        comm : Communicator
            Its ranks.
        source : int, optional
            The rank in `comm` that publishes. Default: the one that did before.

        Raises
        ------
        ArgumentError
            On every rank: the source is not in `comm`, and no rank names another.
        """
        check_communicator(comm)
        for thread in self._threads:
            thread.close()  # a version that comes later would not be the last one any more
        kept = object.__new__(Published)
        try:
            kept._make(comm, lambda: self._layout, source, self)
        except BaseException:
            if any(isinstance(thread, Carrier) for thread in self._threads):
                self._board.end(LEFT)
            raise
        self.close()
        return kept

    def _copy_to(self, board: Board) -> None:
        """Make the latest version that of a new board."""
        with self._lock:
            word = self._board.pin(self._place)
            try:
                board.slot(0)[:] = self._board.slot(word)
                board.announce(version_of(word), 0)
            finally:
                self._board.unpin(self._place)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Release this rank's part. Not collective; closing twice does nothing.

        After the source has closed, readers can still read the last version, and a wait for another
        raises `PeerLostError`. The source waits until the other hosts have received the last one.
        If the carrier of a host, its lowest rank, closes, its host receives no further versions.

        Parameters
        ----------
        timeout_s : float, optional
            How long the source waits for other hosts, and any rank for its own threads, in seconds.
            What is under way then is given up. Default: the deadline of the communicator.

        Raises
        ------
        DeadlineError
            Another thread of this rank is still copying. Nothing was released.
        """
        check_timeout_s(timeout_s)
        if self._load == self._raise_closed or self._process != os.getpid():
            return
        until_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        if not self._lock.acquire(timeout=max(until_s - time.monotonic(), 0.0)):
            raise DeadlineError(f"close on {self._who}: another thread is still copying")
        self._load, self._seen = self._raise_closed, _NEWEST
        self._lock.release()
        if self._finalizer.detach():  # no other thread closes it
            _release(self._board, self._threads, self.is_source, self._process, until_s)

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        self._load()  # raises if it is closed
        if self._process != os.getpid():
            raise StateError(f"{CALL} on {self._who} belongs to the process that has forked this")

    def _raise_closed(self) -> NoReturn:
        raise StateError(f"{CALL} on {self._who} is closed")

    @property
    def _who(self) -> str:
        return rank_of(self._rank, self._size)

    def __repr__(self) -> str:
        state = "closed" if self._load == self._raise_closed else f"version {self.version}"
        return f"<Published from rank {self.source} on {self._who}: {state}>"


def _release(
    board: Board,
    threads: Sequence[Server | Carrier],
    is_source: bool,
    process: int,
    until_s: float = 0.0,
) -> None:
    """Release a rank's part, which no thread of the program uses any more."""
    if process != os.getpid():
        return  # a forked child has dropped the object
    try:
        if is_source:
            board.end(CLOSED)
        for thread in threads:
            if isinstance(thread, Server):
                thread.finish(until_s)
    finally:  # also if a signal has ended the wait
        for thread in threads:
            thread.close()
            if isinstance(thread, Carrier):
                board.end(LEFT)
        board.memory.close()


def _check_source(source: object, world_size: int) -> None:
    if source is None:
        return
    if isinstance(source, bool) or not isinstance(source, int):
        raise ArgumentTypeError(f"{CALL}: source must be a rank, an int; got {source!r}")
    if source not in range(world_size):
        raise ArgumentError(f"{CALL}: source is {source}; there are ranks 0 to {world_size - 1}")


def _agreed_source(known: list[int | None], comm: Communicator) -> int:
    """Return the source that the ranks name, some of which may name none."""
    named = {source: rank for rank, source in enumerate(known) if source is not None}
    if not named:
        raise ArgumentError(
            f"{CALL}: the source is not among the {comm.world_size} ranks: name another on all of "
            "them, kept_for(comm, source=...)"
        )
    if len(named) > 1:
        texts = [f"rank {source} on rank {rank}" for source, rank in sorted(named.items())]
        raise MismatchError(f"{CALL}: source is {' and '.join(texts)}: pass the same on all ranks")
    (source,) = named
    return source


def _checked_version(newer_than: object) -> int:
    if newer_than is None:
        return 0
    if isinstance(newer_than, bool) or not isinstance(newer_than, int | np.integer):
        raise ArgumentTypeError(f"latest: newer_than must be a version, an int; got {newer_than!r}")
    return max(int(newer_than), 0)
