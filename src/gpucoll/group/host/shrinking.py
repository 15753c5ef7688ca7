"""Agree on the survivors of one host, through words in its segment; the kernel tells who is alive.

Each rank that enters `shrink` records that in the segment, with the number of the last call that it
has completed. Once all living ranks have come, or a rank's time is up, the first rank that notices
writes down who goes on. One compare-and-exchange then makes this proposal the decision of the
round. So there is one decision, and it is complete, even if further ranks die.

The survivors then meet as in `split`. By a second compare-and-exchange on the same word, their new
rank 0 records that all have the new communicator; a rank that gives the meeting up records that
there instead. Whichever comes first is valid for all ranks. If the meeting was given up, the ranks
that had been agreed on go into the next round.
"""

from __future__ import annotations

import enum
import secrets
import struct
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from gpucoll.errors import AbortedError, GpucollError
from gpucoll.group.host.members import Members
from gpucoll.group.survivors import (
    Survivors,
    SurvivorsWatch,
    are_enough,
    left_behind_error,
    too_few_error,
)
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.transport.shared import layout

if TYPE_CHECKING:
    from gpucoll.group.host.group import HostGroup

PATIENCE_S = 1.0
"""How long to wait for ranks that are in other calls, before the old communicator is aborted."""
_PAUSE_S = 0.002
_PROPOSAL = struct.Struct("=q16s32s")


class Phase(enum.IntEnum):
    """How far the survivors are: the low byte of the decision word."""

    MEETING = 0
    MADE = 1  # all of them have the new communicator
    FAILED = 2  # and never will


class Decision(NamedTuple):
    """The contents of the decision word: whose proposal is valid, in which round."""

    round: int
    rank: int
    phase: Phase

    @property
    def word(self) -> int:
        """Return the decision as the segment's word."""
        return self.phase | (self.rank << 8) | (self.round << 32)

    @staticmethod
    def of(word: int) -> Decision:
        """Return the decision in a word; for 0, that a round before the first one has failed."""
        if not word:
            return Decision(0, 0, Phase.FAILED)
        return Decision(word >> 32, (word >> 8) & 0xFFFFFF, Phase(word & 0xFF))


class Standing(NamedTuple):
    """The ranks that may go on, by where they are."""

    present: list[int]
    missing: list[int]
    """Alive, but not in this round."""
    gone: list[int]


class Statements:
    """The words by which the ranks of a host report their state in `shrink`."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def say(self, completed: int, round_: int, port: int = 0) -> None:
        """Report that this rank takes part in a round."""
        at = self._at(self._members.rank)
        self._members.store(at + layout.SHRINKING_COMPLETED, completed)
        self._members.store(at + layout.SHRINKING_PORT, port)
        self._members.store(at + layout.SHRINKING_ROUND, round_)

    def leave(self) -> None:
        """Report that this rank no longer takes part."""
        at = self._at(self._members.rank)
        self._members.store(at + layout.SHRINKING_ROUND, layout.LEFT_SHRINK)

    def round_of(self, rank: int) -> int:
        """Return the round that a rank waits for; its other values may be read after that."""
        return self._members.load(self._at(rank) + layout.SHRINKING_ROUND)

    def completed(self, rank: int) -> int:
        """Return the number of the last call that a rank has completed."""
        return self._members.load(self._at(rank) + layout.SHRINKING_COMPLETED)

    def port(self, rank: int) -> int:
        """Return the port at which a rank listens."""
        return self._members.load(self._at(rank) + layout.SHRINKING_PORT)

    def standing(self, ranks: Collection[int], round_: int) -> Standing:
        """Return which of these ranks are in a round, missing, or gone."""
        members, ended = self._members, {*self._members.ended_ranks()}
        found = Standing([], [], [])
        for rank in ranks:
            theirs = self.round_of(rank)
            if rank in ended or theirs == layout.LEFT_SHRINK or members.has_closed(rank):
                found.gone.append(rank)
            else:
                (found.present if theirs >= round_ else found.missing).append(rank)
        return found

    def propose(self, round_: int, resumed_from: int, ranks: Collection[int]) -> None:
        """Write down this rank's proposal of who is to go on."""
        bits = sum(1 << rank for rank in ranks).to_bytes(32, "little")
        data = _PROPOSAL.pack(resumed_from, secrets.token_bytes(16), bits)
        at = self._at(self._members.rank) + layout.SHRINKING_PROPOSALS[round_ % 2]
        for place, word in enumerate(struct.unpack("=7q", data)):
            self._members.store(at + 8 * place, word)

    def proposal(self, rank: int, round_: int) -> Survivors:
        """Return a rank's proposal; valid only if the decision is the same before and after."""
        at = self._at(rank) + layout.SHRINKING_PROPOSALS[round_ % 2]
        words = (self._members.load(at + 8 * place) for place in range(7))
        resumed_from, token, bits = _PROPOSAL.unpack(struct.pack("=7q", *words))
        mask = int.from_bytes(bits, "little")
        ranks = tuple(r for r in range(self._members.world_size) if mask >> r & 1)
        return Survivors(round_, ranks, resumed_from, f"shrink {token.hex()}")

    def _at(self, rank: int) -> int:
        return self._members.layout.shrinking + rank * layout.SHRINKING_BYTES


