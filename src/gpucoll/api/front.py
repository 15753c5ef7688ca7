"""The base of all classes that give a communicator its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays.array_kinds import new_like, new_of_rows
from gpucoll.arrays.library import AnyArray
from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.collectives import Collectives
from gpucoll.calls.given import AnyInput, Unchecked
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.messages import MessageQueue
from gpucoll.calls.objects import ObjectMover
from gpucoll.calls.point_to_point import PointToPoint
from gpucoll.calls.runner import Runner
from gpucoll.calls.starting import ALIKE_EVERYWHERE, Starting
from gpucoll.collectives import Collective, Data
from gpucoll.group.protocol import Group


class Front:
    """The parts of a `Communicator` that its methods use.

    A method first tries its compiled entry (``_quick_...``). Entries serve exact NumPy arrays, and
    PyTorch tensors on the host of a kind seen before; for tensors they also allocate results of x's
    shape. Asynchronous calls first try ``_start_...``, a `Starting.start`. Calls that an entry
    leaves go to `Collectives` or `PointToPoint`. Bound methods of those are stored here, because
    every additional attribute lookup costs a small call 10 ns.
    """

    rank: int
    world_size: int
    _group: Group
    _backend: HostBackend
    _gpu: GpuRunner
    _runner: Runner
    _collectives: Collectives
    _point_to_point: PointToPoint
    _message_queue: MessageQueue
    _objects: ObjectMover
    _broadcasts: dict[int, Callable[[Any], Any]]
    """`ObjectMover.broadcasts`."""
    _call: Callable[..., Any]
    """`Collectives.call`."""
    _raise_left: Callable[[], None]
    """`Collectives.raise_left`."""
    _quick_send: Callable[[Any, int, int, float | None], Any]
    _quick_recv: Callable[[Any, int, int, float | None], Any]
    _quick_send_recv: Callable[[Any, int, int, Any, int, float | None], Any]
    _begin_send: Callable[[Any, int, int], Any]
    _begin_recv: Callable[[Any, int, int], Any]
    _quick_take: Callable[[int, int, float | None], Any]
    _quick_find: Callable[[int, int, float | None], Any]
    _quick_recv_row: Callable[[Any, int, int, float | None], Any]

    def _bind(self, collectives: Collectives) -> None:
        """Look up the compiled entries, once."""
        self._call, self._raise_left = collectives.call, collectives.raise_left
        entry = self._backend.entry
        for collective in Collective:
            if collective.data == Data.ARRAYS and not collective.is_composed:
                name = f"_quick_{collective.name.lower()}"
                setattr(self, name, entry(collective))
                if collective.has_blocks:
                    setattr(self, f"{name}_blocks", entry(collective, of_blocks=True))
                if collective in ALIKE_EVERYWHERE:
                    starting = Starting(collective, collectives.runner, self._backend)
                    setattr(self, f"_start_{collective.name.lower()}", starting.start)
        self._message_queue = self._point_to_point.queue
        messages = self._backend.messages
        self._quick_send = messages.send
        self._quick_recv = self._quick_send_recv = messages.receive
        self._broadcasts = self._objects.broadcasts
        self._begin_send, self._begin_recv = messages.begin_send, messages.begin_receive
        self._quick_take, self._quick_recv_row = messages.take, messages.receive_row
        self._quick_find = messages.find
        dispatch = collectives.dispatch
        if dispatch.refuses_host or dispatch.enqueues_host:  # every call is left to Python
            for name in [name for name in vars(self) if name.startswith(("_quick_", "_start_"))]:
                setattr(self, name, _leave_to_python)
            self._begin_send = self._begin_recv = self._raise_left = _leave_to_python

    def _is_root(self, root: Unchecked) -> bool:
        """Raise the error for a root that is an array, whose comparison has no truth value."""
        self._collectives.check_root(root)
        return False

    def _whole_like(self, x: AnyInput) -> AnyArray | None:
        """Return a new array for the concatenated x of all ranks; None if entries cannot read x."""
        if type(x) is not np.ndarray:
            return new_of_rows(x, self.world_size, 1)
        if x.ndim == 0:
            return None
        shape = x.shape
        return np.empty((shape[0] * self.world_size, *shape[1:]), x.dtype)

    def _block_like(self, x: AnyInput) -> AnyArray | None:
        """Return a new array for one rank's block of x; None if entries cannot read x."""
        if type(x) is not np.ndarray:
            return new_of_rows(x, 1, self.world_size)
        if x.ndim == 0:
            return None
        shape = x.shape
        return np.empty((shape[0] // self.world_size, *shape[1:]), x.dtype)

    def _rows_like(self, x: AnyInput, rows: Unchecked) -> AnyArray | None:
        """Return a new array of `rows` rows (a number or counts); None if Python must check."""
        if type(x) is not np.ndarray or x.ndim == 0:
            return None
        try:
            count = rows if type(rows) is int else sum(rows)
            return np.empty((count, *x.shape[1:]), x.dtype)
        except (TypeError, ValueError, OverflowError, MemoryError):
            return None

    def _block_of(self, x: AnyInput, rows: Unchecked) -> AnyArray | None:
        """Return a new array for this rank's block of x, an array with counts or a list."""
        if type(x) is list:
            block = x[self.rank] if len(x) == self.world_size else None
            return np.empty_like(block) if type(block) is np.ndarray else None
        if type(rows) not in (list, tuple) or len(rows) != self.world_size:
            return None
        return self._rows_like(x, rows[self.rank])

    def _list_like(self, xs: list[AnyArray]) -> list[AnyArray] | None:
        """Return new arrays for the results of a list; None if entries cannot read it."""
        if all(type(x) is np.ndarray for x in xs):
            return [np.empty_like(x) for x in xs]
        made = []
        for x in xs:
            new = new_like(x)
            if new is None:
                return None
            made.append(new)
        return made

    def _is_template(self, x: AnyInput, out: AnyInput) -> bool:
        """Return whether x, a scatter's template off the root, agrees with `out` or is None."""
        if x is None or type(x) is not np.ndarray or type(out) is not np.ndarray:
            return x is None
        return (
            x.dtype is out.dtype
            and x.ndim > 0
            and x.shape[0] % self.world_size == 0
            and x.size == out.size * self.world_size
        )


def as_entries_read(counts: Unchecked) -> Unchecked:
    """Return a user's counts in the form that compiled entries read: an array as a list."""
    return counts.tolist() if type(counts) is np.ndarray else counts


def _leave_to_python(*_: object) -> None:
    """Replace a compiled entry: leave every call to Python."""
