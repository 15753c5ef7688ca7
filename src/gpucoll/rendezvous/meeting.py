"""The parts that both sides of a meeting share: terms, outcome, and the ways in which it fails."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    PeerLostError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.rendezvous.endpoint import Endpoint, PeerConnection
from gpucoll.rendezvous.held_signals import HeldSignals
from gpucoll.rendezvous.job import Job
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.rendezvous.frames import Message

T = TypeVar("T")
Decide: TypeAlias = "Callable[[list[Message]], tuple[Message, list[int]]]"
SLICE_S = 0.02
"""How long a wait sleeps before it looks for Ctrl-C, lost ranks and its deadline."""


def poll_once(connection: PeerConnection, events: int, wait_s: float = SLICE_S) -> bool:
    """Wait for an event on a connection, for a moment; return whether it has come."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(1000 * wait_s))


@dataclass
class Meeting:
    """What a rank knows once the ranks have met. The descriptors belong to `settle`."""

    job: Job
    introductions: list[Message]
    """The ranks' introductions, by rank."""
    decision: Message
    """What rank 0 decided for all."""
    shared_fds: list[int]
    """The descriptors that rank 0 made for all."""
    rank_fds: list[list[int]]
    """By rank: the descriptors that came with its introduction."""
    look: Callable[[], None] = lambda: None
    """To be called by `settle` while it waits: raises if another rank has failed meanwhile."""

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        return self.shared_fds + [fd for group in self.rank_fds for fd in group]


class Watch:
    """Knows which ranks can still come, and makes the errors of a meeting.

    This base class knows nothing beyond the meeting's own connections.
    """

    call = "init"
    """The call in which the ranks meet, for messages."""
    has_begun = False
    """Whether other ranks wait for this one, so that a failure must be reported to them."""
    is_told = False
    """Whether the meeting failed and all ranks know, so that none of them waits for this one."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.who = rank_of(rank, world_size)
        """This rank, for messages."""

    def number(self, rank: int) -> int:
        """Return the number by which errors name a rank."""
        return rank

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return one of these ranks that can never come, and why; it may raise an error instead."""
        return None

    def lost(self, rank: int, how: str) -> GpucollError:
        """Return the error for a rank that is gone."""
        return PeerLostError(
            f"{self.who} lost rank {self.number(rank)} in {self.call}: {how}. There is no "
            "communicator"
        )

    def left(self, rank: int, why: str) -> GpucollError:
        """Return the error for a rank that gave the meeting up because of an exception."""
        return AbortedError(
            f"{self.who}: {self.call} was given up: rank {self.number(rank)} raised {why}. "
            "There is no communicator"
        )

    def late(self, text: str) -> GpucollError:
        """Return the error for a meeting that took too long."""
        return RendezvousDeadlineError(text)

    def commit(self) -> None:
        """On rank 0: note that all ranks have their part; raise if it is too late for that."""

    def is_committed(self) -> bool:
        """Return whether all have their part, without rank 0's word; if not, they never will."""
        return False

    def close(self) -> None:
        """Release the watch's resources."""


@dataclass
class Terms(Generic[T]):
    """A rank's arguments to a meeting; `meet.meet` describes them."""

    job: Job
    introduction: Message
    fds: list[int]
    check: Callable[[Message, list[int]], None]
    decide: Decide
    settle: Callable[[Meeting], T]
    undo: Callable[[T], None]
    timeout_s: float
    watch: Watch
    signals: HeldSignals
    endpoint: Endpoint

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return self.watch.who


# --- failures, as they are reported to other ranks ------------------------------------------------


def told(error: BaseException, rank: int) -> Message:
    """Return the message that reports to others what was raised on a rank."""
    if isinstance(error, DeadlineError):
        return {"error": str(error), "kind": "late"}
    is_final = isinstance(error, PeerLostError | AbortedError)
    if isinstance(error, GpucollError | MemoryError) and not is_final:
        return {"error": str(error), "kind": "refused", "rank": rank}
    text = type(error).__name__ + (f": {error}" if str(error) else "")
    return {"error": text[:1000], "kind": "left", "rank": rank}


def heard(message: Message, watch: Watch) -> GpucollError:
    """Return the error for a message that reports a failure."""
    text, kind, rank = str(message.get("error")), message.get("kind"), message.get("rank", 0)
    if type(rank) is not int or rank < 0:
        rank = 0
    if kind == "lost":
        return watch.lost(rank, text)
    if kind == "left":
        return watch.left(rank, text)
    if kind == "late":
        return watch.late(f"{watch.who}: the ranks did not meet in {watch.call}: {text}")
    watch.is_told = True
    return RendezvousError(f"rank {watch.number(rank)} refused the meeting: {text}")
