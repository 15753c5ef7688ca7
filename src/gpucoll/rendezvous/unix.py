"""The ranks of one host meet at an abstract Unix socket: no file, no port, no secret.

Rank 0 listens, the others connect and introduce themselves with their file descriptors; rank 0
checks that all belong together, decides what all must agree on, and hands everybody's descriptors
to everybody. Each rank makes its part of what all share and says so; rank 0 tells all when the last
one has. So either all ranks have it or none, and whoever is lost or gives up on the way ends the
others: its connection says so. The kernel vouches for the other end's user (SO_PEERCRED), in both
directions.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Generic

from gpucoll.rendezvous import frames
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, BadMessageError, Connection
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.host import Host
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import (
    SLICE_S,
    Decide,
    Meeting,
    T,
    Terms,
    Watch,
    heard,
    told,
)
from gpucoll.rendezvous.notices import address

__all__ = ["Meeting", "Watch", "meet"]

_RETRY_S = (0.001, 0.02)  # first and longest pause between two tries to connect
_LONGER_S = 1.0  # rank 0's own deadline explains more


def meet(
    job: Job,
    introduction: dict[str, Any],
    fds: list[int],
    *,
    check: Callable[[dict[str, Any], list[int]], None],
    decide: Decide,
    settle: Callable[[Meeting], T],
    undo: Callable[[T], None],
    timeout_s: float,
    watch: Watch | None = None,
) -> T:
    """Meet the other ranks of the job; return what `settle` made of it.

    Parameters
    ----------
    job : Job
        Its token names the socket; two meetings at the same time need different tokens.
    introduction : dict
        Sent to every rank. ``introduction["same"]`` must be equal on all of them.
    fds : list of int
        Sent with it, the same number on every rank. They stay the caller's.
    check : callable
        Called on rank 0 with every other introduction and its descriptors: raises ValueError, with
        the end of a sentence, where they cannot be a rank's.
    decide : callable
        Called on rank 0 with every introduction: returns the decision and descriptors for all.
    settle : callable
        Called on every rank with the `Meeting`, whose descriptors it takes over.
    undo : callable
        Called with what `settle` returned where another rank has failed since.
    timeout_s : float
        How long to wait for the others, in seconds.
    watch : Watch, optional
        What else says that a rank can never come.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not come in time.
    RendezvousError
        A rank does not belong to the job.
    PeerLostError, AbortedError
        A rank is gone, or gave up.
    """
    watch = watch or Watch(job.rank, job.world_size)
    watch.has_begun = True
    with held_signals() as signals:
        terms = Terms(
            job, introduction, fds, check, decide, settle, undo, timeout_s, watch, signals
        )
        try:
            if job.world_size == 1:
                decision, shared = decide([introduction])
                own = [socket.dup(fd) for fd in fds]
                return settle(Meeting(job, [introduction], decision, shared, [own]))
            return Host(terms).run() if job.rank == 0 else _Guest(terms).run()
        finally:
            watch.close()


class _Guest(Generic[T]):
    """Another rank, for the length of a meeting."""

    def __init__(self, terms: Terms[T]) -> None:
        self.terms = terms
        self.connection: Connection | None = None
        self.process = 0
        """Rank 0's."""
        self.is_answered = False
        self.made: T | None = None
        self.has_heard = False
        """Whether rank 0 itself said that the meeting failed."""

    def run(self) -> T:
        try:
            answer = None
            while answer is None:
                answer = self._ask()
            self.is_answered = True
            self.made = made = self._settle(*answer)
            self._send({"ready": True})
            self._receive()
            return made
        except BaseException as error:
            self._withdraw(error)
            raise
        finally:
            if self.connection is not None:
                self.connection.close()

    def _ask(self) -> tuple[dict[str, Any], list[int]] | None:
        """Introduce this rank to rank 0 and return its answer; None: ask again."""
        terms = self.terms
        most_fds = terms.job.world_size * len(terms.fds) + 16
        most_bytes = (terms.job.world_size + 1) * INTRODUCTION_BYTES
        self.connection = Connection(self._connect(), most_bytes, most_fds)
        self._send(terms.introduction, terms.fds)
        content, fds = self._receive()
        if "again" not in content:
            return content, fds
        self.connection.close()
        self.connection = None
        self._look(set(), 0.0, "waited for a place with rank 0, which has too many connections")
        time.sleep(SLICE_S)
        return None

    def _settle(self, answer: dict[str, Any], fds: list[int]) -> T:
        n_shared, decision = answer.get("shared"), answer.get("decision")
        introductions, each = answer.get("introductions"), len(self.terms.fds)
        world_size = self.terms.job.world_size
        if (
            not isinstance(introductions, list)
            or not isinstance(decision, dict)
            or len(introductions) != world_size
            or n_shared != len(fds) - world_size * each
        ):
            frames.close_all(fds)
            raise self.terms.watch.left(0, "what is no answer")
        starts = range(n_shared, len(fds), each) if each else [0] * world_size
        by_rank = [fds[start : start + each] for start in starts]
        return self.terms.settle(
            Meeting(self.terms.job, introductions, decision, fds[:n_shared], by_rank)
        )

    def _withdraw(self, error: BaseException) -> None:
        """Tell rank 0 why this rank gives up, and let go of what was made."""
        message = told(error, self.terms.job.rank)
        if self.connection is not None and not self.has_heard:
            with contextlib.suppress(OSError):  # it is gone itself
                self.connection.send(frames.encode(message))
            self.terms.watch.is_told = self.is_answered and message["kind"] == "refused"
        if self.made is not None:
            self.terms.undo(self.made)

    # --- waiting ----------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        """Connect to rank 0, which may not have started yet."""
        terms = self.terms
        others = set(range(terms.job.world_size)) - {terms.job.rank}
        pause_s, longest_s = _RETRY_S
        while True:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                end.connect(address(terms.job.token))
                self.process = frames.peer_process(end)
                return end
            except (ConnectionRefusedError, BlockingIOError):
                end.close()
            except BaseException:
                end.close()
                raise
            late = f"rank {terms.watch.number(0)}, which did not come"
            self._look(others, 0.0, f"waited {terms.timeout_s:g} s for {late}")
            time.sleep(pause_s)  # nobody can be told when an address appears
            pause_s = min(2 * pause_s, longest_s)

    def _look(self, awaited: set[int], longer_s: float, what: str) -> None:
        """Raise where nothing can come of this any more."""
        terms = self.terms
        terms.signals.check()
        if time.monotonic() > terms.deadline + longer_s:
            call = terms.watch.call
            raise terms.watch.late(f"{terms.who} {what}. Did every rank start, and call {call}?")
        if self.made is not None:
            return  # the others may have been told that all is well: this rank cannot know better
        if (found := terms.watch.check(awaited)) is not None:
            raise terms.watch.lost(*found)

    def _send(self, content: dict[str, Any], fds: list[int] | None = None) -> None:
        assert self.connection is not None
        try:
            self.connection.send(frames.encode(content, len(fds or [])), fds)
            while self.connection.is_sending:
                self._wait(select.POLLOUT)
                self.connection.flush()
        except OSError:
            pass  # rank 0 is gone; it may have said why

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for rank 0's next message, and return it unless it is a failure."""
        assert self.connection is not None
        watch = self.terms.watch
        while True:
            try:
                received = self.connection.receive()
            except OSError:
                raise watch.lost(0, f"its process {self.process} ended, or left") from None
            except BadMessageError as error:
                raise watch.left(0, f"what is no answer: it {error}") from error
            if received is not None:
                break
            self._wait(select.POLLIN)
        content, fds = received
        if "error" in content:
            frames.close_all(fds)
            self.has_heard = True
            raise heard(content, watch)
        return content, fds

    def _wait(self, events: int) -> None:
        assert self.connection is not None
        rank = f"rank {self.terms.watch.number(0)}, process {self.process}"
        what = f"waited {self.terms.timeout_s:g} s for an answer of {rank}"
        self._look(set(), _LONGER_S, what)
        poll = select.poll()
        poll.register(self.connection, events)
        poll.poll(1000 * SLICE_S)
