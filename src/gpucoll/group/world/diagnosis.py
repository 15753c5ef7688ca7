"""The errors of a group on several hosts: which ranks are lost or late, and where they stand."""

from __future__ import annotations

import threading
import time
from typing import Final

from gpucoll.errors import AbortedError, DeadlineError, GpucollError, PeerLostError
from gpucoll.group.host.whereabouts import Whereabouts
from gpucoll.group.world.failures import BROKEN, error_of
from gpucoll.group.world.links import LINKS_THREAD
from gpucoll.group.world.messages import Kind
from gpucoll.group.world.state import WorldState
from gpucoll.transport.shared.words import Context, State
from gpucoll.wording import list_ranks

_SHOWN: Final = 8
_WRITING_S: Final = 0.1
_ANSWERING_S: Final = 0.5
"""How long leaders may take to report where their ranks stand, when one has given up."""


class WorldDiagnosis:
    """Makes the errors of a group on several hosts.

    Parameters
    ----------
    state : WorldState
        The group's state.
    """

    def __init__(self, state: WorldState) -> None:
        self._state = state
        self._answers: dict[int, dict[str, str]] = {}
        """By question of this host: the answers of other hosts."""
        self._n_asked = 0

    @property
    def where(self) -> str:
        """Where this rank stands."""
        state = self._state
        if state.calling or int(state.host.context[Context.state]) == State.BUSY:
            return f"in {state.called}"
        return "between two calls"

    def host_name(self, rank: int) -> str:
        """Return what errors call a rank's host."""
        return self._state.names[self._state.hosts.host_of(rank)]

    def lost_error(self, rank: int) -> PeerLostError:
        """Return the error for a rank that has ended or closed the communicator."""
        lost, how = f"rank {rank} (on {self.host_name(rank)})", self.how_it_went(rank)
        return PeerLostError(f"{self._state.who} lost {lost} {self.where}: {how}. {BROKEN}")

    def how_it_went(self, rank: int) -> str:
        """Return how a lost rank has left."""
        closed = self._state.board.closed_after(rank)
        if closed is None:
            return "its process ended"
        after = f" after call #{closed}" if closed else " before its first call"
        return f"it closed the communicator{after}{self._state.board.reason_of(rank)}"

    def gave_up_error(self, rank: int, why: str = "") -> AbortedError:
        """Return the error for a rank that has aborted the communicator."""
        state = self._state
        reason = f", because it raised {why.rstrip('.')}" if why else ""
        return AbortedError(
            f"{state.who}: the communicator was given up: rank {rank} aborted it{reason}. Close it"
        )

    def late_error(self, number: int, waited_s: float) -> DeadlineError:
        """Return the error for hosts that are late, after asking them where their ranks stand."""
        state = self._state
        assert state.links is not None
        self._n_asked += 1
        asked, others = self._n_asked, state.hosts.count - 1
        answers: dict[str, str] = {}
        self._answers[asked] = answers
        question = {"asker": state.here, "asked": asked, "number": number}
        state.links.tell_all(Kind.WHERE, question)
        state.links.wait(lambda: len(answers) == others or state.is_aborted, _ANSWERING_S)
        del self._answers[asked]
        silent = [
            list_ranks(ranks) + f" on {state.names[host]}"
            for host, ranks in enumerate(state.hosts.ranks)
            if host != state.here and str(host) not in answers
        ]
        found = [text for text in answers.values() if text]
        if silent:
            found.append(f"{'; '.join(silent)} did not answer (stopped, or their host is cut off)")
        late = ". ".join(found) or "all ranks had begun the call, and it had not come through"
        return DeadlineError(
            f"{state.who} waited {waited_s:g} s in {state.calling} between hosts: {late}. Is a "
            f"rank stopped, very slow, or in another part of the program? Give a longer timeout_s "
            f"if the work is uneven. {BROKEN}"
        )

    def answered(self, asked: int, host: int, text: str) -> None:
        """Note where the ranks of another host stand, for a question of this host."""
        answers = self._answers.get(asked)
        if answers is not None:
            answers[str(host)] = text

    def standing_elsewhere(self, places: list[int]) -> str:
        """Return where ranks of other hosts stand, as the end of an error of this rank's wait."""
        state = self._state
        ranks = [state.host.members.number(place) for place in places]
        # The links' thread must not wait, and it reports no wait of its own.
        if not ranks or state.pairs is None or threading.current_thread().name == LINKS_THREAD:
            return ""
        answers = state.pairs.ask(ranks[:_SHOWN], _ANSWERING_S)
        told = []
        for rank in ranks[:_SHOWN]:
            silent = "not answering (stopped, or its host is cut off)"
            told.append(f"Rank {rank} on {self.host_name(rank)} is {answers.get(rank, silent)}")
        return "".join(f". {text}" for text in told)

    def standings(self, number: int) -> str:
        """Return which ranks of this host have not begun a call, and where they stand."""
        state = self._state
        members = state.host.members
        late = [
            place
            for place in range(members.world_size)
            if state.board.entered(place) < number and not state.host.has_closed(place)
        ]
        if not late:
            return ""
        whereabouts = Whereabouts(members)
        texts = [
            f"rank {members.number(place)} is {whereabouts.standing_of(place).text}"
            for place in late[:_SHOWN]
        ]
        return f"{members.spelled(late)} had not arrived: {'; '.join(texts)}"

    def error_elsewhere(self) -> GpucollError:
        """Return the error that is written on the board."""
        state = self._state
        stop = time.monotonic() + _WRITING_S
        while (failure := state.board.failure()) is None and time.monotonic() < stop:
            time.sleep(0.001)  # another rank is about to have written it
        if failure is None:
            return AbortedError(f"{state.who}: the communicator was given up. Close it")
        return error_of(failure, state.rank, state.world_size)
