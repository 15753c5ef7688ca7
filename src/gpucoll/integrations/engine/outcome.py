"""How a function ended on one rank, as it travels from a worker to the driver."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from typing import Any

from gpucoll import AbortedError, LaunchError, PeerLostError, ShrinkError

__all__ = ["Outcome", "failed", "here", "lost", "returned", "revived", "without_result"]

_FOLLOWS = (PeerLostError, AbortedError)


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: it returned, raised, or was lost with its worker."""

    rank: int
    where: str
    """The worker, for messages: its host and process."""
    result: Any = None
    """What the function returned."""
    kind: str = ""
    """Name of the class of what was raised; empty: nothing was."""
    text: str = ""
    """The traceback there."""
    how: str = ""
    """Why there is no result, though nothing was raised: the rest of a sentence about the rank."""
    exception: bytes | None = None
    """Pickle of what was raised; None where that cannot be pickled."""
    follows: bool = False
    """Whether another rank's end led to it."""
    is_lost: bool = False
    """Whether the rank is gone, or the others have gone on without it."""

    @property
    def has_failed(self) -> bool:
        """Whether there is no result."""
        return bool(self.kind or self.how)

    def error(self, world_size: int) -> LaunchError:
        """Return the error that says which rank of how many failed, where and how."""
        who = f"rank {self.rank} of {world_size} ({self.where})"
        if self.how:
            return LaunchError(f"{who} {self.how}")
        return LaunchError(f"{who} raised {self.kind}. There:\n{self.text.rstrip()}")


def here() -> str:
    """Return what messages call this worker."""
    return f"host {socket.gethostname()}, process {os.getpid()}"


def returned(rank: int, result: Any) -> Outcome:
    """Return how a rank ended that returned something."""
    return Outcome(rank, here(), result)


def failed(rank: int, error: BaseException) -> Outcome:
    """Return how a rank ended that raised something."""
    return Outcome(
        rank,
        here(),
        kind=type(error).__name__,
        text="".join(traceback.format_exception(error)),
        exception=_pickled(error),
        follows=isinstance(error, _FOLLOWS),
        is_lost=isinstance(error, ShrinkError),
    )


def lost(rank: int, where: str, how: str) -> Outcome:
    """Return how a rank ended that was lost with its worker."""
    return Outcome(rank, where, how=how, is_lost=True)


def without_result(rank: int, where: str, how: str) -> Outcome:
    """Return how a rank ended whose result cannot be had."""
    return Outcome(rank, where, how=how)


def revived(outcome: Outcome) -> Exception | None:
    """Return what a rank raised; None: what cannot be unpickled here, exits and interrupts."""
    with contextlib.suppress(Exception):
        error = pickle.loads(outcome.exception or b"")
        return error if isinstance(error, Exception) else None
    return None


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    with contextlib.suppress(Exception):
        data = bytes(cloudpickle.dumps(error))
        pickle.loads(data)  # many cannot be made again from what they hand to Exception
        return data
    return None
