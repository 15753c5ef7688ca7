"""The object collectives: they exchange picklable Python objects between all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpucoll.api.front import Front
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from gpucoll.api.call_types import V


class Objects(Front):
    """The object collectives of `Communicator`.

    Objects are pickled (protocol 5). Contiguous arrays and other large buffers in an object are not
    copied into the pickle; they go directly from where they are to new memory on the other ranks.
    On the rank that passed an object, the result is that object itself, not a copy.

    Cost: one 1 KiB exchange; larger objects need one more round, plus one for each buffer of 64 KiB
    or more. An object that cannot be pickled is an ArgumentTypeError on every rank.
    """

    def broadcast_object(
        self, value: V | None, root: int = 0, *, timeout_s: float | None = None
    ) -> V:
        """Return the root's picklable object on every rank; other ranks' `value` is ignored."""
        received: V
        if timeout_s is None and type(root) is int and (quick := self._broadcasts.get(root)):
            received = quick(value)
            return received
        self._collectives.check_root(root)
        received = self._objects.broadcast(value, int(root), timeout_s)
        return received

    def all_gather_object(self, value: V, *, timeout_s: float | None = None) -> list[V]:
        """Return the picklable objects of all ranks, in rank order."""
        found = self._all_objects(Collective.ALL_GATHER_OBJECT, value, NO_ROOT, timeout_s)
        assert found is not None
        return found

    def gather_object(
        self, value: V, root: int = 0, *, timeout_s: float | None = None
    ) -> list[V] | None:
        """Return the objects of all ranks on the root, None elsewhere."""
        self._collectives.check_root(root)
        return self._all_objects(Collective.GATHER_OBJECT, value, int(root), timeout_s)

    def scatter_object(
        self, values: Sequence[V] | None = None, root: int = 0, *, timeout_s: float | None = None
    ) -> V:
        """Return this rank's item of the root's sequence, which has one item per rank."""
        self._collectives.check_root(root)
        if self.rank == root and (values is None or len(values) != self.world_size):
            got = "None" if values is None else f"{len(values)} items"
            raise ArgumentError(
                f"scatter_object on root {root} needs {self.world_size} items; got {got}"
            )
        mine: V = self._objects.scatter(values, int(root), timeout_s)
        return mine

    def all_reduce_object(
        self, value: V, function: Callable[[V, V], V], *, timeout_s: float | None = None
    ) -> V:
        """Combine the objects of all ranks with ``function(left, right)``, in rank order.

        The function gets copies, even of this rank's own object, so it may change its arguments.
        """
        found = self._all_objects(Collective.ALL_REDUCE_OBJECT, value, NO_ROOT, timeout_s)
        assert found is not None
        found[self.rank] = pickle.loads(pickle.dumps(value))
        result = found[0]
        for item in found[1:]:
            result = function(result, item)
        return result

    def _all_objects(
        self, collective: Collective, value: V, root: int, timeout_s: float | None
    ) -> list[V] | None:
        arrived = self._objects.gather(collective, value, root, timeout_s)
        if arrived is None:
            return None
        return [
            value if rank == self.rank else arrived[rank].unpack()
            for rank in range(self.world_size)
        ]
