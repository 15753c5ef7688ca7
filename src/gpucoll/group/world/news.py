"""The news that leaders exchange about their ranks: failures, ends, where they stand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from gpucoll.errors import AbortedError, PeerLostError
from gpucoll.group.host import diagnosis
from gpucoll.group.world.board import Failure
from gpucoll.group.world.diagnosis import WorldDiagnosis
from gpucoll.group.world.failures import BROKEN, failure_of
from gpucoll.group.world.gpu_calls import KINDS, GpuCalls
from gpucoll.group.world.messages import Kind, Message
from gpucoll.group.world.state import WorldState
from gpucoll.transport.shared.layout import Abort


class WorldNews:
    """The `gpucoll.group.world.links.Listener` of a group; the links' thread calls most of it.

    Parameters
    ----------
    state : WorldState
        The group's state.
    diagnosis : WorldDiagnosis
        Makes its errors.
    gpu_calls : GpuCalls
        Its calls on GPU arrays.
    """

    def __init__(self, state: WorldState, diagnosis: WorldDiagnosis, gpu_calls: GpuCalls) -> None:
        self._state = state
        self._diagnosis = diagnosis
        self._gpu_calls = gpu_calls
        self._told_closed: set[int] = set()
        self._has_told_failure = False
        self._telling = threading.RLock()

    def hear(self, message: Message) -> None:
        """Handle a message of another leader to all."""
        state = self._state
        facts = message.facts
        if message.kind == Kind.FAILED:
            self._has_told_failure = True  # its sender has sent it to all hosts
            state.write(Failure(int(facts["kind"]), int(facts["author"]), str(facts["text"])))
        elif message.kind == Kind.CLOSED:
            # The rank's earlier calls on GPU arrays travel another way and may come later.
            host, told = state.hosts.host_of(int(facts["rank"])), int(facts["enqueued"])
            self._gpu_calls.after(host, told, lambda: self._note_closed(facts))
        elif message.kind in KINDS:
            if self._gpu_calls.hear(message):
                self.look()
        elif message.kind == Kind.WHERE:
            self.look()  # if these ranks have given up, their error tells more than where they are
            answer = {key: facts[key] for key in ("asker", "asked")}
            text = self._diagnosis.standings(int(facts["number"]))
            assert state.links is not None
            state.links.tell_all(Kind.HERE, {**answer, "host": state.here, "text": text})
        elif message.kind == Kind.HERE and int(facts["asker"]) == state.here:
            self._diagnosis.answered(int(facts["asked"]), int(facts["host"]), str(facts["text"]))

    def _note_closed(self, facts: Mapping[str, Any]) -> None:
        rank, number = int(facts["rank"]), int(facts["number"])
        self._state.board.note_closed(rank, number, str(facts["reason"]))
        self._end_calls_after(rank, number)

    def _end_calls_after(self, rank: int, number: int) -> None:
        """End the calls of this host's ranks that wait for a rank that has closed."""
        state = self._state
        places = range(state.host.world_size)
        if any(
            state.board.entered(place) > number and not state.host.has_closed(place)
            for place in places
        ):
            state.write(failure_of(self._diagnosis.lost_error(rank), state.rank))
            self.look()

    def lose(self, host: int, reason: str) -> None:
        """Handle the end of the link to a host."""
        state = self._state
        leader = state.hosts.leader_of(host)
        if state.board.closed_after(leader) is not None:
            return
        others = len(state.hosts.ranks[host]) - 1
        further = f" and the {others} other ranks there" if others > 1 else ""
        further = " and the other rank there" if others == 1 else further
        state.write(
            failure_of(
                PeerLostError(
                    f"{state.who} lost rank {leader} (on {state.names[host]}){further} "
                    f"{self._diagnosis.where}: the connection ended ({reason}): its process ended, "
                    f"or its host cannot be reached. {BROKEN}"
                ),
                state.rank,
            )
        )
        self.look()

    def lose_rank(self, rank: int, reason: str) -> None:
        """Handle the unannounced end of the connection to a rank of another host."""
        state = self._state
        if state.is_closed or state.board.closed_after(rank) is not None:
            return
        lost = f"rank {rank} (on {self._diagnosis.host_name(rank)})"
        text = (
            f"{state.who} lost {lost} {self._diagnosis.where}: the connection for messages ended "
            f"({reason}): its process ended, or its host cannot be reached. {BROKEN}"
        )
        state.write(failure_of(PeerLostError(text), state.rank))
        state.ring()

    def miss(self, fd: int) -> None:
        """Handle the end of a rank's process on this host: ranks of other hosts may wait for it."""
        state = self._state
        for place in state.host.ended_ranks():
            if not state.host.has_closed(place):
                state.host.abort(Abort.LOST, place)
        self.look()

    def go_deaf(self, error: Exception) -> None:
        """Handle a fault that has ended the links' thread."""
        state = self._state
        state.write(
            failure_of(
                AbortedError(f"{state.who}: its links failed: {type(error).__name__}: {error}"),
                state.rank,
            )
        )

    def look(self) -> None:
        """Report this host's news to the other hosts."""
        state = self._state
        self._gpu_calls.look()
        with self._telling:  # another thread that closes must not overtake it
            if state.host.is_aborted and not self._has_told_failure:
                self._has_told_failure = True
                failure = state.board.failure() if self._is_elsewhere else None
                if failure is None:
                    failure = failure_of(state.raised or state.host.abort_error(), state.rank)
                assert state.links is not None
                state.links.tell_all(Kind.FAILED, failure._asdict())
        # Report closings after the failure: a rank that closes because of it is not its cause.
        for place in range(state.host.world_size):
            if place != state.host.rank and state.host.has_closed(place):
                self.tell_closed(place, state.board.entered(place))

    @property
    def _is_elsewhere(self) -> bool:
        return self._state.host.members.abort_word() & 0xFF == Abort.ELSEWHERE

    def tell_closed(self, place: int, number: int) -> None:
        """Report to the other hosts, once, that a rank of this host has closed."""
        state = self._state
        if place in self._told_closed:
            return
        self._told_closed.add(place)
        rank = state.host.members.number(place)
        reason = diagnosis.why(state.host, place)
        assert state.links is not None
        facts = {"rank": rank, "number": number, "reason": reason}
        state.links.tell_all(Kind.CLOSED, {**facts, "enqueued": self._gpu_calls.told})
