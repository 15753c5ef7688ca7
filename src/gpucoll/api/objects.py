"""The object collectives: small Python objects between all ranks, over the control channel."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpucoll.api.front import Front
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import NO_ROOT, Collective

if TYPE_CHECKING:
    from gpucoll.api.call_types import V


class Objects(Front):
    """What `Communicator` can do with picklable objects.

    For parameters, results and other small things. Cost: every rank's pickled bytes go to every
    rank, one exchange for up to 1 KiB and one more for each further slot. An object that cannot be
    pickled is an ArgumentTypeError on its rank before anything moves.
    """

    def broadcast_object(
        self, value: V | None, root: int = 0, *, timeout_s: float | None = None
    ) -> V:
        """Give every rank the root's picklable object; the others' `value` is ignored."""
        self._collectives.check_root(root)
        data = self._pickled("broadcast_object", value) if self.rank == root else b""
        parts = self._runner.exchange_bytes(data, Collective.BROADCAST_OBJECT, root, timeout_s)
        received: V = pickle.loads(parts[root])
        return received

    def all_gather_object(self, value: V, *, timeout_s: float | None = None) -> list[V]:
        """Return the picklable objects of all ranks, in rank order."""
        data = self._pickled("all_gather_object", value)
        parts = self._runner.exchange_bytes(data, Collective.ALL_GATHER_OBJECT, NO_ROOT, timeout_s)
        return [pickle.loads(part) for part in parts]

    def gather_object(
        self, value: V, root: int = 0, *, timeout_s: float | None = None
    ) -> list[V] | None:
        """Return the objects of all ranks on the root, None elsewhere."""
        self._collectives.check_root(root)
        data = self._pickled("gather_object", value)
        parts = self._runner.exchange_bytes(data, Collective.GATHER_OBJECT, root, timeout_s)
        return [pickle.loads(part) for part in parts] if self.rank == root else None

    def scatter_object(
        self,
        values: Sequence[V] | None = None,
        root: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> V:
        """Return this rank's item of the root's sequence, which has one item per rank."""
        self._collectives.check_root(root)
        data = b""
        if self.rank == root:
            if values is None or len(values) != self.world_size:
                got = "None" if values is None else f"{len(values)} items"
                raise ArgumentError(
                    f"scatter_object on root {root} needs {self.world_size} items; got {got}"
                )
            data = pickle.dumps([self._pickled("scatter_object", value) for value in values])
        parts = self._runner.exchange_bytes(data, Collective.SCATTER_OBJECT, root, timeout_s)
        mine: V = pickle.loads(pickle.loads(parts[root])[self.rank])
        return mine

    def all_reduce_object(
        self, value: V, function: Callable[[V, V], V], *, timeout_s: float | None = None
    ) -> V:
        """Combine the objects of all ranks with ``function(left, right)``, in rank order."""
        data = self._pickled("all_reduce_object", value)
        parts = self._runner.exchange_bytes(data, Collective.ALL_REDUCE_OBJECT, NO_ROOT, timeout_s)
        result: V = pickle.loads(parts[0])
        for part in parts[1:]:
            result = function(result, pickle.loads(part))
        return result

    def _pickled(self, name: str, value: object) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:  # of whatever kind: the object's own code may raise
            raise ArgumentTypeError(
                f"{name} on rank {self.rank} of {self.world_size}: this "
                f"{type(value).__name__} cannot be pickled: {error}. Give data, and functions and "
                "classes of modules instead of local ones"
            ) from error
