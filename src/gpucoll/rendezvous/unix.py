"""The ranks of one host meet at an abstract Unix socket: no file, no port, no secret.

Rank 0 listens, the others connect and introduce themselves with their file descriptors; rank 0
checks that all belong together, decides what all must agree on, and hands everybody's descriptors
to everybody. The kernel vouches for the other end's user (SO_PEERCRED), in both directions.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucoll.errors import GpucollError, RendezvousError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.job import Job
from gpucoll.wording import list_ranks

Decide = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], list[int]]]
_RETRY_S = (0.001, 0.05)  # first and longest pause between two tries to connect
_INTRODUCTION_S = 10.0  # a rank introduces itself as soon as it is connected
_REFUSING_S = 5.0  # how long rank 0 stays to tell late ranks why there is no meeting


@dataclass
class Meeting:
    """What a rank knows after the ranks have met. The descriptors belong to the caller."""

    job: Job
    introductions: list[dict[str, Any]]
    """By rank."""
    decision: dict[str, Any]
    """What rank 0 decided for all."""
    shared_fds: list[int]
    """What rank 0 made for all."""
    rank_fds: list[list[int]]
    """By rank: the descriptors that came with its introduction."""


def meet(
    job: Job, introduction: dict[str, Any], fds: list[int], decide: Decide, timeout_s: float
) -> Meeting:
    """Meet the other ranks of the job.

    Parameters
    ----------
    job : Job
        Its token names the socket; two meetings at the same time need different tokens.
    introduction : dict
        Sent to every rank. ``introduction["same"]`` must be equal on all of them.
    fds : list of int
        Sent with it, the same number on every rank. They stay the caller's.
    decide : callable
        Called on rank 0 with every introduction: returns the decision and descriptors for all.
    timeout_s : float
        How long to wait for the others, in seconds.

    Raises
    ------
    RendezvousError
        A rank did not come in time, or does not belong to the job.
    """
    deadline = time.monotonic() + timeout_s
    if job.world_size == 1:
        decision, shared = decide([introduction])
        return Meeting(job, [introduction], decision, shared, [_duplicates(fds)])
    if job.rank == 0:
        return _Host(job, deadline, timeout_s).receive_all(introduction, fds, decide)
    return _visit(job, introduction, fds, deadline, timeout_s)


def _address(job: Job) -> bytes:
    # Hashed, because a name has at most 107 bytes and tokens that differ must not meet.
    return b"\0gpucoll-" + hashlib.sha256(job.token.encode()).hexdigest().encode()


def _duplicates(fds: list[int]) -> list[int]:
    return [socket.dup(fd) for fd in fds]


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


class _Host:
    """Rank 0's side of a meeting."""

    def __init__(self, job: Job, deadline: float, timeout_s: float) -> None:
        self.job = job
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.guests: list[socket.socket] = []
        self.refusal: RendezvousError | None = None
        self.introductions: dict[int, dict[str, Any]] = {}
        self.fds: dict[int, list[int]] = {}

    def receive_all(self, introduction: dict[str, Any], fds: list[int], decide: Decide) -> Meeting:
        self.introductions[0], self.fds[0] = introduction, _duplicates(fds)
        try:
            with self._listen() as listener:
                self._admit_all(listener)
            ranks = range(self.job.world_size)
            ordered = [self.introductions[rank] for rank in ranks]
            decision, shared = decide(ordered)
            answer = {"decision": decision, "introductions": ordered, "shared": len(shared)}
            by_rank = [self.fds[rank] for rank in ranks]
            everything = shared + [fd for group in by_rank for fd in group]
            try:
                for guest in self.guests:
                    frames.send(guest, answer, everything)
            except OSError as error:
                frames.close_all(shared)
                raise RendezvousError(
                    f"a rank was lost while the {self.job.world_size} ranks met: {error.strerror}"
                ) from error
        except BaseException as error:
            self._refuse(error)
            for group in self.fds.values():
                frames.close_all(group)
            raise
        finally:
            for guest in self.guests:
                guest.close()
        return Meeting(self.job, ordered, decision, shared, by_rank)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(self.job))
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"rank 0 of {self.job.world_size} cannot take the job's socket: "
                f"{error.strerror}. Is another job running with the same token "
                f"({self.job.origin})?"
            ) from error
        listener.listen(self.job.world_size)
        return listener

    def _admit_all(self, listener: socket.socket) -> None:
        """Admit every rank; where one does not belong here, stay a little to tell the others."""
        while len(self.introductions) < self.job.world_size:
            refusal = self._admit(listener)
            if refusal is not None and self.refusal is None:
                self.refusal = refusal
                self.deadline = min(self.deadline, time.monotonic() + _REFUSING_S)
        if self.refusal is not None:
            raise self.refusal

    def _admit(self, listener: socket.socket) -> RendezvousError | None:
        """Take one connection and its introduction; return why it does not belong here."""
        listener.settimeout(_left(self.deadline))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if self.refusal is not None:
                raise self.refusal from None
            missing = sorted(set(range(self.job.world_size)) - set(self.introductions))
            raise RendezvousError(
                f"rank 0 of {self.job.world_size} waited {self.timeout_s:g} s: "
                f"{list_ranks(missing)} did not come. Did every rank start, and call init?"
            ) from None
        try:
            frames.check_peer(connection)
            connection.settimeout(min(_left(self.deadline), _INTRODUCTION_S))
            guest, fds = frames.receive(connection)
            rank, same = int(guest["rank"]), dict(guest["same"])
        except (OSError, ValueError, TypeError, LookupError, GpucollError):
            connection.close()  # a stranger, or a rank that died: it will be missing
            return None
        self.guests.append(connection)
        if rank in self.introductions:
            frames.close_all(fds)
            return RendezvousError(f"two processes say that they are rank {rank} of this job")
        self.introductions[rank], self.fds[rank] = guest, fds
        return _difference(rank, same, self.introductions[0]["same"])

    def _refuse(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, GpucollError | MemoryError) else repr(error)
        for guest in self.guests:
            try:
                frames.send(guest, {"error": text})
            except OSError:
                pass  # that rank is gone; the others still want to know


