"""One-sided calls on a window. Each is complete when it returns."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll.integrations.mpi4py import operations
from gpucoll.integrations.mpi4py.constants import PROC_NULL
from gpucoll.integrations.mpi4py.datatypes import as_datatype
from gpucoll.integrations.mpi4py.errors import argument_error, refused
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.operations import SUM, Op
from gpucoll.integrations.mpi4py.requests import Finished, Request
from gpucoll.integrations.mpi4py.specifications import Row, Simple

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.groups import Group
    from gpucoll.integrations.mpi4py.handles import Contents
    from gpucoll.integrations.mpi4py.typing import BufSpec, TargetSpec

_POSTED, _COMPLETE = 1, 2
"""Tags of the window's own messages."""


class _Target:
    """Items of a datatype in a rank's memory, at a displacement in that rank's unit."""

    def __init__(self, core: Contents, rank: int, origin: Simple, given: TargetSpec | None) -> None:
        place, count, datatype = 0, origin.count, origin.datatype
        if isinstance(given, list | tuple):
            if len(given) > 3:
                raise ValueError("target: expecting 3 items at most")
            parts = [*given, *(None,) * (3 - len(given))]
            place = 0 if parts[0] is None else operator.index(parts[0])
            count = count if parts[1] is None else operator.index(parts[1])
            datatype = datatype if parts[2] is None else as_datatype(parts[2])
        elif given is not None and hasattr(given, "__index__"):
            place = operator.index(given)
        elif given is not None:
            raise ValueError(f"target: expecting integral or list/tuple; got {given!r}")
        self.part, self.offset = core.parts[rank], place * core.units[rank]
        self.map, self.count, self.datatype = datatype._map(), count, datatype
        low, high = self.map.span(count)
        if count < 0 or low + self.offset < 0 or high + self.offset > self.part.size:
            raise argument_error(
                f"target: {count} items at {place} span bytes {low + self.offset} to "
                f"{high + self.offset}, but rank {rank}'s memory has {self.part.size} bytes",
                "ERR_RMA_RANGE",
            )

    def get(self) -> Row:
        row: Row = self.part.get(self.map, self.offset, self.count)
        return row

    def put(self, row: AnyArray) -> None:
        row = np.ascontiguousarray(row)
        if row.nbytes > self.count * self.map.size:
            raise argument_error(
                f"target: {row.nbytes} bytes do not fit exactly into {self.count * self.map.size}",
                "ERR_TRUNCATE",
            )
        self.part.put(row, self.map, self.offset)


