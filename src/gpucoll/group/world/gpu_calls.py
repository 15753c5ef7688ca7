"""A group's calls on GPU arrays between hosts: comparing, giving up, and reporting to all hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from gpucoll.errors import PeerLostError
from gpucoll.group.host.records import describe_enqueued, difference
from gpucoll.group.world.enqueued import Mirror, WorldEnqueuedCalls
from gpucoll.group.world.failures import BROKEN
from gpucoll.group.world.inquiry import ANSWERING_S, Inquiry, answers_of
from gpucoll.group.world.messages import Kind, Message
from gpucoll.group.world.state import WorldState
from gpucoll.transport.shared.layout import Abort
from gpucoll.wording import rank_of

KINDS: Final = (Kind.CALLS, Kind.ASK_CALL, Kind.TELL_CALL)
INQUIRED: Final = (Abort.ENQUEUED_MISMATCH, Abort.ENQUEUED_DEADLINE)
"""Abort codes about which a rank alone does not know enough."""
_LEADER_S: Final = ANSWERING_S + 0.5
"""How long a rank waits for its leader's error, before it raises what it knows itself."""
_LOOK_S: Final = 0.01
_REST_S: Final = 0.5e-3
"""How long a leader collects calls before it reports them, for each host in the group.

Each leader receives all others' reports, so this keeps their rate independent of the number of
hosts.
"""


class GpuCalls:
    """This rank's calls on GPU arrays; for a leader, also those of its host.

    Parameters
    ----------
    group : WorldState
        The group that makes the calls.
    """

    def __init__(self, group: WorldState) -> None:
        self._group = group
        self._board = group.board
        """On it, the ranks of this host leave questions for their leader."""
        self._calls: WorldEnqueuedCalls | None = None
        self._inquiry: Inquiry | None = None
        self._lock = threading.RLock()
        self._mirror: Mirror | None = None
        if (links := group.links) is not None:
            self._mirror = Mirror(
                group.host.members,
                group.hosts,
                group.here,
                lambda facts, data: links.tell_each(Kind.CALLS, facts, data),
            )

    def enqueued_calls(self) -> WorldEnqueuedCalls:
        """Return this rank's ring, after taking memory for all rings of this host."""
        group = self._group
        if self._calls is None:
            group.host.take_enqueued_memory()
            self._calls = WorldEnqueuedCalls(
                group.host.members,
                group.host.context_beside(),
                group.hosts,
                group.here,
                group.has_closed,
                group.ring,
            )
            if self._mirror is not None:
                self._mirror.open()
                group.ring()  # other ranks may have posted already
        return self._calls

    @property
    def told(self) -> int:
        """The number of the last call of this host's ranks that was reported to the other hosts."""
        return 0 if self._mirror is None else self._mirror.told

    # --- giving up --------------------------------------------------------------------------------

    def give_up(self, code: Abort, sequence: int) -> None:
        """Break the communicator for a call that differs or is late, after the leader's inquiry."""
        group = self._group
        host = group.host
        self._board.ask(code | host.rank << 8 | difference(sequence, 0) << 32)
        stop = time.monotonic() + _LEADER_S
        while not group.is_aborted:
            if time.monotonic() > stop:  # the leader is stopped, or Python holds its interpreter
                host.abort(code, None, sequence)
                break
            group.ring()
            time.sleep(_LOOK_S)

    def lost_error(self, rank: int, sequence: int, how: str) -> PeerLostError:
        """Return the error for a rank of another host that will never make a call."""
        group = self._group
        members = group.host.members
        called = describe_enqueued(members, group.host.rank, sequence) or "a call on GPU arrays"
        name = group.names[group.hosts.host_of(rank)]
        return PeerLostError(
            f"{rank_of(group.rank, group.world_size)} lost rank {rank} (on {name}) in {called} "
            f"(#{sequence}): {how}. {BROKEN}. Arrays of its last calls are undefined"
        )

    # --- of a leader ------------------------------------------------------------------------------

    def look(self) -> None:
        """Report what is new here to the other hosts, and go on with the inquiry."""
        assert self._mirror is not None
        assert self._group.links is not None
        if self._mirror.take():
            self._group.links.rest(_REST_S * self._group.hosts.count)
        if word := self._board.asked():
            with self._lock:
                self._pursue(word)

    def _pursue(self, word: int) -> None:
        group = self._group
        if group.is_aborted:
            return
        if self._inquiry is None:
            members = group.host.members
            code, place = Abort(word & 0xFF), word >> 8 & 0xFFFFFF
            sequence = difference(word >> 32 & 0xFFFFFFFF, 0)
            self._inquiry = Inquiry(code, members.number(place), sequence, group.hosts, group.names)
            self._inquiry.hear(answers_of(members, sequence))
            assert group.links is not None
            group.links.tell_all(Kind.ASK_CALL, {"asker": group.here, "sequence": sequence})
        if self._inquiry.is_over:
            group.write(self._inquiry.failure())

    def hear(self, message: Message) -> bool:
        """Handle another leader's message; return whether there may be news for all."""
        facts, group = message.facts, self._group
        assert self._mirror is not None
        if message.kind == Kind.CALLS:
            self._mirror.hear(facts, message.data)
        elif message.kind == Kind.ASK_CALL:
            sequence = int(facts["sequence"])
            answers = answers_of(group.host.members, sequence)
            answer = {"asker": facts["asker"], "sequence": sequence, "answers": answers}
            assert group.links is not None
            group.links.tell_all(Kind.TELL_CALL, answer)
        elif int(facts["asker"]) == group.here:
            with self._lock:
                inquiry = self._inquiry
                if inquiry is not None and inquiry.sequence == int(facts["sequence"]):
                    inquiry.hear(facts["answers"])
            return True
        return False

    def after(self, host: int, sequence: int, function: Callable[[], None]) -> None:
        """Call a function once this host knows another host's calls up to this one."""
        assert self._mirror is not None
        self._mirror.after(host, sequence, function)
