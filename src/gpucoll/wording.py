"""How errors and descriptions spell what they all speak of: ranks, and threads."""

from __future__ import annotations

from collections.abc import Sequence

from gpucoll.errors import StateError

ONE_THREAD = "one thread at a time, or one communicator per thread (duplicate)"


def rank_of(rank: int, world_size: int) -> str:
    """Return "rank 1 of 4"."""
    return f"rank {rank} of {world_size}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def another_thread(rank: int, world_size: int) -> StateError:
    """Return the error for a call beside one that another thread has not finished."""
    return StateError(
        f"another thread of {rank_of(rank, world_size)} is in a call on this communicator: "
        f"{ONE_THREAD}"
    )
