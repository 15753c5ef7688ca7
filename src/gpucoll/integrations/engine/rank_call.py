"""One rank of a run: what its worker is given, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import gpucoll
from gpucoll.integrations.engine.outcome import Outcome, failed, returned

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.rendezvous.meeting_store import AnyStore

__all__ = ["InitOptions", "Run", "call"]

InitOptions: TypeAlias = Mapping[str, Any]
"""Further arguments of `gpucoll.init`, by name; `init` checks them."""


@dataclass(frozen=True)
class Run:
    """What every rank of a run is given."""

    name: str
    """Unique to the run: ranks of different runs cannot meet."""
    world_size: int
    options: InitOptions
    secret: str = field(repr=False)
    """The run's own secret. It stays out of the repr, since engines log the arguments of failed
    calls."""


def call(
    run: Run,
    rank: int,
    store: AnyStore,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    joined: Callable[[Communicator], None] | None = None,
) -> Outcome:
    """Meet the run's other ranks, call the function, and return the outcome.

    The outcome holds every exception, SystemExit too: it ends the rank, but not the worker, which
    belongs to the engine.

    Parameters
    ----------
    store : object
        The store through which the ranks meet: ``set``, ``get``, ``secret``.
    joined : callable, optional
        Called with the communicator before the function runs.
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
