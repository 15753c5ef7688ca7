"""One body for the cases of array collectives: run on each rank, compared with the oracle there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests import oracle
from tests.dtypes import any_values, assert_same, bits, dtype_of, op_of, small_values
from tests.guarded import Guarded

SMALL_TUNING = {
    "GPUCOLL_CPU_TUNING": "one_shot_bytes=1024,rooted_bytes=1024,chunk_bytes=4096,"
    "symmetric_min_bytes=256"
}
"""Thresholds so low that small arrays take every path."""
PLACEMENTS = ("private", "symmetric", "mixed")


@dataclass(frozen=True)
class Case:
    """One call of all_reduce (``op``) or broadcast (``root``), the same on every rank."""

    dtype: str
    count: int
    op: str = ""
    root: int = -1
    placement: str = "private"
    in_place: bool = False
    offset: int = 0
    seed: int = 0
    values: str = "small"

    def input_of(self, rank: int) -> np.ndarray:
        """Return what this rank brings: known to all ranks."""
        make = small_values if self.values == "small" else any_values
        return make(self.dtype, self.count, 1000 * self.seed + rank)

    def expected(self, world_size: int) -> np.ndarray:
        """Return the result on every rank."""
        inputs = [self.input_of(rank) for rank in range(world_size)]
        if self.op:
            return oracle.all_reduce(inputs, op_of(self.op))[0]
        return oracle.broadcast(inputs, self.root)[0]

    def is_shared(self, rank: int, which: int) -> bool:
        """Return whether a rank's input (0) or output (1) lies in memory of `comm.empty`."""
        if self.placement == "mixed":
            return (rank + which + self.seed) % 2 == 0
        return self.placement == "symmetric"


def put(comm, case: Case, which: int) -> Guarded:
    """Return guarded memory for this rank's input (0) or output (1)."""
    if not case.is_shared(comm.rank, which):
        return Guarded(case.count, dtype_of(case.dtype), case.offset)
    # Another offset in each rank's arena: nothing may count on equal ones.
    offset = case.offset + dtype_of(case.dtype).itemsize * comm.rank

    def allocate(size_bytes: int) -> np.ndarray:
        return comm.empty(size_bytes, np.uint8)

    return Guarded(case.count, dtype_of(case.dtype), offset, allocate)


def run_case(comm, case: Case) -> bytes:
    """Make one call, compare with the oracle, look at the neighbours; return the result's bits."""
    x = put(comm, case, 0)
    x.array[...] = mine = case.input_of(comm.rank)
    out = x if case.in_place else put(comm, case, 1)
    if case.op:
        result = comm.all_reduce(x.array, op_of(case.op), out=out.array)
    else:
        result = comm.broadcast(x.array, case.root, out=out.array)
    where = f"rank {comm.rank} of {comm.world_size}, {case}, path {comm._backend.last_path().name}"
    assert result is out.array, where
    assert_same(out.array, case.expected(comm.world_size), where)
    for guarded in (x, out):
        guarded.check(where)
    if not case.in_place:
        assert_same(x.array, mine, f"input of {where}")
    return bits(out.array).tobytes()


def run_cases(comm, cases: Sequence[Case]) -> tuple[str, set[str]]:
    """Run cases in turn; return a digest of all results, and the paths that were taken."""
    digest, paths = hashlib.sha256(), set()
    for place, case in enumerate(cases):
        try:
            digest.update(run_case(comm, case))
        except AssertionError as error:
            raise AssertionError(f"case {place}: {error}") from error
        paths.add(comm._backend.last_path().name)
    return digest.hexdigest(), paths


def thresholds(comm) -> list[int]:
    """Return the sizes, in bytes, at which the CPU backend changes its way."""
    tuning = comm._group.members.tuning
    chunk = tuning.chunk_bytes
    return [32, tuning.symmetric_min_bytes, tuning.one_shot_bytes, chunk, 2 * chunk, 3 * chunk]


def counts_around(sizes_bytes: Sequence[int], item_bytes: int) -> list[int]:
    """Return counts of elements at, just below and just above these sizes."""
    counts = {0, 1, 2, 3}
    for size in sizes_bytes:
        counts |= {max(size // item_bytes + step, 0) for step in (-1, 0, 1)}
    return sorted(counts)
