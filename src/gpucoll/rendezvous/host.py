"""Rank 0's side of a meeting: it gathers the other ranks and tells all of them the outcome."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Generic, NoReturn

from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.arrivals import Arrivals, Introduced
from gpucoll.rendezvous.endpoint import PeerConnection
from gpucoll.rendezvous.frames import BadMessageError, Message
from gpucoll.rendezvous.job import HAVE_NAMES
from gpucoll.rendezvous.meeting import SLICE_S, Meeting, T, Terms, heard, told
from gpucoll.wording import list_ranks

_REFUSING_S = 5.0  # how long rank 0 stays to tell late ranks why there is no meeting
_TELLING_S = 0.5  # how long it stays to report a failure to ranks that are slow to read


class Host(Generic[T]):
    """Rank 0, for the length of a meeting."""

    def __init__(self, terms: Terms[T]) -> None:
        self.terms = terms
        self.world_size = terms.job.world_size
        self.deadline = terms.deadline
        self.arrivals: Arrivals | None = None
        self.guests: dict[int, PeerConnection] = {}
        self.also_told: list[PeerConnection] = []
        """Connections of ranks that do not belong to the job, which get the outcome too."""
        self.ready: set[int] = set()
        self.introductions = {0: terms.introduction}
        self.fds: dict[int, list[int]] = {}
        self.refusal: RendezvousError | None = None
        self.verdict: Message | None = None
        """The message about the failure for the other ranks."""
        self.made: T | None = None

    def run(self) -> T:
        """Meet the other ranks; return the result of `settle`."""
        try:
            self.fds[0] = [os.dup(fd) for fd in self.terms.fds]
            listener = self.terms.endpoint.listen(f"rank 0 of {self.world_size}")
            self.arrivals = Arrivals(listener, self.terms.endpoint, len(self.terms.fds))
            while len(self.introductions) < self.world_size:
                self._serve()
            if self.refusal is not None:
                raise self.refusal
            self.arrivals.close(frames.encode({"error": "all ranks have met already"}))
            self.made = made = self._settle()
            while len(self.ready) < self.world_size - 1:
                self._serve()
            self.terms.watch.commit()
            self._tell(frames.encode({"made": True}))
            return made
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for connection in [*self.guests.values(), *self.also_told]:
                connection.close()

    def _settle(self) -> T:
        """Decide, send the decision to every rank, and make this rank's part."""
        job = self.terms.job
        introductions = [self.introductions[rank] for rank in range(self.world_size)]
        decision, shared = self.terms.decide(introductions)
        fds, self.fds = self.fds, {}
        by_rank = [fds[rank] for rank in range(self.world_size)]
        meeting = Meeting(job, introductions, decision, shared, by_rank, self._hear_meanwhile)
        content = {"decision": decision, "introductions": introductions, "shared": len(shared)}
        answer = frames.encode(content, len(meeting.fds))
        try:
            for rank, guest in self.guests.items():
                self._send(rank, guest, answer, meeting.fds)
            while any(guest.is_sending for guest in self.guests.values()):
                self._serve()
        except BaseException:
            frames.close_all(meeting.fds)
            raise
        return self.terms.settle(meeting)

    def _send(self, rank: int, guest: PeerConnection, message: bytes, fds: list[int]) -> None:
        try:
            guest.send(message, fds)
        except OSError:
            self._hear(rank, guest)  # a message may explain why it left
            self._lose(rank)

    # --- waiting ----------------------------------------------------------------------------------

    def _hear_meanwhile(self) -> None:
        """Handle what the others have sent in the meantime; raise if one of them has given up."""
        self._serve(0.0)

    def _serve(self, wait_s: float = SLICE_S) -> None:
        """Wait a moment for the others, and handle what they have sent."""
        self._look()
        poll = select.poll()
        if self.arrivals is not None and len(self.introductions) < self.world_size:
            self.arrivals.register(poll)
        for guest in self.guests.values():
            poll.register(guest, select.POLLIN | (select.POLLOUT if guest.is_sending else 0))
        ready = {fd for fd, _ in poll.poll(1000 * wait_s)}
        for rank, guest in self.guests.items():
            if guest.fileno() in ready:
                self._hear(rank, guest)
        if self.arrivals is not None:
            for introduced in self.arrivals.serve(ready):
                self._admit(introduced)

    def _look(self) -> None:
        """Raise if the meeting can no longer succeed."""
        self.terms.signals.check()
        missing = set(range(self.world_size)) - self.introductions.keys()
        if time.monotonic() > self.deadline:
            if self.refusal is not None:
                raise self.refusal
            raise self._late(sorted(missing))
        found = self.terms.watch.check(missing)
        if found is not None and self.refusal is None:
            self._give_up({"kind": "lost", "rank": found[0], "error": found[1]})

    def _late(self, missing: list[int]) -> BaseException:
        watch = self.terms.watch
        absent = [rank for rank in self.guests if rank not in self.ready]
        late = list_ranks(sorted(watch.number(rank) for rank in missing or absent))
        what = f"{late} did not {'come' if missing else 'answer'}"
        strangers = self.arrivals.strangers() if self.arrivals is not None else ""
        return watch.late(
            f"{watch.who} waited {self.terms.timeout_s:g} s in {watch.call}: {what}. Did every "
            f"rank start, and call {watch.call}?{strangers}"
        )

    def _hear(self, rank: int, guest: PeerConnection) -> None:
        """Handle the message of a rank that has come: it is ready, or it gives up."""
        try:
            received = guest.receive()
            if received is None:
                guest.flush()
        except (OSError, BadMessageError, AuthenticationError):
            self._lose(rank)
        if received is None:
            return
        message = received[0]
        if not message.get("ready"):
            self._give_up({"kind": "left", "error": "nothing", **message, "rank": rank})
        self.ready.add(rank)

    def _lose(self, rank: int) -> NoReturn:
        process = self.introductions[rank].get("pid")
        how = f"its process {process} ended, or left"
        self._give_up({"kind": "lost", "rank": rank, "error": how})

    def _give_up(self, verdict: Message) -> NoReturn:
        """End the meeting with a message for all ranks."""
        if self.refusal is not None:
            raise self.refusal
        self.verdict = verdict
        raise heard(verdict, self.terms.watch)

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, guest: Introduced) -> None:
        """Handle an introduction; if the rank does not belong here, wait a little for others."""
        assert self.arrivals is not None
        try:
            refusal = self._examine(guest)
        except BadMessageError as error:
            frames.close_all(guest.fds)
            self.arrivals.refuse(guest, str(error))
            return
        if refusal is None:
            rank = guest.introduction["rank"]
            self.guests[rank] = guest.connection
            self.introductions[rank], self.fds[rank] = guest.introduction, guest.fds
        else:
            frames.close_all(guest.fds)
            self.also_told.append(guest.connection)
            if self.refusal is None:
                self.refusal = refusal
                self.deadline = min(self.deadline, time.monotonic() + _REFUSING_S)
        n_come = len(self.guests) + len(self.also_told)
        if self.refusal is not None and n_come >= self.world_size - 1:
            raise self.refusal

    def _examine(self, guest: Introduced) -> RendezvousError | None:
        """Return why a rank does not belong here; BadMessageError: the peer is not a rank."""
        rank, same = guest.introduction.get("rank"), guest.introduction.get("same")
        ours: Message = self.terms.introduction["same"]
        if type(rank) is not int or rank < 0 or not isinstance(same, dict):
            raise BadMessageError("did not say which rank it is")
        if not same.keys() & ours.keys():
            raise BadMessageError("left out what all ranks must agree on")
        for name, value in ours.items():
            if same.get(name) != value:
                theirs = str(same.get(name))[:100]
                return RendezvousError(
                    f"rank {rank} and rank 0 do not belong together: {name} is {theirs} on "
                    f"rank {rank} and {value} on rank 0"
                )
        if not 0 < rank < self.world_size:
            others = list_ranks(list(range(1, self.world_size)))
            raise BadMessageError(f"claims to be rank {rank}, but {others} is expected")
        if len(guest.fds) != len(self.terms.fds):
            raise BadMessageError(f"sent {len(guest.fds)} file descriptors")
        try:
            self.terms.check(guest.introduction, guest.fds)
        except ValueError as error:
            raise BadMessageError(f"introduced itself wrongly: {error}") from None
        if rank in self.introductions:
            return RendezvousError(
                f"two processes claim to be rank {rank} of this job. If only some of its ranks "
                f"meet, {HAVE_NAMES}"
            )
        return None

    # --- telling ----------------------------------------------------------------------------------

    def _tell(self, message: bytes) -> None:
        """Send a message to every rank that has come; wait a little for those that read slowly."""
        connections = [*self.guests.values(), *self.also_told]
        for connection in connections:
            # This one is gone; the others still need the message.
            with contextlib.suppress(OSError, AuthenticationError):
                connection.send(message)
        stop = time.monotonic() + _TELLING_S
        while time.monotonic() < stop:
            poll = select.poll()
            sending = [connection for connection in connections if connection.is_sending]
            for connection in sending:
                poll.register(connection, select.POLLOUT)
            if not sending or not poll.poll(1000 * SLICE_S):
                return
            for connection in sending:
                with contextlib.suppress(OSError, AuthenticationError):
                    connection.flush()

    def _fail(self, error: BaseException) -> None:
        """Report to every rank why the meeting failed, and release everything."""
        watch = self.terms.watch
        message = self.verdict or told(error, 0)
        is_complete = len(self.introductions) == self.world_size
        watch.is_told = is_complete and message.get("kind") == "refused"
        data = frames.encode(message)
        self._tell(data)
        if self.arrivals is not None:
            self.arrivals.close(data)
        for group in self.fds.values():
            frames.close_all(group)
        self.fds = {}
        if self.made is not None:
            self.terms.undo(self.made)
