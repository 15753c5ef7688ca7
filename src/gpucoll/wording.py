"""Shared wording of errors and descriptions: the names of ranks and threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpucoll.errors import StateError

ONE_THREAD = "one thread at a time, or one communicator per thread (duplicate)"

MESSAGE_REASONS = (
    "the other rank did not make the matching call, or made it with another size, or both ranks "
    "are in a send to each other: put messages that go both ways into group(), or use send_recv"
)
"""Reasons why a message of GPU arrays may never end."""


def rank_of(rank: int, world_size: int) -> str:
    """Return "rank 1 of 4"."""
    return f"rank {rank} of {world_size}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def range_of_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 2-63": for lists that may be long."""
    found = sorted(ranks)
    parts: list[str] = []
    start = 0
    for place, rank in enumerate(found):
        if place + 1 == len(found) or found[place + 1] != rank + 1:
            run = found[start : place + 1]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = place + 1
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(parts)


OUT_BY_NAME = ". The array for the result goes by name: out=..."
"""Added to an error about an array in the place of another argument."""


def is_array_like(given: object) -> bool:
    """Return whether this is an array of a library, or a list that may stand for one."""
    return isinstance(given, list | tuple) or hasattr(given, "shape")


def spelled_given(given: object) -> str:
    """Return an argument as errors show it: for an array only its kind, not its elements."""
    shape = getattr(given, "shape", None)
    if not isinstance(shape, tuple):
        return repr(given)
    kind = type(given)
    return f"an array ({kind.__module__}.{kind.__qualname__}, shape {tuple(shape)})"


def another_thread(rank: int, world_size: int) -> StateError:
    """Return the error for a call that is made while another thread is in one."""
    return StateError(
        f"another thread of {rank_of(rank, world_size)} is in a call on this communicator: "
        f"{ONE_THREAD}"
    )
