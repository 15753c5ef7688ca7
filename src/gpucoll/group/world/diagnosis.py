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


class WorldDiagnosis(WorldState):
    """Makes the errors of a group on several hosts."""

    @property
    def _where(self) -> str:
        if self._calling or int(self.host.context[Context.state]) == State.BUSY:
            return f"in {self._called}"
        return "between two calls"

    def _host_name(self, rank: int) -> str:
        return self.names[self.hosts.host_of(rank)]

    def _lost_error(self, rank: int) -> PeerLostError:
        lost, how = f"rank {rank} (on {self._host_name(rank)})", self._how_it_went(rank)
        return PeerLostError(f"{self._who} lost {lost} {self._where}: {how}. {BROKEN}")

    def _how_it_went(self, rank: int) -> str:
        closed = self._board.closed_after(rank)
        if closed is None:
            return "its process ended"
        after = f" after call #{closed}" if closed else " before its first call"
        return f"it closed the communicator{after}{self._board.reason_of(rank)}"

    def _gave_up_error(self, rank: int, why: str = "") -> AbortedError:
        reason = f", because it raised {why.rstrip('.')}" if why else ""
        return AbortedError(
            f"{self._who}: the communicator was given up: rank {rank} aborted it{reason}. Close it"
        )

    def late_error(self, number: int, waited_s: float) -> DeadlineError:
        """Return the error for hosts that are late, after asking them where their ranks stand."""
        assert self.links is not None
        self._n_asked += 1
        asked, others = self._n_asked, self.hosts.count - 1
        answers: dict[str, str] = {}
        self._answers[asked] = answers
        question = {"asker": self.here, "asked": asked, "number": number}
        self.links.tell_all(Kind.WHERE, question)
        self.links.wait(lambda: len(answers) == others or self.is_aborted, _ANSWERING_S)
        del self._answers[asked]
        silent = [
            list_ranks(ranks) + f" on {self.names[host]}"
            for host, ranks in enumerate(self.hosts.ranks)
            if host != self.here and str(host) not in answers
        ]
        found = [text for text in answers.values() if text]
        if silent:
            found.append(f"{'; '.join(silent)} did not answer (stopped, or their host is cut off)")
        late = ". ".join(found) or "all ranks had begun the call, and it had not come through"
        return DeadlineError(
            f"{self._who} waited {waited_s:g} s in {self._calling} between hosts: {late}. Is a "
            f"rank stopped, very slow, or in another part of the program? Give a longer timeout_s "
            f"if the work is uneven. {BROKEN}"
        )

    def _standing_elsewhere(self, places: list[int]) -> str:
        """Return where ranks of other hosts stand, as the end of an error of this rank's wait."""
        ranks = [self.host.members.number(place) for place in places]
        # The links' thread must not wait, and it reports no wait of its own.
        if not ranks or self.pairs is None or threading.current_thread().name == LINKS_THREAD:
            return ""
        answers = self.pairs.ask(ranks[:_SHOWN], _ANSWERING_S)
        told = []
        for rank in ranks[:_SHOWN]:
            silent = "not answering (stopped, or its host is cut off)"
            told.append(f"Rank {rank} on {self._host_name(rank)} is {answers.get(rank, silent)}")
        return "".join(f". {text}" for text in told)

    def _standings(self, number: int) -> str:
        """Return which ranks of this host have not begun a call, and where they stand."""
        members = self.host.members
        late = [
            place
            for place in range(members.world_size)
            if self._board.entered(place) < number and not self.host.has_closed(place)
        ]
        if not late:
            return ""
        whereabouts = Whereabouts(members)
        texts = [
            f"rank {members.number(place)} is {whereabouts.standing_of(place).text}"
            for place in late[:_SHOWN]
        ]
        return f"{members.spelled(late)} had not arrived: {'; '.join(texts)}"

    def _error_elsewhere(self) -> GpucollError:
        stop = time.monotonic() + _WRITING_S
        while (failure := self._board.failure()) is None and time.monotonic() < stop:
            time.sleep(0.001)  # another rank is about to have written it
        if failure is None:
            return AbortedError(f"{self._who}: the communicator was given up. Close it")
        return error_of(failure, self.rank, self.world_size)
