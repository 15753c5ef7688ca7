"""What a group of several hosts has of calls on GPU arrays: compared, given up, told to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from gpucoll.errors import PeerLostError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.records import describe_enqueued, difference
from gpucoll.group.world.board import Board, Failure
from gpucoll.group.world.enqueued import Mirror, WorldEnqueuedCalls
from gpucoll.group.world.failures import BROKEN
from gpucoll.group.world.hosts import Hosts
from gpucoll.group.world.inquiry import ANSWERING_S, Inquiry, answers_of
from gpucoll.group.world.links import Links
from gpucoll.group.world.messages import Kind, Message
from gpucoll.transport.shared.layout import Abort
from gpucoll.wording import rank_of

KINDS: Final = (Kind.CALLS, Kind.ASK_CALL, Kind.TELL_CALL)
INQUIRED: Final = (Abort.ENQUEUED_MISMATCH, Abort.ENQUEUED_DEADLINE)
"""Of which a rank alone does not know enough."""
_LEADER_S: Final = ANSWERING_S + 0.5
"""How long a rank waits for its leader's word, before it says what it knows itself."""
_LOOK_S: Final = 0.01
_REST_S: Final = 0.5e-3
"""For each host: so long a leader collects calls before it tells of them. Each leader hears all
others, so what it hears in a second does not grow with their number."""


class Owner(Protocol):
    """The group of which this is a part; `gpucoll.group.world.group.WorldGroup` is one."""

    host: HostGroup
    hosts: Hosts
    names: tuple[str, ...]
    links: Links | None
    rank: int
    world_size: int

    @property
    def here(self) -> int:
        """This host's number."""

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""

    def write(self, failure: Failure) -> None:
        """Break the communicator on this host, unless it is."""

    def ring(self) -> None:
        """Have the leader look what has happened on this host."""

    def look(self) -> None:
        """Tell the other hosts what has happened on this one."""


class GpuCalls:
    """Calls on GPU arrays of this rank; of a leader also those of its host.

    Parameters
    ----------
    group : Owner
        Whose.
    board : Board
        Where the ranks of this host leave word for their leader.
    """

    def __init__(self, group: Owner, board: Board) -> None:
        self._group = group
        self._board = board
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
        """Return this rank's ring; memory for all rings of this host is taken here."""
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
        """The last call of this host's ranks of which the others were told."""
        return 0 if self._mirror is None else self._mirror.told

    # --- giving up --------------------------------------------------------------------------------

    def give_up(self, code: Abort, sequence: int) -> None:
        """Break the communicator for a call that differs or is late: the leader finds out more."""
        group = self._group
        host = group.host
        self._board.ask(code | host.rank << 8 | difference(sequence, 0) << 32)
        stop = time.monotonic() + _LEADER_S
        while not group.is_aborted:
            if time.monotonic() > stop:  # it is stopped, or Python holds its interpreter
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
        """Tell the other hosts what is new here, and go on with what was asked."""
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

    def hear(self, message: Message) -> None:
        """Take what another leader says."""
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
            group.look()

    def after(self, host: int, sequence: int, function: Callable[[], None]) -> None:
        """Call a function when this host knows a host's calls up to this one, or now."""
        assert self._mirror is not None
        self._mirror.after(host, sequence, function)