class HostAgreement:
    """This rank's part in the agreement with the ranks of its host.

    Parameters
    ----------
    group : HostGroup
        The old communicator's group.
    timeout_s : float
        How long to wait, in each round, for a rank that is alive.
    """

    def __init__(self, group: HostGroup, timeout_s: float) -> None:
        self._group = group
        self._members = members = group.members
        self._timeout_s = timeout_s
        self._statements = Statements(members)
        self._who = members.who(members.rank)
        self._is_hopeless = False

    def agree(self) -> Survivors:
        """Return the survivors, once the ranks have agreed on them."""
        start = time.monotonic()
        with held_signals() as signals:
            while True:
                signals.check()
                decision = self._decision()
                if decision.phase != Phase.FAILED:
                    survivors = self._read(decision)
                    if survivors is not None:
                        return survivors
                elif not self._settle(decision, time.monotonic() - start):
                    time.sleep(_PAUSE_S)

    def _decision(self) -> Decision:
        return Decision.of(self._members.load(layout.EVENT_SURVIVORS))

    def _exchange(self, expected: Decision, desired: Decision) -> bool:
        before = expected.word if expected.round else 0
        found = self._members.compare_exchange(layout.EVENT_SURVIVORS, before, desired.word)
        return found == before

    def _read(self, decision: Decision) -> Survivors | None:
        """Return the survivors of a decision; None: another round has begun in the meantime."""
        found = self._statements.proposal(decision.rank, decision.round)
        now = self._decision()
        if now[:2] != decision[:2]:
            return None
        if self._members.rank not in found.ranks or now.phase == Phase.MADE:
            others = [rank for rank in found.ranks if rank != self._members.rank]
            raise left_behind_error(self._who, others)
        return found if now.phase == Phase.MEETING else None

    def _settle(self, last: Decision, waited_s: float) -> bool:
        """Decide the next round if all ranks that can come have; return whether it has changed."""
        former = self._former(last)
        if former is None:
            return True
        round_, statements = last.round + 1, self._statements
        if statements.round_of(self._members.rank) != round_:
            statements.say(self._group.completed, round_)
        standing = statements.standing(former, round_)
        if standing.missing and waited_s < self._timeout_s:
            if waited_s > PATIENCE_S and not self._group.is_aborted:
                self._group.abort()  # they may wait for this rank in a call on the old communicator
            return False
        if not are_enough(standing.present, former):
            if self._decision() != last:
                return True
            self._is_hopeless = not standing.missing
            raise self._too_few(standing, former)
        resumed_from = min(statements.completed(rank) for rank in standing.present)
        statements.propose(round_, resumed_from, standing.present)
        self._exchange(last, Decision(round_, self._members.rank, Phase.MEETING))
        return True

    def _former(self, last: Decision) -> tuple[int, ...] | None:
        """Return the ranks from which the next round may choose; None: it has begun already."""
        if not last.round:
            return tuple(range(self._members.world_size))
        found = self._statements.proposal(last.rank, last.round)
        if self._decision() != last:
            return None
        if self._members.rank not in found.ranks:
            raise left_behind_error(self._who, found.ranks)
        return found.ranks

    def _too_few(self, standing: Standing, former: tuple[int, ...]) -> GpucollError:
        spelled = self._members.spelled
        absent = []
        if standing.gone:
            absent.append(f"{spelled(standing.gone)} ended, closed or gave up")
        if standing.missing:
            absent.append(f"{spelled(standing.missing)} did not come in {self._timeout_s:g} s")
        return too_few_error(self._who, standing.present, former, absent)

    # --- making it --------------------------------------------------------------------------------

    def meeting_of(self, survivors: Survivors) -> tuple[Job, Watch]:
        """Return the job in which the survivors meet, and the watch over their meeting."""
        ranks = survivors.ranks
        place = ranks.index(self._members.rank)
        return Job(place, len(ranks), survivors.token, "shrink"), _Watch(self, survivors)

    def gone(self, survivors: Survivors) -> list[int]:
        """Return the survivors that will not come to the meeting."""
        return self._statements.standing(survivors.ranks, survivors.round).gone

    def phase(self, survivors: Survivors) -> Phase:
        """Return how far the survivors are."""
        now = self._decision()
        return now.phase if now.round == survivors.round else Phase.FAILED

    def commit(self, survivors: Survivors) -> None:
        """Record that all survivors have the new communicator.

        Raises AbortedError if one of them has given the meeting up.
        """
        self._end(survivors, Phase.MADE)
        if self.phase(survivors) != Phase.MADE:
            raise AbortedError(f"{self._who}: a rank gave up shrink just before it was complete")

    def abandon(self, survivors: Survivors) -> bool:
        """Give up the survivors' meeting, unless all of them have the new communicator.

        Returns whether the meeting is given up.
        """
        self._end(survivors, Phase.FAILED)
        return self.phase(survivors) == Phase.FAILED

    def _end(self, survivors: Survivors, phase: Phase) -> None:
        now = self._decision()
        if now.round == survivors.round and now.phase == Phase.MEETING:
            self._exchange(now, now._replace(phase=phase))

    def leave(self) -> None:
        """Withdraw this rank from the agreement."""
        if not self._is_hopeless:  # so that all remaining ranks find the same
            self._statements.leave()

    def close(self) -> None:
        """Do nothing: the group owns all resources."""


class _Watch(SurvivorsWatch):
    """Watches, through the old communicator, which survivors can still come to the meeting."""

    def __init__(self, agreement: HostAgreement, survivors: Survivors) -> None:
        members = agreement._members
        super().__init__(members.rank, members.world_size, survivors)
        self._agreement = agreement

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return an awaited rank that has ended or given up."""
        if self._agreement.phase(self._survivors) == Phase.FAILED:
            raise AbortedError(f"{self.who}: another rank gave up the meeting in shrink")
        gone = self._agreement.gone(self._survivors)
        return next(((rank, "it is gone") for rank in awaited if self.number(rank) in gone), None)

    def commit(self) -> None:
        """On the new rank 0: record that all survivors have their part."""
        self._agreement.commit(self._survivors)

    def is_committed(self) -> bool:
        """Return whether all survivors have the new communicator; if not, they never will."""
        return not self._agreement.abandon(self._survivors)
