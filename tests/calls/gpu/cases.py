"""The common body of collective cases on GPU arrays: the same `Case`, oracle and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.calls.gpu.kits import POISON, Guarded
from tests.collective_cases import GATHERING, SCATTERING, Case
from tests.dtypes import ALLOWED, assert_same, dtype_of

from gpucoll.errors import ArgumentTypeError

WAYS = ("out", "new", "asynchronous", "plan", "stream", "group")


class GpuCase:
    """A case on one rank: its arrays, the call, and what must be true of them afterwards."""

    def __init__(self, comm, kit, case: Case) -> None:
        self.comm, self.kit, self.case = comm, kit, case
        rank, world_size = comm.rank, comm.world_size
        self.mine = case.input_of(rank, world_size)
        self.expected = case.expected(world_size)[rank]
        self.has_out = case.way != "new"
        is_root = case.root in (-1, rank)
        can_be = self.expected is not None and (case.name != "scatter" or is_root)
        if case.name == "all_to_all":
            can_be = can_be and case.rows(world_size, rank) == case.received(rank, world_size)
        self.is_in_place = case.in_place and self.has_out and can_be
        start = sum(case.rows(world_size)[:rank]) if case.name in (*GATHERING, *SCATTERING) else 0
        shape = (self.mine if self.expected is None else self.expected).shape
        dtype, self._part = dtype_of(case.dtype), slice(start, None)
        if self.is_in_place:
            whole = Guarded(kit, max(self.mine.shape, shape), dtype, case.offset)
            self._guards = [whole]
            part = whole.array[start:][: min(len(self.mine), shape[0])]
            self._part = slice(start, start + min(len(self.mine), shape[0]))
            gathers = case.name in GATHERING
            self.x, self.out = (part, whole.array) if gathers else (whole.array, part)
        else:
            self._guards = [Guarded(kit, self.mine.shape, dtype, case.offset)]
            self._guards.append(Guarded(kit, shape, dtype, case.offset))
            self.x, self.out = (guarded.array for guarded in self._guards)
        kit.write(self.x, self.mine)

    def make(self, prefix: str = "", **options: Any) -> Any:
        case, rank = self.case, self.comm.rank
        given = case.arguments(rank, self.comm.world_size)
        if self.has_out:
            given["out"] = self.out
        is_unknown = case.name == "scatter" and rank != case.root and self.has_out
        x = None if is_unknown and case.seed % 2 else self.x
        return getattr(self.comm, prefix + case.name)(x, **given, **options)

    def run(self) -> Any:
        way = self.case.way
        if way == "plan":
            return self.make("plan_")()
        if way == "asynchronous":
            work = self.make(async_op=True)
            result = work.wait()
            work.synchronize()
            assert work.done()
            assert work.exception() is None
            return result
        if way == "stream":
            stream = self.kit.stream()
            self.kit.read(self.x)  # it was written on the current stream: now it is there
            result = self.make(stream=stream)
            stream.synchronize()
            return result
        if way == "group":
            with self.comm.group():
                return self.make()  # filled when the group ends
        return self.make()

    def check(self, result: Any) -> None:
        where = f"rank {self.comm.rank} of {self.comm.world_size}, {self.case}"
        got = None if result is None else self.kit.read(result)
        for guarded in self._guards:
            guarded.check(where)
        after = self.mine
        if self.is_in_place and self.case.name not in GATHERING:
            after = self.mine.copy()
            after[self._part] = self.expected
        assert_same(self.kit.read(self.x), after, f"input of {where}")
        if self.expected is None:
            assert result is None, where
            untouched = self.kit.read(self.out)
            raw = np.ascontiguousarray(untouched).reshape(-1).view(np.uint8)
            assert (raw == POISON).all(), f"{where}: out was written"
            return
        assert not self.has_out or result is self.out, where
        assert got is not None
        assert_same(got, self.expected, where)


def run_cases(comm, kit, cases: Sequence[Case]) -> int:
    """Run cases in turn, but for dtypes that the array library lacks; return how many there are."""
    for place, case in enumerate(cases):
        if not kit.knows(case.dtype):
            continue  # CuPy before 14 has neither bfloat16 nor float8
        try:
            made = GpuCase(comm, kit, case)
            made.check(made.run())
        except Exception as error:
            raise AssertionError(f"case {place}, {case}: {error!r}") from error
    comm.check()
    return len(cases)


def is_reducible(dtype: str, op: str) -> bool:
    """Return whether NCCL reduces this dtype with this op."""
    from tests.dtypes import op_of

    from gpucoll.backends.nccl.elements import reduction
    from gpucoll.types import ReduceOp

    try:
        reduction(ReduceOp.parse(op_of(op)), dtype, "NCCL", (2, 29, 7), 2)
    except ArgumentTypeError:
        return False
    return True


REDUCIBLE = [(dtype, op) for dtype, op in ALLOWED if is_reducible(dtype, op)]
NOT_REDUCIBLE = [pair for pair in ALLOWED if pair not in REDUCIBLE]
"""What is put together: by gpucoll's kernels beside the library."""


def fits(case: Case) -> bool:
    """Return whether a case can be made."""
    if case.name == "exclusive_scan" and case.op == "avg":  # which has no identity
        return False
    return not (case.way == "group" and case.is_auto)
