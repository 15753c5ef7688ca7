"""One rank of a run: what a worker is told of it, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gpucoll
from gpucoll.integrations.engine.outcome import Outcome, failed, returned

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["Run", "call"]


@dataclass(frozen=True)
class Run:
    """What all ranks of a run are told."""

    name: str
    """Nobody else's: ranks of another run cannot meet these."""
    world_size: int
    options: Mapping[str, Any]
    """Further arguments of `gpucoll.init`."""
    secret: str = field(repr=False)
    """The run's own: engines write the arguments of failed calls into their logs."""


def call(
    run: Run,
    rank: int,
    store: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    joined: Callable[[Communicator], None] | None = None,
) -> Outcome:
    """Meet the run's other ranks, call the function, and return how that ended.

    Whatever is raised is in the outcome, SystemExit too: it ends the rank and not the worker, which
    is the engine's.

    Parameters
    ----------
    store : object
        By which the ranks meet: ``set``, ``get``, ``secret``.
    joined : callable, optional
        Is given the communicator before the function.
    """
    try:
        place = {"rank": rank, "world_size": run.world_size, "meet": store, "name": run.name}
        with gpucoll.init(**place, **run.options) as communicator:
            if joined is not None:
                joined(communicator)
            result = function(communicator, *args, **kwargs)
    except BaseException as error:
        return failed(rank, error)
    return returned(rank, result)
