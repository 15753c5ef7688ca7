"""The actors: one for each rank, and one through which the ranks meet.

These are plain classes. The driver turns them into actors, so that importing them does not import
Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpucoll import AbortedError, __version__
from gpucoll.integrations.engine.outcome import Outcome
from gpucoll.integrations.engine.rank_call import Run, call

__all__ = ["KeyActor", "RankActor", "Station", "Store"]

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Station:
    """Where an actor runs."""

    node: str
    host: str
    pid: int
    version: str

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}"


class RankActor:
    """One rank: calls a function in the main thread of its process."""

    def describe(self) -> Station:
        """Return where the actor runs."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Station(str(node), socket.gethostname(), os.getpid(), __version__)

    def call(
        self,
        run: Run,
        rank: int,
        store: Store,
        function: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> Outcome:
        """Call a function as one rank of a run."""
        return call(run, rank, store, function, args, kwargs)


class KeyActor:
    """The keys and values through which the ranks of a run meet."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._values[key] = value

    def get(self, key: str) -> str | None:
        """Return the stored value; None if there is none."""
        return self._values.get(key)

    def delete(self, key: str) -> None:
        """Delete a value."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Delete everything: the run is over."""
        self._values.clear()


@dataclass(frozen=True)
class Store:
    """A rank's connection to the `KeyActor`, through which `gpucoll.init` meets."""

    actor: Any
    """The actor's handle."""
    key: str = field(repr=False)
    """The run's secret."""
    host: str | None = None
    """The head node's address, so that rank 0 listens on the interface that leads there."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask("set", key, value)

    def get(self, key: str) -> str | None:
        """Return a key's value; None if it is not set."""
        return self._ask("get", key)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._ask("delete", key)

    def secret(self) -> str:
        """Return the run's secret."""
        return self.key

    def _ask(self, method: str, *args: str) -> str | None:
        import ray

        try:
            answer: str | None = ray.get(
                getattr(self.actor, method).remote(*args), timeout=_ANSWER_S
            )
        except ray.exceptions.RayActorError as error:
            raise AbortedError(
                "the driver has ended the run, and with it the store through which ranks meet"
            ) from error
        return answer