class OneSided:
    """The one-sided calls of `Win`."""

    _live: Callable[[str], Any]

    def _target(
        self, origin: BufSpec, rank: Unchecked, target: TargetSpec | None, writable: bool
    ) -> tuple[Simple, _Target] | None:
        """Return the origin's specification and the target; None if there is no target."""
        core, number = self._live("ERR_WIN"), integer(rank)
        if number == PROC_NULL:
            return None
        if not 0 <= number < len(core.parts):
            raise argument_error(f"rank must be 0 to {len(core.parts) - 1}; got {rank}", "ERR_RANK")
        given = Simple(origin, writable)
        if given.gpu_array is not None:
            refused("one-sided communication of GPU arrays", "copy them to the host")
        return given, _Target(core, number, given, target)

    @contextlib.contextmanager
    def _alone(self, rank: int) -> Iterator[None]:
        """Exclude other accumulations from a rank's memory."""
        with self._live("ERR_WIN").accumulating(rank):
            yield

    def Put(self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None) -> None:
        """Write to a rank's memory."""
        both = self._target(origin, target_rank, target, False)
        if both is not None:
            both[1].put(both[0].row())

    def Get(self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None) -> None:
        """Read a rank's memory."""
        both = self._target(origin, target_rank, target, True)
        if both is not None:
            _fill(both[0], both[1].get())

    def Accumulate(
        self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None, op: Op = SUM
    ) -> None:
        """Combine data with a rank's memory, atomically with respect to other accumulations."""
        both = self._target(origin, target_rank, target, False)
        if both is not None:
            with self._alone(integer(target_rank)):
                _combine(both[0], both[1], op)

    def Get_accumulate(
        self,
        origin: BufSpec,
        result: BufSpec,
        target_rank: int,
        target: TargetSpec | None = None,
        op: Op = SUM,
    ) -> None:
        """Combine data with a rank's memory; return its former contents in `result`."""
        both = self._target(origin, target_rank, target, False)
        if both is not None:
            with self._alone(integer(target_rank)):
                before = _combine(both[0], both[1], op)
            _fill(Simple(result, True), before)

    def Fetch_and_op(
        self, origin: BufSpec, result: BufSpec, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """Combine one element with a rank's memory; return its former value in `result`."""
        _check_single(origin=origin, result=result, rank=target_rank)
        self.Get_accumulate(origin, result, target_rank, integer(target_disp), op)

    def Compare_and_swap(
        self,
        origin: BufSpec,
        compare: BufSpec,
        result: BufSpec,
        target_rank: int,
        target_disp: int = 0,
    ) -> None:
        """Replace one element if it equals `compare`; return its former value in `result`."""
        _check_single(origin=origin, compare=compare, result=result, rank=target_rank)
        both = self._target(origin, target_rank, integer(target_disp), False)
        if both is None:
            return
        given, target = both
        with self._alone(integer(target_rank)):
            before = target.get()
            if before.tobytes() == Simple(compare, False).row().tobytes():
                target.put(given.row())
        _fill(Simple(result, True), before)

    def Rput(self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None) -> Request:
        """Write to a rank's memory; the request is complete at once."""
        self.Put(origin, target_rank, target)
        return Request._started(Finished())

    def Rget(self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None) -> Request:
        """Read a rank's memory; the request is complete at once."""
        self.Get(origin, target_rank, target)
        return Request._started(Finished())

    def Raccumulate(
        self, origin: BufSpec, target_rank: int, target: TargetSpec | None = None, op: Op = SUM
    ) -> Request:
        """Accumulate; the request is complete at once."""
        self.Accumulate(origin, target_rank, target, op)
        return Request._started(Finished())

    def Rget_accumulate(
        self,
        origin: BufSpec,
        result: BufSpec,
        target_rank: int,
        target: TargetSpec | None = None,
        op: Op = SUM,
    ) -> Request:
        """Get and accumulate; the request is complete at once."""
        self.Get_accumulate(origin, result, target_rank, target, op)
        return Request._started(Finished())

    # --- epochs between some ranks ----------------------------------------------------------------

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Expose this rank's memory to the ranks of a group until `Wait`."""
        core = self._live("ERR_WIN")
        core.posted_to = core.ranks_of(group)
        core.tokens += [core.comm.isend(None, rank, _POSTED) for rank in core.posted_to]

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Wait until the ranks of a group have called `Post`."""
        core = self._live("ERR_WIN")
        core.started_on = core.ranks_of(group)
        for rank in core.started_on:
            core.comm.recv(source=rank, tag=_POSTED)

    def Complete(self) -> None:
        """End the access epoch that `Start` began."""
        core = self._live("ERR_WIN")
        core.tokens += [core.comm.isend(None, rank, _COMPLETE) for rank in core.started_on]
        core.started_on = []

    def Wait(self) -> bool:
        """Wait until all ranks of the group of `Post` have called `Complete`."""
        core = self._live("ERR_WIN")
        for rank in core.posted_to:
            core.comm.recv(source=rank, tag=_COMPLETE)
        Request.Waitall(core.tokens)
        core.posted_to, core.tokens = [], []
        return True

    def Test(self) -> bool:
        """Return whether all these ranks have called `Complete`; if so, end as `Wait` does."""
        core = self._live("ERR_WIN")
        if not all(core.comm.iprobe(rank, _COMPLETE) for rank in core.posted_to):
            return False
        return self.Wait()


def _fill(into: Simple, row: AnyArray) -> None:
    """Write elements to a buffer of this rank."""
    target, finish = into.target()
    data = np.ascontiguousarray(row).view(np.uint8)
    room = target.view(np.uint8)
    if len(data) > len(room):
        raise argument_error(f"{len(data)} bytes do not fit into {len(room)}", "ERR_TRUNCATE")
    room[: len(data)] = data
    if finish is not None:
        finish()


def _combine(origin: Simple, target: _Target, op: Op) -> Row:
    """Combine the origin with the target; return the target's former contents."""
    operations.check(op, target.datatype)
    if op._core.user is not None:
        raise argument_error("Accumulate supports only predefined operations", "ERR_OP")
    before = target.get()
    if op._core.name != "NO_OP":
        row = np.ascontiguousarray(origin.row()).view(np.uint8).view(before.dtype)
        if len(row) != len(before):
            raise argument_error(
                f"target: {len(before)} elements, but the origin has {len(row)}", "ERR_COUNT"
            )
        target.put(operations.combine(op, before, row.copy(), target.datatype))
    return before


def _check_single(rank: Unchecked, origin: BufSpec, **others: BufSpec) -> None:
    if integer(rank) == PROC_NULL:
        return
    first = Simple(origin, False)
    for name, given in {"origin": origin, **others}.items():
        one = Simple(given, name == "result")
        if one.count != 1:
            raise ValueError(f"{name}: expecting a single element, got {one.count}")
        if one.datatype != first.datatype:
            raise ValueError(f"mismatch in origin and {name} MPI datatypes")
