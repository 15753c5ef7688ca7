"""The news that leaders exchange about their ranks: failures, ends, where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpucoll.errors import AbortedError, PeerLostError
from gpucoll.group.host import diagnosis
from gpucoll.group.world import gpu_calls
from gpucoll.group.world.board import Failure
from gpucoll.group.world.diagnosis import WorldDiagnosis
from gpucoll.group.world.failures import BROKEN, failure_of
from gpucoll.group.world.messages import Kind, Message
from gpucoll.transport.shared.layout import Abort


class WorldNews(WorldDiagnosis):
    """The `gpucoll.group.world.links.Listener` of a group; the links' thread calls most of it."""

    def hear(self, message: Message) -> None:
        """Handle a message of another leader to all."""
        facts = message.facts
        if message.kind == Kind.FAILED:
            self._has_told_failure = True  # its sender has sent it to all hosts
            self.write(Failure(int(facts["kind"]), int(facts["author"]), str(facts["text"])))
        elif message.kind == Kind.CLOSED:
            # The rank's earlier calls on GPU arrays travel another way and may come later.
            host, told = self.hosts.host_of(int(facts["rank"])), int(facts["enqueued"])
            self._gpu_calls.after(host, told, lambda: self._note_closed(facts))
        elif message.kind in gpu_calls.KINDS:
            self._gpu_calls.hear(message)
        elif message.kind == Kind.WHERE:
            self.look()  # if these ranks have given up, their error tells more than where they are
            answer = {key: facts[key] for key in ("asker", "asked")}
            text = self._standings(int(facts["number"]))
            assert self.links is not None
            self.links.tell_all(Kind.HERE, {**answer, "host": self.here, "text": text})
        elif message.kind == Kind.HERE and int(facts["asker"]) == self.here:
            answers = self._answers.get(int(facts["asked"]))
            if answers is not None:
                answers[str(facts["host"])] = str(facts["text"])

    def _note_closed(self, facts: Mapping[str, Any]) -> None:
        rank, number = int(facts["rank"]), int(facts["number"])
        self._board.note_closed(rank, number, str(facts["reason"]))
        self._end_calls_after(rank, number)

    def _end_calls_after(self, rank: int, number: int) -> None:
        """End the calls of this host's ranks that wait for a rank that has closed."""
        places = range(self.host.world_size)
        if any(
            self._board.entered(place) > number and not self.host.has_closed(place)
            for place in places
        ):
            self.write(failure_of(self._lost_error(rank), self.rank))
            self.look()

    def lose(self, host: int, reason: str) -> None:
        """Handle the end of the link to a host."""
        leader = self.hosts.leader_of(host)
        if self._board.closed_after(leader) is not None:
            return
        others = len(self.hosts.ranks[host]) - 1
        further = f" and the {others} other ranks there" if others > 1 else ""
        further = " and the other rank there" if others == 1 else further
        self.write(
            failure_of(
                PeerLostError(
                    f"{self._who} lost rank {leader} (on {self.names[host]}){further} "
                    f"{self._where}: the connection ended ({reason}): its process ended, or its "
                    f"host cannot be reached. {BROKEN}"
                ),
                self.rank,
            )
        )
        self.look()

    def lose_rank(self, rank: int, reason: str) -> None:
        """Handle the unannounced end of the connection to a rank of another host."""
        if self.is_closed or self._board.closed_after(rank) is not None:
            return
        lost = f"rank {rank} (on {self._host_name(rank)})"
        text = (
            f"{self._who} lost {lost} {self._where}: the connection for messages ended ({reason}): "
            f"its process ended, or its host cannot be reached. {BROKEN}"
        )
        self.write(failure_of(PeerLostError(text), self.rank))
        self.ring()

    def miss(self, fd: int) -> None:
        """Handle the end of a rank's process on this host: ranks of other hosts may wait for it."""
        for place in self.host.ended_ranks():
            if not self.host.has_closed(place):
                self.host.abort(Abort.LOST, place)
        self.look()

    def go_deaf(self, error: Exception) -> None:
        """Handle a fault that has ended the links' thread."""
        self.write(
            failure_of(
                AbortedError(f"{self._who}: its links failed: {type(error).__name__}: {error}"),
                self.rank,
            )
        )

    def look(self) -> None:
        """Report this host's news to the other hosts."""
        self._gpu_calls.look()
        with self._telling:  # another thread that closes must not overtake it
            if self.host.is_aborted and not self._has_told_failure:
                self._has_told_failure = True
                failure = self._board.failure() if self._is_elsewhere else None
                if failure is None:
                    failure = failure_of(self._raised or self.host.abort_error(), self.rank)
                assert self.links is not None
                self.links.tell_all(Kind.FAILED, asdict(failure))
        # Report closings after the failure: a rank that closes because of it is not its cause.
        for place in range(self.host.world_size):
            if place != self.host.rank and self.host.has_closed(place):
                self._tell_closed(place, self._board.entered(place))

    @property
    def _is_elsewhere(self) -> bool:
        return self.host.members.abort_word() & 0xFF == Abort.ELSEWHERE

    def _tell_closed(self, place: int, number: int) -> None:
        if place in self._told_closed:
            return
        self._told_closed.add(place)
        rank = self.host.members.number(place)
        reason = diagnosis.why(self.host, place)
        assert self.links is not None
        facts = {"rank": rank, "number": number, "reason": reason}
        self.links.tell_all(Kind.CLOSED, {**facts, "enqueued": self._gpu_calls.told})
