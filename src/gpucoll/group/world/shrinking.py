"""Agree on the survivors among several hosts, in one decision of more than half of the old ranks.

On each host one rank, the speaker, acts for those of its ranks that have come; if it dies, the next
one does. It reports to the other hosts which ranks are present. Once all hosts have reported, or
are lost, or time is up, the lowest host proposes the survivors, in two steps (Lamport 1998, "The
part-time parliament"). In the first step, hosts whose ranks are enough promise to accept no older
proposal, and report what they had accepted before. In the second, they accept the proposal.

A proposal that such a set of hosts has accepted is decided. Any two such sets have a rank in
common, so nothing else can ever be decided. A host's promises are kept in memory that all its ranks
see.
"""

from __future__ import annotations

import random
import secrets
import socket
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from gpucoll.errors import AbortedError, PeerLostError, ShrinkError
from gpucoll.group.host.shrinking import PATIENCE_S, Standing, Statements
from gpucoll.group.survivors import (
    Survivors,
    SurvivorsWatch,
    are_enough,
    left_behind_error,
    too_few_error,
)
from gpucoll.group.world.ballots import ROUNDS, Ballots
from gpucoll.group.world.reunion import MeetingPlaces, Message, Reunion
from gpucoll.rendezvous.addresses import join_address
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.rendezvous.meeting_points import HandedPoint
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.wording import list_ranks, rank_of

if TYPE_CHECKING:
    from gpucoll.group.world.group import WorldGroup

_SLICE_S: Final = 0.01
_AGAIN_S: Final = 0.25
"""Pause before a message without an answer is sent again."""
_LONGER_S: Final = 2.0


