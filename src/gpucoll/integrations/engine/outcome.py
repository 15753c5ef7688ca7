"""The outcome of a function on one rank, as it travels from a worker to the driver."""

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
    """How a rank ended: it returned, raised, or was lost with its worker."""

    rank: int
    where: str
    """The worker, for messages: its host and process."""
    result: Any = None
    """The function's return value."""
    kind: str = ""
    """Name of the exception's class; empty if none was raised."""
    text: str = ""
    """The exception's traceback."""
    how: str = ""
    """Why there is no result although nothing was raised: the rest of a sentence about the rank."""
    exception: bytes | None = None
    """The pickled exception; None if it cannot be pickled."""
    follows: bool = False
    """Whether the end of another rank caused this one."""
    is_lost: bool = False
    """Whether the rank is gone, or the other ranks have gone on without it."""

    @property
    def has_failed(self) -> bool:
        """Whether the rank has no result."""
        return bool(self.kind or self.how)

    def error(self, world_size: int) -> LaunchError:
        """Return an error that names the rank, the world size, the worker and the reason."""
        who = f"rank {self.rank} of {world_size} ({self.where})"
        if self.how:
            return LaunchError(f"{who} {self.how}")
        return LaunchError(f"{who} raised {self.kind}. There:\n{self.text.rstrip()}")


def here() -> str:
    """Return the name of this worker for messages."""
    return f"host {socket.gethostname()}, process {os.getpid()}"


def returned(rank: int, result: object) -> Outcome:
    """Return the outcome of a rank that returned."""
    return Outcome(rank, here(), result)


def failed(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of a rank that raised."""
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
    """Return the outcome of a rank that was lost with its worker."""
    return Outcome(rank, where, how=how, is_lost=True)


def without_result(rank: int, where: str, how: str) -> Outcome:
    """Return the outcome of a rank whose result cannot be obtained."""
    return Outcome(rank, where, how=how)


def revived(outcome: Outcome) -> Exception | None:
    """Return a rank's exception; None for exits, interrupts and what cannot be unpickled here."""
    with contextlib.suppress(Exception):
        error = pickle.loads(outcome.exception or b"")
        return error if isinstance(error, Exception) else None
    return None


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    with contextlib.suppress(Exception):
        data = bytes(cloudpickle.dumps(error))
        # many exceptions cannot be rebuilt from the arguments they pass to Exception
        pickle.loads(data)
        return data
    return None
