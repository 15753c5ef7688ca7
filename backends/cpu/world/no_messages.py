"""Messages between the ranks of several hosts: this version has none, and says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gpucoll.backends.protocol import MessageRequest, Transfers
from gpucoll.errors import BackendUnavailableError
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared.words import Kind, Status
from gpucoll.wording import rank_of


def _not_that_way(*_: Any) -> Any:
    return None


def _not_run() -> int:
    return int(Status.NOT_RUN)


class NoMessages:
    """A `gpucoll.backends.protocol.HostMessages` that refuses every message.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    """

    def __init__(self, group: WorldGroup) -> None:
        self._who = rank_of(group.rank, group.world_size)
        self.send = self.receive = self.begin_send = self.begin_receive = _not_that_way
        self.take = self.find = _not_that_way
        self.wait_begun: Callable[[bytearray], int] = self._refuse_row
        self.let_go_begun: Callable[[bytearray], None] = _not_that_way
        self.last_status: Callable[[], int] = _not_run

    def _refuse(self) -> NoReturn:
        raise BackendUnavailableError(
            f"{self._who}: this version of gpucoll has no messages (send, recv, probe) in a "
            "communicator that spans hosts. Use a collective (all_to_all with counts, broadcast), "
            "or a communicator of one host's ranks, from split"
        )

    def _refuse_row(self, row: bytearray) -> int:
        self._refuse()

    def start(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> Transfers:
        """Refuse."""
        self._refuse()

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Refuse."""
        self._refuse()

    def resume(self, requests: Sequence[MessageRequest]) -> None:
        """Refuse."""
        self._refuse()

    def probe(self, request: MessageRequest) -> bool:
        """Refuse."""
        self._refuse()

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], Callable[[], None]]:
        """Refuse."""
        self._refuse()

    def within(self, entry: Callable[..., Any], timeout_s: float, *arguments: Any) -> Any:
        """Return None: no entry serves anything."""
        return entry(*arguments)

    def begun(self, row: bytearray) -> Transfers:
        """Refuse: nothing was begun."""
        self._refuse()

    def receive_taken(self, row: bytearray, code: int | None = None) -> Any:
        """Refuse: nothing was taken."""
        self._refuse()

    def plain_array(self, row: bytearray) -> None:
        """Refuse: nothing was found."""
        self._refuse()

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Refuse: nothing was received."""
        self._refuse()

    def received(self, row: bytearray) -> MessageRequest:
        """Refuse: nothing was received."""
        self._refuse()

    def finish_take(self, row: bytearray) -> MessageRequest:
        """Refuse: nothing was taken."""
        self._refuse()

    def learn(self, kind: Kind, dtype: Any, name: str, description: bytes | None) -> None:
        """Do nothing."""

    def hold(self, is_held: bool) -> None:
        """Do nothing."""

    def let_go(self, request: MessageRequest) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def unreceived(self) -> list[tuple[int, int]]:
        """Return nothing."""
        return []

    def undelivered(self) -> list[tuple[int, int]]:
        """Return nothing."""
        return []
