"""A leader's inquiry when a call on GPU arrays differs between ranks, or is late.

The rank that notices only knows that some rank on another host differs or is late, so it asks its
leader to query all other leaders: what has each of your ranks called under this number, and where
does it stand? The answers that come in time make the error that every rank raises.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpucoll.errors import DeadlineError, MismatchError
from gpucoll.group.host.diagnosis import UNEVEN, counts_hint
from gpucoll.group.host.members import Members
from gpucoll.group.host.records import describe_enqueued, difference
from gpucoll.group.host.whereabouts import Whereabouts
from gpucoll.group.world.board import Failure
from gpucoll.group.world.failures import BROKEN, failure_of
from gpucoll.group.world.hosts import Hosts
from gpucoll.transport.shared.layout import Abort
from gpucoll.wording import list_ranks, rank_of

ANSWERING_S: Final = 0.5
"""How long other leaders may take to answer."""
_SHOWN: Final = 8


class CallAnswer(NamedTuple):
    """What one rank has called under the number in question."""

    rank: int
    digest: int
    """Digest of the call's signature; -1: the rank has not made that call."""
    called: str
    """The call, as its user wrote it."""
    standing: str
    """Completes "rank 1 is ...", if it has not made the call."""


def answers_of(members: Members, sequence: int) -> list[CallAnswer]:
    """Return what the ranks of this host have called."""
    whereabouts, found = Whereabouts(members), []
    for place in range(members.world_size):
        header, rank = members.enqueued_header(place, sequence), members.number(place)
        if difference(header & 0xFFFFFFFF, sequence) < 0:
            found.append(CallAnswer(rank, -1, "", whereabouts.standing_of(place).text))
        else:
            called = describe_enqueued(members, place, sequence) or "a call since"
            found.append(CallAnswer(rank, header >> 32 & 0xFFFFFFFF, called, ""))
    return found


class Inquiry:
    """One inquiry, and the answers so far.

    Parameters
    ----------
    code : Abort
        `ENQUEUED_MISMATCH` or `ENQUEUED_DEADLINE`.
    rank : int
        The rank that has noticed the difference or deadline.
    sequence : int
        The number of the call.
    hosts : Hosts
        Which ranks are on which host.
    names : sequence of str
        What errors call the hosts.
    """

    def __init__(
        self, code: Abort, rank: int, sequence: int, hosts: Hosts, names: Sequence[str]
    ) -> None:
        self._code = code
        self._rank = rank
        self.sequence = sequence
        self._hosts = hosts
        self._names = names
        self._answers: dict[int, CallAnswer] = {}
        self._due_s = time.monotonic() + ANSWERING_S

    def hear(self, answers: Sequence[Any]) -> None:
        """Take the answers of a host."""
        for said in answers:
            answer = CallAnswer(*said)
            self._answers[answer.rank] = answer

    @property
    def is_over(self) -> bool:
        """Whether all hosts have answered, or have had the time to."""
        return len(self._answers) == self._hosts.world_size or time.monotonic() > self._due_s

    def failure(self) -> Failure:
        """Return the failure that every rank is to raise."""
        make = self._mismatch if self._code == Abort.ENQUEUED_MISMATCH else self._deadline
        return failure_of(make(), self._rank)

    @property
    def _who(self) -> str:
        return rank_of(self._rank, self._hosts.world_size)

    @property
    def _silent(self) -> str:
        """Name the ranks whose leaders have not answered."""
        found = (
            f"{list_ranks(ranks)} on {self._names[host]}"
            for host, ranks in enumerate(self._hosts.ranks)
            if not self._answers.keys() & set(ranks)
        )
        silent = "; ".join(found)
        return f"{silent} did not answer (stopped, or their host is cut off)" if silent else ""

    def _mismatch(self) -> MismatchError:
        by_call: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, answer in sorted(self._answers.items()):
            by_call[answer.called or "nothing yet", answer.digest].append(rank)
        groups = sorted(by_call.items(), key=lambda item: len(item[1]))
        calls = [f"{list_ranks(ranks)} called {called}" for (called, _), ranks in groups]
        shown = "; ".join(filter(None, [*calls, self._silent]))
        return MismatchError(
            f"the ranks did not make the same call on GPU arrays (#{self.sequence}): {shown}. This "
            f"is {self._who}. Outputs are undefined; make the same calls in the same order on "
            f"every rank{counts_hint(by_call)}. The communicator was aborted: close it"
        )

    def _deadline(self) -> DeadlineError:
        mine = self._answers.get(self._rank)
        called = mine.called if mine is not None and mine.called else "a call on GPU arrays"
        late = [answer for _, answer in sorted(self._answers.items()) if answer.digest < 0]
        said = []
        if late:
            standing = "; ".join(f"rank {each.rank} is {each.standing}" for each in late[:_SHOWN])
            ranks = list_ranks([answer.rank for answer in late])
            said.append(f"{ranks} had not made this call: {standing}")
        if silent := self._silent:
            said.append(silent)
        if not said:
            said.append("all ranks had made this call, but the GPUs had not finished it")
        return DeadlineError(
            f"{self._who} gave up waiting in {called} (#{self.sequence}) on the GPU: "
            f"{'. '.join(said)}. {UNEVEN}. {BROKEN}"
        )


def said_by(error: DeadlineError, who: str, waited_s: float) -> DeadlineError:
    """Return the error for the rank that gave up: only it knows how long it has waited."""
    own = f"{who} gave up waiting in "
    if not str(error).startswith(own):
        return error
    return DeadlineError(f"{who} waited {waited_s:g} s in {str(error).removeprefix(own)}")
