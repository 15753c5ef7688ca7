"""A check, before anything moves, that all ranks were given the same; each rank tells its error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gpucoll.api.communicator import Communicator
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError

T = TypeVar("T")


def agree(
    comm: Communicator,
    what: str,
    problem: Exception | None,
    settings: Mapping[str, str],
    offered: T,
) -> list[T]:
    """Return what each rank offers. Collective.

    Raises this rank's problem, an ArgumentError if another one has a problem, and a MismatchError
    if the ranks have different settings.
    """
    text = None if problem is None else str(problem)
    found = comm.all_gather_object((text, dict(settings), offered))
    if problem is not None:
        raise problem
    size = comm.world_size
    for rank, (of_rank, _, _) in enumerate(found):
        if of_rank is not None:
            raise ArgumentError(f"{what}: rank {rank} of {size} raised: {of_rank}")
    expected = found[0][1]
    for rank, (_, others, _) in enumerate(found):
        for name in [*expected, *others]:
            if expected.get(name) != others.get(name):
                raise MismatchError(
                    f"{what}: {name} is {expected.get(name, 'not there')} on rank 0 of {size}, but "
                    f"{others.get(name, 'not there')} on rank {rank}: pass the same on all ranks"
                )
    return [item for _, _, item in found]


def check_communicator(comm: object) -> None:
    """Raise if an argument is no communicator."""
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"comm must be a gpucoll.Communicator; got {type(comm).__name__}")
