"""What runs in Ray's processes: the actor that is a rank, and the one that ranks meet by.

Plain classes: the driver makes actors of them, so that Ray is not imported before.
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
        """Return where it runs."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Station(str(node), socket.gethostname(), os.getpid(), __version__)

    def call(
        self,
        run: Run,
        rank: int,
        store: Store,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Outcome:
        """Be a rank of a run."""
        return call(run, rank, store, function, args, kwargs)


class KeyActor:
    """Keys and values, which the ranks of a run set and get until they have met."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self._values[key] = value

    def get(self, key: str) -> str | None:
        """Return what is kept; None: nothing."""
        return self._values.get(key)

    def delete(self, key: str) -> None:
        """Keep it no longer."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Keep nothing: the run is over."""
        self._values.clear()


@dataclass(frozen=True)
class Store:
    """A rank's way to the `KeyActor`: what `gpucoll.init` meets by."""

    actor: Any
    """The handle."""
    key: str = field(repr=False)
    """The run's secret."""
    host: str | None = None
    """The head node's, so that rank 0 listens on the interface that leads there."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        """Return its value; None where it is not set."""
        return self._ask("get", key)

    def delete(self, key: str) -> None:
        """Take it away."""
        self._ask("delete", key)

    def secret(self) -> str:
        """Return the run's secret."""
        return self.key

    def _ask(self, method: str, *args: str) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=_ANSWER_S)
        except ray.exceptions.RayActorError as error:
            raise AbortedError(
                "the driver has ended the run: nobody is there to meet by"
            ) from error
