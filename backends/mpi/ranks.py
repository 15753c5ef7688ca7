"""Ranks that MPI has brought together: an MPI communicator, with deadlines.

MPI has no deadlines. A function with a nonblocking form is started and polled. Any other runs in a
thread, which is abandoned if it does not end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpucoll.backends.mpi.library import problem_of
from gpucoll.errors import ArgumentError, ArgumentTypeError, RendezvousDeadlineError, StateError
from gpucoll.wording import rank_of

_LEAST_SLEEP_S, _MOST_SLEEP_S = 0.00002, 0.001
_left_behind: list[Any] = []
"""See `keep_for_ever`."""
_open: weakref.WeakSet[MpiRanks] = weakref.WeakSet()


class MpiRanks:
    """A private MPI communicator and its operations.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        Used by this object only, which owns it from here on.
    mpi : module
        mpi4py's ``MPI``.
    """

    def __init__(self, communicator: Any, mpi: Any) -> None:
        self.communicator = communicator
        self.mpi = mpi
        self.rank: int = communicator.Get_rank()
        self.world_size: int = communicator.Get_size()
        self.is_usable = True
        """Whether it has not been freed and MPI has not been finalised."""
        self.is_given_up = False
        """Whether requests on it were left to MPI, which may still work on them."""
        self.at_end: Callable[[], None] | None = None
        """Called when MPI is finalised."""
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
        _watch_end(mpi)
        _open.add(self)

    @staticmethod
    def of(communicator: Any, mpi: Any, timeout_s: float, call: str) -> MpiRanks:
        """Return the ranks of a user's communicator; all of them must call this.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            It is no communicator with a single group of ranks.
        RendezvousDeadlineError
            Some rank has not called this in time.
        """
        check_communicator(communicator, mpi, call)
        made, request = communicator.Idup()
        who = rank_of(communicator.Get_rank(), communicator.Get_size())
        _await(
            request,
            made,
            timeout_s,
            f"{who}: not every rank of the MPI communicator has called {call} within "
            f"{timeout_s:g} s, and MPI does not say which. All of them must call it, in the same "
            "order as MPI's own collectives",
        )
        return MpiRanks(made, mpi)

    def tell(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give every rank this rank's bytes and return those of all ranks, by rank."""
        text = (
            f"{rank_of(self.rank, self.world_size)}: not every rank has come within {timeout_s:g} s"
        )
        lengths = np.zeros(self.world_size, np.int64)
        mine = np.array([len(data)], np.int64)
        until = time.monotonic() + timeout_s
        request = self.communicator.Iallgather(mine, lengths)
        _await(request, (mine, lengths), timeout_s, text)
        largest = int(lengths.max())
        padded = np.frombuffer(data.ljust(largest, b"\0"), np.uint8)
        everyone = np.zeros((self.world_size, largest), np.uint8)
        request = self.communicator.Iallgather(padded, everyone)
        _await(request, (padded, everyone), max(until - time.monotonic(), 0.0), text)
        return [
            part[:length].tobytes() for part, length in zip(everyone, lengths.tolist(), strict=True)
        ]

    def part(self, ranks: Sequence[int], timeout_s: float) -> MpiRanks:
        """Return some of the ranks, in this order; these ranks must call it, and no others."""
        self.check()
        group = self.communicator.Get_group()
        chosen = group.Incl(list(ranks))

        def make() -> Any:
            return self.communicator.Create_group(chosen)

        text = (
            f"{rank_of(self.rank, self.world_size)}: MPI has not made a communicator of "
            f"{len(ranks)} ranks within {timeout_s:g} s"
        )
        made = _in_thread(make, timeout_s, text)
        group.Free()
        chosen.Free()
        return MpiRanks(made, self.mpi)

    def check(self) -> None:
        """Raise StateError if MPI can no longer be called."""
        if not self.is_usable:
            raise StateError(
                f"{rank_of(self.rank, self.world_size)}: MPI has been finalised, or this "
                "communicator of it freed: nothing can move through it any more"
            )

    def end(self) -> None:
        """Stop using MPI, which is about to be finalised."""
        if self.is_usable:
            self.is_usable = False
            if self.at_end is not None:
                self.at_end()

    def free(self, *, keep: bool = False) -> None:
        """Free the communicator; with `keep` it is kept instead, because MPI still works on it."""
        if not self.is_usable:
            return
        self.is_usable = False
        if keep:
            keep_for_ever(self.communicator)
        elif not self.mpi.Is_finalized():
            self.communicator.Free()


def check_communicator(communicator: Any, mpi: Any, call: str) -> None:
    """Raise unless ranks can meet by this communicator."""
    if not isinstance(communicator, mpi.Comm):
        raise ArgumentTypeError(
            f"{call} needs a communicator of mpi4py, such as MPI.COMM_WORLD; got "
            f"{type(communicator).__name__}"
        )
    if problem := problem_of(mpi):
        raise StateError(f"{call}: {problem}")
    if communicator == mpi.COMM_NULL:
        raise ArgumentError(f"{call}: this is MPI.COMM_NULL, which a rank outside the group gets")
    if communicator.Is_inter():
        raise ArgumentTypeError(
            f"{call} needs an intracommunicator; this intercommunicator has two groups of ranks: "
            "merge them first, by Intercomm.Merge()"
        )


def _await(request: Any, keep: Any, timeout_s: float, text: str) -> None:
    """Poll a request until it has ended."""
    until, sleep_s = time.monotonic() + timeout_s, _LEAST_SLEEP_S
    try:
        while not request.Test():
            if time.monotonic() > until:
                raise RendezvousDeadlineError(text)
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, _MOST_SLEEP_S)
    except BaseException:
        keep_for_ever((request, keep))
        raise


def _in_thread(make: Callable[[], Any], timeout_s: float, text: str) -> Any:
    """Run a function that MPI cannot start and poll; wait at most `timeout_s` for it."""
    made: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="gpucoll-mpi", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not made:
        keep_for_ever((thread, make))
        raise RendezvousDeadlineError(text)
    return made[0]


_watched: list[Any] = []


def _watch_end(mpi: Any) -> None:
    """Register a callback, once, before MPI is finalised: it first drops COMM_SELF's attributes."""
    if _watched:
        return

    def tell(*_: Any) -> None:
        for ranks in list(_open):
            ranks.end()

    keyval = mpi.Comm.Create_keyval(delete_fn=tell)
    mpi.COMM_SELF.Set_attr(keyval, True)
    _watched.append(keyval)


def keep_for_ever(held: Any) -> None:
    """Keep memory that MPI may still read or write alive until the process ends."""
    _left_behind.append(held)
