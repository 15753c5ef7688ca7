"""The side of all ranks but 0 in a meeting: each connects to rank 0 and follows its decision."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Generic

from gpucoll.errors import AuthenticationError, GpucollError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.endpoint import PeerConnection, TurnedAwayError
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, BadMessageError, Message
from gpucoll.rendezvous.meeting import SLICE_S, Meeting, T, Terms, heard, poll_once, told

_RETRY_S = (0.001, 0.02)  # first and longest pause between two tries to connect
_TURNED_AWAY = 5
"""How often rank 0 may close a connection unauthenticated before this counts as its answer."""
_LONGER_S = 1.0  # rank 0's own deadline error explains more, so let it come first


class Guest(Generic[T]):
    """A rank other than 0, for the length of a meeting."""

    def __init__(self, terms: Terms[T]) -> None:
        self.terms = terms
        self.connection: PeerConnection | None = None
        self.is_answered = False
        self._turned_away = 0
        self.made: T | None = None
        self.has_heard = False
        """Whether rank 0 itself has reported that the meeting failed."""

    def run(self) -> T:
        """Meet the other ranks; return the result of `settle`."""
        try:
            answer = None
            while answer is None:
                answer = self._ask()
            self.is_answered = True
            self.made = made = self._settle(*answer)
            try:
                self._send({"ready": True})
                self._receive()
            except GpucollError:
                if not self.terms.watch.is_committed():
                    raise
            return made
        except BaseException as error:
            self._withdraw(error)
            raise
        finally:
            if self.connection is not None:
                self.connection.close()

    def _ask(self) -> tuple[Message, list[int]] | None:
        """Introduce this rank to rank 0 and return its answer; None: try again."""
        terms = self.terms
        most_fds = terms.job.world_size * len(terms.fds) + 16
        most_bytes = (terms.job.world_size + 1) * INTRODUCTION_BYTES
        self.connection = self._connect(most_bytes, most_fds)
        try:
            self._send(terms.introduction, terms.fds)
            content, fds = self._receive()
        except TurnedAwayError as error:
            self._turned_away += 1
            if self._turned_away >= _TURNED_AWAY:
                raise AuthenticationError(str(error)) from None
        else:
            if "again" not in content:
                return content, fds
        self._turn_back()
        return None

    def _turn_back(self) -> None:
        """Disconnect and wait a moment, because rank 0 had no room."""
        assert self.connection is not None
        self.connection.close()
        self.connection = None
        self._look(set(), 0.0, "waited for a place with rank 0, which has too many connections")
        time.sleep(SLICE_S)

    def _settle(self, answer: Message, fds: list[int]) -> T:
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
            raise self.terms.watch.left(0, "an unknown error: its answer is invalid")
        starts = range(n_shared, len(fds), each) if each else [0] * world_size
        by_rank = [fds[start : start + each] for start in starts]
        job = self.terms.job
        meeting = Meeting(
            job, introductions, decision, fds[:n_shared], by_rank, self._hear_meanwhile
        )
        return self.terms.settle(meeting)

    def _hear_meanwhile(self) -> None:
        """Raise if rank 0 has reported a failure in the meantime."""
        assert self.connection is not None
        if poll_once(self.connection, select.POLLIN, 0.0):
            self._receive()

    def _withdraw(self, error: BaseException) -> None:
        """Report to rank 0 why this rank gives up, and undo what was made."""
        message = told(error, self.terms.job.rank)
        if self.connection is not None and self.connection.is_known and not self.has_heard:
            with contextlib.suppress(OSError, AuthenticationError):  # rank 0 is gone itself
                self.connection.send(frames.encode(message))
            self.terms.watch.is_told = self.is_answered and message["kind"] == "refused"
        if self.made is not None:
            self.terms.undo(self.made)

    # --- waiting ----------------------------------------------------------------------------------

    def _connect(self, most_bytes: int, most_fds: int) -> PeerConnection:
        """Connect to rank 0, which may not have started yet."""
        terms = self.terms
        others = set(range(terms.job.world_size)) - {terms.job.rank}
        pause_s, longest_s = _RETRY_S
        while True:
            if (connection := terms.endpoint.connect(most_bytes, most_fds)) is not None:
                return connection
            late = f"rank {terms.watch.number(0)}, which did not come"
            self._look(others, 0.0, f"waited {terms.timeout_s:g} s for {late}")
            time.sleep(pause_s)  # nothing announces that an address appears
            pause_s = min(2 * pause_s, longest_s)

    def _look(self, awaited: set[int], longer_s: float, what: str) -> None:
        """Raise if the meeting can no longer succeed."""
        terms = self.terms
        terms.signals.check()
        if time.monotonic() > terms.deadline + longer_s:
            call = terms.watch.call
            trouble = terms.endpoint.trouble()
            raise terms.watch.late(
                f"{terms.who} {what}.{trouble} Did every rank start, and call {call}?"
            )
        if self.made is not None:
            return  # rank 0 may have confirmed the meeting to the others already
        if (found := terms.watch.check(awaited)) is not None:
            raise terms.watch.lost(*found)

    def _send(self, content: Message, fds: list[int] | None = None) -> None:
        assert self.connection is not None
        try:
            self.connection.send(frames.encode(content, len(fds or [])), fds)
            while self.connection.is_sending:
                self._wait(self.connection.events)
                self.connection.flush()
        except OSError:
            if not self.connection.is_known:
                raise TurnedAwayError(self._where("closed the connection at once")) from None
            # Rank 0 is gone; a message from it may explain why.
        except AuthenticationError as error:
            raise type(error)(self._where(str(error))) from None

    def _where(self, text: str) -> str:
        """Return a text about the other end as a sentence of this rank."""
        assert self.connection is not None
        return f"{self.terms.who} in {self.terms.watch.call}: {self.connection.peer} {text}"

    def _receive(self) -> tuple[Message, list[int]]:
        """Wait for rank 0's next message; return it, or raise the failure that it reports."""
        assert self.connection is not None
        watch = self.terms.watch
        while True:
            try:
                received = self.connection.receive()
            except OSError:
                if not self.connection.is_known:
                    raise TurnedAwayError(self._where("closed the connection")) from None
                raise watch.lost(0, f"its {self.connection.peer} ended, or left") from None
            except BadMessageError as error:
                raise watch.left(0, f"an unknown error: it {error}") from error
            except AuthenticationError as error:
                raise type(error)(self._where(str(error))) from None
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
        rank = f"rank {self.terms.watch.number(0)}, {self.connection.peer}"
        what = f"waited {self.terms.timeout_s:g} s for an answer of {rank}"
        self._look(set(), _LONGER_S, what)
        poll_once(self.connection, events)