class Speaker:
    """The rank that speaks for its host, in one round.

    Parameters
    ----------
    group : WorldGroup
        The old communicator's group.
    places : MeetingPlaces
        The addresses of the other hosts.
    ballots : Ballots
        This host's promises.
    round_ : int
        Number of the round.
    former : sequence of int
        The ranks from which survivors may be chosen.
    deadline : float
        When it goes on without ranks that have not come.
    """

    def __init__(
        self,
        group: WorldGroup,
        places: MeetingPlaces,
        ballots: Ballots,
        round_: int,
        former: tuple[int, ...],
        deadline: float,
    ) -> None:
        self._group, self._ballots = group, ballots
        self._round, self._former, self._deadline = round_, former, deadline
        self._addresses = places.addresses
        self._statements = Statements(group.host.members)
        self._hosts = sorted({group.hosts.host_of(rank) for rank in former} | {group.here})
        self._reunion = Reunion(group.here, self._hosts, places)
        self._state: Message = {}
        self._say_at = 0.0
        self._states: dict[int, Message] = {}
        """By host, the last state that it reported in this round."""
        self._ballot = 0
        self._value: Message | None = None
        self._answers: dict[int, Message] = {}
        self._is_accepting = False
        self._asked_at = self._again_at = 0.0
        self._not_before = 0.0

    # --- one turn ---------------------------------------------------------------------------------

    def turn(self, wait_s: float) -> None:
        """Wait a moment for other hosts, answer them, and propose if it is this host's turn.

        Raises
        ------
        ShrinkError
            Too few are left.
        """
        self._say()
        fresh, messages = self._reunion.turn(wait_s)
        for host in fresh:
            self._reunion.tell(host, self._state)
        for message in messages:
            self._take(message)
        if self._ballots.decided(self._round) is None and self._ballots.latest() <= self._round:
            self._go_on()

    @property
    def lost(self) -> list[int]:
        """The ranks of hosts that are lost."""
        hosts = self._group.hosts
        return [rank for rank in self._former if hosts.host_of(rank) in self._reunion.lost]

    def close(self) -> None:
        """Close the connections."""
        self._reunion.close()

    def _standing(self) -> Standing:
        group = self._group
        places = [
            group.hosts.place_of(rank)
            for rank in self._former
            if group.hosts.host_of(rank) == group.here
        ]
        return self._statements.standing(places, self._round)

    def _say(self) -> None:
        """Report to the other hosts which ranks are here: after a change, and now and then."""
        standing, number = self._standing(), self._group.host.members.number
        is_ready = not standing.missing or time.monotonic() > self._deadline
        present = {
            str(number(place)): [self._statements.completed(place), self._statements.port(place)]
            for place in standing.present
        }
        state = {"is": "state", "round": self._round, "ready": is_ready, "present": present}
        now = time.monotonic()
        if state != self._state or now >= self._say_at:  # a host that missed it gets it again
            self._state, self._say_at = state, now + _AGAIN_S
            self._states[self._group.here] = state
            self._tell_all(state)

    def _tell_all(self, message: Message) -> None:
        for host in self._reunion.connected:
            self._reunion.tell(host, message)

    # --- what the others say ----------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        source, round_, ballots = int(message["from"]), int(message["round"]), self._ballots
        kind = message["is"]
        if kind == "decided":
            if round_ == self._round:
                ballots.decide(round_, message["value"])
            return
        if round_ > self._round:
            ballots.note(round_)  # that host knows what was decided here, and will report it
            self._reunion.tell(source, self._state)
            return
        if (value := ballots.decided(round_)) is not None:
            self._reunion.tell(source, {"is": "decided", "round": round_, "value": value})
        elif round_ == self._round:
            self._answer(kind, source, message)

    def _answer(self, kind: str, source: int, message: Message) -> None:
        ballots, round_ = self._ballots, self._round
        ballot = int(message.get("ballot", 0))
        answer = {"round": round_, "ballot": ballot, "present": self._state["present"]}
        if kind == "state":
            self._states[source] = message
        elif kind == "prepare":
            if ballots.promise(round_, ballot):
                accepted = ballots.accepted(round_)
                self._reply(source, {**answer, "is": "promise", "accepted": accepted})
            else:
                self._reply(source, {**answer, "is": "no", "than": ballots.promised(round_)})
        elif kind == "accept":
            if ballots.accept(round_, ballot, message["value"]):
                self._reply(source, {**answer, "is": "accepted"})
            else:
                self._reply(source, {**answer, "is": "no", "than": ballots.promised(round_)})
        elif ballot == self._ballot and kind == "no":
            self._give_way(int(message["than"]))
        elif ballot == self._ballot and kind == ("accepted" if self._is_accepting else "promise"):
            self._answers[source] = message

    def _reply(self, source: int, message: Message) -> None:
        if source == self._group.here:
            self._answer(message["is"], source, message)
        else:
            self._reunion.tell(source, message)

    # --- proposing --------------------------------------------------------------------------------

    def _alive(self) -> list[int]:
        """Return the hosts known to be in this round, this one among them."""
        return [host for host in self._hosts if host in self._states and not self._is_lost(host)]

    def _is_lost(self, host: int) -> bool:
        return host in self._reunion.lost

    def _present(self, hosts: Collection[int]) -> list[int]:
        found = (int(rank) for host in hosts for rank in self._states[host]["present"])
        return sorted(rank for rank in found if rank in self._former)

    def _are_enough(self, reports: Collection[Message]) -> bool:
        """Return whether the ranks in hosts' reports may go on.

        As long as no rank has completed a call on a communicator that has grown, ranks may have
        stayed behind in the one before, and may go on there. So enough of those ranks are needed
        here: both cannot have them.
        """
        completed = {
            int(rank): int(said[0])
            for report in reports
            for rank, said in report["present"].items()
            if int(rank) in self._former
        }
        if not are_enough(sorted(completed), self._former):
            return False
        n_founders = self._group.n_founders
        if self._round > 1 or not n_founders or max(completed.values()) > 0:
            return True
        founders = [rank for rank in sorted(completed) if rank < n_founders]
        return are_enough(founders, range(n_founders))

    def _go_on(self) -> None:
        now, alive = time.monotonic(), self._alive()
        is_over = now > self._deadline
        absent = [host for host in self._hosts if host not in alive and not self._is_lost(host)]
        is_complete = not absent and all(self._states[host]["ready"] for host in alive)
        if not is_complete and not is_over:
            return
        if not self._are_enough([self._states[host] for host in alive]):
            if not absent or is_over:
                raise self._too_few(alive, absent)
            return
        place = alive.index(self._group.here)
        if place and now < self._deadline + place * _LONGER_S:
            return  # the first host proposes, unless it takes longer
        if not self._ballot and now >= self._not_before:
            self._prepare()
        elif self._ballot:
            self._count(alive, now)

    def _prepare(self) -> None:
        """Ask for promises, with a ballot above all that this host knows."""
        count = self._group.hosts.count
        attempt = self._ballots.promised(self._round) // count + 1
        self._ballot = attempt * count + self._group.here
        self._is_accepting, self._value, self._answers = False, None, {}
        self._asked_at = time.monotonic()
        self._ask({"is": "prepare"})

    def _ask(self, question: Message) -> None:
        message = {**question, "round": self._round, "ballot": self._ballot}
        self._again_at = time.monotonic() + _AGAIN_S
        self._tell_all(message)
        self._answer(message["is"], self._group.here, message)

    def _give_way(self, promised: int) -> None:
        """Try again in a moment, because another host proposes too."""
        self._ballots.promise(self._round, promised)
        self._ballot, self._not_before = 0, time.monotonic() + random.uniform(0.02, 0.2)

    def _count(self, alive: Collection[int], now: float) -> None:
        """Go on if enough hosts have answered; wait a while for all to answer."""
        are_all = all(host in self._answers for host in alive)
        if self._are_enough(self._answers.values()) and (
            are_all or now >= self._asked_at + _LONGER_S
        ):
            if self._is_accepting:
                assert self._value is not None
                self._ballots.decide(self._round, self._value)
                self._tell_all({"is": "decided", "round": self._round, "value": self._value})
                return
            self._value = self._accepted() or self._chosen()
            self._is_accepting, self._answers, self._asked_at = True, {}, now
            self._ask({"is": "accept", "value": self._value})
        elif now >= self._again_at:
            question = {"is": "accept", "value": self._value}
            self._ask(question if self._is_accepting else {"is": "prepare"})

    def _accepted(self) -> Message | None:
        """Return the value that may have been decided already: the one accepted last."""
        found = [answer["accepted"] for answer in self._answers.values() if answer["accepted"]]
        value: Message | None = max(found, key=lambda pair: int(pair[0]))[1] if found else None
        return value

    def _chosen(self) -> Message:
        """Return a proposal: all ranks that are present on the hosts that have promised."""
        found = {
            int(rank): (int(completed), int(port), host)
            for host, answer in self._answers.items()
            for rank, (completed, port) in answer["present"].items()
            if int(rank) in self._former
        }
        ranks = sorted(found)
        _, port, host = found[ranks[0]]
        return {
            "ranks": ranks,
            "resumed_from": min(completed for completed, _, _ in found.values()),
            "token": f"shrink {secrets.token_hex(16)}",
            "meet": join_address(self._addresses[host][0], port),
        }

    def _too_few(self, alive: Collection[int], absent: Collection[int]) -> ShrinkError:
        group = self._group
        present = self._present(alive)
        late = {group.hosts.host_of(rank) for rank in self._former} & {*absent}
        silent = [rank for rank in self._former if group.hosts.host_of(rank) in late]
        gone = [rank for rank in self._former if rank not in present and rank not in silent]
        texts = [
            f"{list_ranks(gone)} ended, closed, cannot be reached, or have gone on without this one"
        ]
        if silent:
            texts.append(f"{list_ranks(silent)} did not come in time")
        if are_enough(present, self._former):
            before = self._group.n_founders
            texts.append(f"Most of ranks 0 to {before - 1}, from which grow began, are not here")
        who = rank_of(group.rank, group.world_size)
        error = too_few_error(who, present, self._former, texts if gone else texts[1:])
        self._ballots.refuse(self._round, str(error))
        return error