def _difference(rank: int, theirs: dict[str, Any], ours: dict[str, Any]) -> RendezvousError | None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            return RendezvousError(
                f"rank {rank} and rank 0 do not belong together: {name} is {theirs.get(name)} on "
                f"rank {rank} and {value} on rank 0"
            )
    return None


def _visit(
    job: Job, introduction: dict[str, Any], fds: list[int], deadline: float, timeout_s: float
) -> Meeting:
    """Another rank's side of a meeting."""
    with _connect(job, deadline, timeout_s) as connection:
        try:
            frames.check_peer(connection)
            frames.send(connection, introduction, fds)
            connection.settimeout(_left(deadline) + 1.0)  # rank 0's own deadline explains more
            answer, received = frames.receive(connection)
        except OSError as error:
            raise RendezvousError(
                f"rank {job.rank} of {job.world_size} lost rank 0 while meeting it: {error}"
            ) from error
    if "error" in answer:
        raise RendezvousError(f"rank 0 refused the meeting: {answer['error']}")
    n_shared = answer["shared"]
    each = (len(received) - n_shared) // job.world_size
    starts = range(n_shared, len(received), each) if each else []
    by_rank = [received[start : start + each] for start in starts]
    introductions = answer["introductions"]
    return Meeting(job, introductions, answer["decision"], received[:n_shared], by_rank)


def _connect(job: Job, deadline: float, timeout_s: float) -> socket.socket:
    """Connect to rank 0, which may not have started yet."""
    pause_s, longest_s = _RETRY_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(_address(job))
            return connection
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        if time.monotonic() + pause_s > deadline:
            raise RendezvousError(
                f"rank {job.rank} of {job.world_size} waited {timeout_s:g} s for rank 0, which did "
                "not come. Did every rank start, and call init?"
            )
        time.sleep(pause_s)  # nobody can be told when an address appears
        pause_s = min(2 * pause_s, longest_s)
