"""Errors as hosts send them to each other: a class and a text."""

from __future__ import annotations

from typing import Final

from gpucoll.errors import (
    AbortedError,
    BackendError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    SharedMemoryError,
)
from gpucoll.group.world.board import Failure
from gpucoll.wording import rank_of

KINDS: Final[tuple[type[GpucollError], ...]] = (
    AbortedError,
    DeadlineError,
    PeerLostError,
    SharedMemoryError,
    MismatchError,
    BackendError,
)
BROKEN: Final = "The communicator is broken: close it"


def failure_of(error: GpucollError, author: int) -> Failure:
    """Return the failure that reports an error that a rank raises or would raise."""
    kind = next((place for place, made in enumerate(KINDS) if isinstance(error, made)), 0)
    return Failure(kind, author, str(error))


def error_of(failure: Failure, rank: int, world_size: int) -> GpucollError:
    """Return the error that a rank raises for a failure that was reported to it."""
    made = KINDS[failure.kind] if 0 <= failure.kind < len(KINDS) else AbortedError
    if failure.author == rank:
        return made(failure.text)
    author = rank_of(failure.author, world_size)
    if (named := f"This is {author}.") in failure.text:
        return made(failure.text.replace(named, f"This is {rank_of(rank, world_size)}."))
    text = failure.text.removeprefix(f"{author}: ")
    if text.startswith(f"{author} "):
        text = f"rank {failure.author}{text.removeprefix(author)}"
    return made(f"{rank_of(rank, world_size)}: {text}")