class WorldAgreement:
    """This rank's part in agreeing with ranks on several hosts.

    Parameters
    ----------
    group : WorldGroup
        The old communicator's group.
    places : MeetingPlaces
        The addresses of the other hosts.
    ballots : Ballots
        This host's promises.
    address : str
        Address of this host.
    timeout_s : float
        How long to wait, in each round, for a rank that is alive.
    """

    def __init__(
        self,
        group: WorldGroup,
        places: MeetingPlaces,
        ballots: Ballots,
        address: str,
        timeout_s: float,
    ) -> None:
        self._group, self._places, self._ballots = group, places, ballots
        self._address, self._timeout_s = address, timeout_s
        self._statements = Statements(group.host.members)
        self._who = rank_of(group.rank, group.world_size)
        self._round = 0
        self._former = tuple(range(group.world_size))
        self._listener: socket.socket | None = None
        self._speaker: Speaker | None = None
        self._is_hopeless = False

    def agree(self) -> Survivors:
        """Return the survivors, once the ranks have agreed on them."""
        self._begin_round()
        start = time.monotonic()
        with held_signals() as signals:
            while (value := self._ballots.decided(self._round)) is None:
                signals.check()
                self._turn(time.monotonic() - start, start + self._timeout_s)
        ranks = tuple(int(rank) for rank in value["ranks"])
        if self._group.rank not in ranks:
            raise left_behind_error(self._who, ranks)
        return Survivors(
            self._round, ranks, int(value["resumed_from"]), str(value["token"]), str(value["meet"])
        )

    def _begin_round(self) -> None:
        """Report that this rank takes part. A later round is for the survivors of the last one."""
        self.close()
        while self._round and (last := self._ballots.decided(self._round)) is not None:
            self._former = tuple(int(rank) for rank in last["ranks"])
            break
        self._round += 1
        if self._round > ROUNDS:
            raise ShrinkError(
                f"{self._who} gives up: {ROUNDS} times, ranks that had agreed to go on were lost. "
                "Close the communicator and end this rank"
            )
        self._ballots.note(self._round)
        self._listener = listen_at(self._address, 0, f"{self._who} cannot listen in shrink", 4096)
        port = self._listener.getsockname()[1]
        self._statements.say(self._group.completed, self._round, port)

    def _turn(self, waited_s: float, deadline: float) -> None:
        """Speak for this host if no other rank does; wait a moment."""
        self._raise_refusal()
        if waited_s > PATIENCE_S and not self._group.is_aborted:
            self._group.abort()  # others may wait for this rank in a call on the old communicator
        if not self._leads():
            if time.monotonic() > deadline + self._timeout_s + _LONGER_S:
                raise ShrinkError(
                    f"{self._who}: the ranks did not agree on who is left, because the rank that "
                    "speaks for this host does nothing. Close the communicator and end this rank"
                )
            time.sleep(_SLICE_S)
            return
        if self._speaker is None:
            group = self._group
            self._speaker = Speaker(
                group, self._places, self._ballots, self._round, self._former, deadline
            )
        try:
            self._speaker.turn(_SLICE_S)
        except ShrinkError:
            self._is_hopeless = True
            raise

    def _raise_refusal(self) -> None:
        if text := self._ballots.refusal(self._round):
            self._is_hopeless = True
            raise ShrinkError(f"{self._who} cannot go on:{text.partition('cannot go on:')[2]}")

    def _leads(self) -> bool:
        """Return whether this rank speaks for its host; if no rank does, it begins to."""
        mine, leader = self._group.host.rank, self._ballots.leader()
        if leader == mine:
            return True
        if leader >= 0 and not self._statements.standing([leader], 0).gone:
            return False
        return self._ballots.follow(leader, mine)

    # --- making it --------------------------------------------------------------------------------

    def meeting_of(self, survivors: Survivors) -> tuple[Job, Watch]:
        """Return the job in which the survivors meet, and the watch over their meeting."""
        ranks, token = survivors.ranks, survivors.token
        place = ranks.index(self._group.rank)
        listener, self._listener = self._listener, None
        assert listener is not None
        if place or len({self._group.hosts.host_of(rank) for rank in ranks}) == 1:
            listener.close()
        job = Job(place, len(ranks), token, "shrink")
        if len({self._group.hosts.host_of(rank) for rank in ranks}) > 1:
            mine = None if place else listener
            point = HandedPoint(survivors.meet, self._places.credentials, mine)
            job = Job(place, len(ranks), token, "shrink", meet=point, title=token)
        return job, _Watch(self, survivors)

    def look(self, survivors: Survivors) -> None:
        """Raise if the survivors can no longer meet."""
        if self._speaker is not None:
            self._speaker.turn(0)
        if self._ballots.latest() > survivors.round:
            raise AbortedError(f"{self._who}: another rank gave up the meeting in shrink")
        hosts, group = self._group.hosts, self._group
        here = [rank for rank in survivors.ranks if hosts.host_of(rank) == group.here]
        places = [hosts.place_of(rank) for rank in here]
        standing = self._statements.standing(places, survivors.round)
        gone = [group.host.members.number(place) for place in standing.gone]
        if self._speaker is not None:
            gone += [rank for rank in self._speaker.lost if rank in survivors.ranks]
        if gone:
            raise PeerLostError(f"{self._who} lost {list_ranks(gone)} in shrink")

    def abandon(self, survivors: Survivors) -> bool:
        """Give up the survivors' meeting; return True, because this always succeeds."""
        self._ballots.note(survivors.round + 1)
        return True

    def leave(self) -> None:
        """Withdraw this rank from the agreement."""
        if not self._is_hopeless:  # so that all remaining ranks here find the same
            self._statements.leave()

    def close(self) -> None:
        """Close the connections of this round."""
        if self._speaker is not None:
            self._speaker.close()
            self._speaker = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Watch(SurvivorsWatch):
    """Watches whether the survivors can still meet."""

    def __init__(self, agreement: WorldAgreement, survivors: Survivors) -> None:
        group = agreement._group
        super().__init__(group.rank, group.world_size, survivors)
        self._agreement = agreement

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Raise if the survivors can no longer meet."""
        self._agreement.look(self._survivors)
        return None
