"""The state that every part of a group on several hosts uses."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from gpucoll.errors import GpucollError
from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.records import describe_block, describe_call
from gpucoll.group.world.board import Board, Failure
from gpucoll.group.world.exchanges import Exchanges
from gpucoll.group.world.lanes import has_lanes
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import EVENT_ABORT, Abort
from gpucoll.transport.shared.words import Context
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.group.world.joining import Joined


class WorldState:
    """What all parts of a `gpucoll.group.world.group.WorldGroup` use.

    Parameters
    ----------
    host : HostGroup
        The ranks of this host.
    joined : Joined
        The result of the meeting.
    board : Board
        What the ranks of this host know of the other hosts.
    bell_fd : int
        Descriptor that wakes the leader's thread.

    Attributes
    ----------
    calling : str
        The call that Python runs at this moment, as its user wrote it; or empty.
    block : CallBlock or None
        The block of the small call that Python has begun.
    raised : GpucollError or None
        The error that ended this rank's call: only that call knows how long it waited.
    """

    def __init__(self, host: HostGroup, joined: Joined, board: Board, bell_fd: int) -> None:
        self.host = host
        self.board = board
        self.bell_fd = bell_fd
        self.hosts = joined.hosts
        self.names = joined.names
        self.links = joined.links
        self.bulk = joined.bulk
        self.pairs = joined.pairs
        self.is_encrypted = joined.credentials.tls is not None
        """Whether all data between hosts is encrypted; the same on all ranks."""
        self.rank = host.members.number(host.rank)
        self.world_size = joined.hosts.world_size
        self.here = joined.hosts.host_of(self.rank)
        """This host's number."""
        self.channel = ControlChannel(host)
        """Between the ranks of this host."""
        self.exchanges = Exchanges(
            joined.hosts,
            self.rank,
            joined.connections,
            has_fast_schedules=self.is_encrypted or has_lanes(joined.introductions, joined.hosts),
            entered=board.entered_address(host.rank),
            n_closed=board.n_closed_address,
            abort=host.members.at(EVENT_ABORT),
            bell_fd=bell_fd,
        )
        """The means of compiled small calls."""
        host.context[Context.hosts] = self.exchanges.address
        self.calling = ""
        self.is_in_small_call = False
        self.block: CallBlock | None = None
        self.raised: GpucollError | None = None

    @property
    def timeout_s(self) -> float:
        """Default deadline of every wait, in seconds."""
        return self.host.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.host.timeout_s = timeout_s
        self.host.reset_timeout()

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return self.host.is_closed

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""
        return self.host.is_aborted

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; first settle what an earlier mismatch has left open."""
        self.host.check_usable(timeout_s)

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, if the group has been given up."""
        try:
            self.host.raise_if_aborted()
        except GpucollError:
            self.ring()
            raise

    def ring(self) -> None:
        """Make the leader look for news on this host."""
        if (bell_fd := self.bell_fd) >= 0:
            with contextlib.suppress(OSError):  # rung already
                os.eventfd_write(bell_fd, 1)

    def write(self, failure: Failure) -> None:
        """Break the communicator on this host, unless it is broken."""
        if not self.is_aborted:
            self.board.write(failure)
            self.host.abort(Abort.ELSEWHERE)

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""
        if self.hosts.host_of(rank) == self.here:
            return self.host.has_closed(self.hosts.place_of(rank))
        return self.board.closed_after(rank) is not None

    @property
    def who(self) -> str:
        """This rank, for errors."""
        return rank_of(self.rank, self.world_size)

    @property
    def number(self) -> int:
        """Number of the last call; the same on all ranks."""
        return self.exchanges.number

    @property
    def called(self) -> str:
        """The call that this rank is in, or has made last, as its user wrote it."""
        if self.calling:
            return self.calling
        if self.block is not None:
            return describe_block(self.block)
        host = self.host
        sequence = int(host.context[Context.sequence])
        return describe_call(host.members, host.rank, sequence) or "its first collective"
