"""The state that every part of a group on several hosts uses."""

from __future__ import annotations

import contextlib
import os
import threading

from gpucoll.errors import GpucollError
from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.records import describe_block, describe_call
from gpucoll.group.world.board import Board, Failure
from gpucoll.group.world.bulk import Bulk
from gpucoll.group.world.exchanges import Exchanges
from gpucoll.group.world.gpu_calls import GpuCalls
from gpucoll.group.world.hosts import Hosts
from gpucoll.group.world.links import Links
from gpucoll.group.world.pairs import Pairs
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.wording import rank_of


class WorldState:
    """The attributes of `gpucoll.group.world.group.WorldGroup`, and what all its parts use."""

    host: HostGroup
    hosts: Hosts
    names: tuple[str, ...]
    links: Links | None
    bulk: Bulk | None
    pairs: Pairs | None
    exchanges: Exchanges
    channel: ControlChannel
    rank: int
    world_size: int
    here: int
    _board: Board
    _bell_fd: int
    _credentials: Credentials
    _calling: str
    _is_in_small_call: bool
    _block: CallBlock | None
    _raised: GpucollError | None
    _answers: dict[int, dict[str, str]]
    _n_asked: int
    _told_closed: set[int]
    _has_told_failure: bool
    _gpu_calls: GpuCalls
    _telling: threading.RLock

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

    @property
    def is_encrypted(self) -> bool:
        """Whether all data between hosts is encrypted; the same on all ranks."""
        return self._credentials.tls is not None

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
        if (bell_fd := self._bell_fd) >= 0:
            with contextlib.suppress(OSError):  # rung already
                os.eventfd_write(bell_fd, 1)

    def write(self, failure: Failure) -> None:
        """Break the communicator on this host, unless it is broken."""
        if not self.is_aborted:
            self._board.write(failure)
            self.host.abort(Abort.ELSEWHERE)

    @property
    def _who(self) -> str:
        return rank_of(self.rank, self.world_size)

    @property
    def number(self) -> int:
        """Number of the last call."""
        return self.exchanges.number

    @property
    def _called(self) -> str:
        """The call that this rank is in, or has made last, as its user wrote it."""
        if self._calling:
            return self._calling
        if self._block is not None:
            return describe_block(self._block)
        host = self.host
        sequence = int(host.context[Context.sequence])
        return describe_call(host.members, host.rank, sequence) or "its first collective"
