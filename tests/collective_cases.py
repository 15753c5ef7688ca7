"""One body for the cases of array collectives: run on each rank, compared with the oracle there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from tests import oracle
from tests.dtypes import any_values, assert_same, bits, dtype_of, op_of, small_values
from tests.guarded import POISON, Guarded

_SMALL = "one_shot_bytes=1024,rooted_bytes=1024,chunk_bytes=4096,symmetric_min_bytes=256"
SMALL_TUNING = {"GPUCOLL_CPU_TUNING": _SMALL}
"""Thresholds so low that small arrays take every path."""
SINGLE_COPY_MIN_BYTES = 2048
SINGLE_COPY_TUNING = {
    "GPUCOLL_CPU_TUNING": f"{_SMALL},single_copy_min_bytes={SINGLE_COPY_MIN_BYTES},"
    f"single_copy_max_bytes={1 << 30},gather_copy_max_bytes={1 << 30}"
}
"""The same, and movements read private arrays where they lie."""
PLACEMENTS = ("private", "symmetric", "mixed")
WAYS = ("out", "new", "asynchronous", "plan")
"""With `out`, into a new array, with ``async_op``, through a plan."""

SCANS = ("scan", "exclusive_scan")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", *SCANS)
MOVEMENTS = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
COLLECTIVES = (*REDUCTIONS, *MOVEMENTS)
ROOTED = ("reduce", "broadcast", "gather", "scatter")
GATHERING, SCATTERING = ("all_gather", "gather"), ("scatter", "reduce_scatter")
SPREAD = (*SCATTERING, "all_to_all")
"""Those whose input is one block for each rank."""
COUNTED = (*GATHERING, *SPREAD)
SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather")

COUNTS: dict[str, Callable[[int, int, int], list[int]]] = {
    "even": lambda count, size, turn: [count] * size,
    "none": lambda count, size, turn: [0] * size,
    "one": lambda count, size, turn: [count * size * (r == turn % size) for r in range(size)],
    "gaps": lambda count, size, turn: [count * ((r + turn) % 2) for r in range(size)],
    "steep": lambda count, size, turn: [4 * count >> 2 * ((r + turn) % size) for r in range(size)],
}
"""Rows per rank: from a count, the number of ranks and what to begin with."""


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank.

    `count` is the rows of the input, or of one of its blocks where it has one for each rank; a row
    is `row` elements, or one of an array without a second dimension.
    """

    dtype: str
    count: int
    op: str = ""
    root: int = -1
    placement: str = "private"
    in_place: bool = False
    offset: int = 0
    seed: int = 0
    values: str = "small"
    collective: str = ""
    """Without one, all_reduce (with an `op`) or broadcast."""
    counts: str = ""
    """A name of `COUNTS`, for blocks of different sizes."""
    is_auto: bool = False
    """Whether ranks ask each other for the counts."""
    row: int = 0
    way: str = "out"

    @property
    def name(self) -> str:
        """The collective's name."""
        return self.collective or ("all_reduce" if self.op else "broadcast")

    def rows(self, world_size: int, sender: int = 0) -> list[int]:
        """Return the rows of each block; in an all_to_all, of those that a rank sends."""
        if not self.counts:
            return [self.count] * world_size
        turn = self.seed + (sender if self.name == "all_to_all" else 0)
        return COUNTS[self.counts](self.count, world_size, turn)

    def received(self, rank: int, world_size: int) -> list[int]:
        """Return the rows of each block that a rank receives in an all_to_all."""
        return [self.rows(world_size, sender)[rank] for sender in range(world_size)]

    def input_of(self, rank: int, world_size: int) -> np.ndarray:
        """Return what this rank brings: known to all ranks."""
        make = small_values if self.values == "small" else any_values
        rows = self.rows(world_size, rank)
        length = sum(rows) if self.name in SPREAD else self.count
        if self.counts and self.name in GATHERING:
            length = rows[rank]
        flat = make(self.dtype, length * (self.row or 1), 1000 * self.seed + rank)
        return flat.reshape(length, self.row) if self.row else flat

    def expected(self, world_size: int) -> list[np.ndarray | None]:
        """Return the results, by rank."""
        given = self._op_and_root()
        if self.counts and self.name in SCATTERING:
            given["counts"] = self.rows(world_size)
        if self.counts and self.name == "all_to_all":
            given["send_counts"] = [self.rows(world_size, rank) for rank in range(world_size)]
        inputs = [self.input_of(rank, world_size) for rank in range(world_size)]
        results: list[np.ndarray | None] = getattr(oracle, self.name)(inputs, **given)
        return results

    def arguments(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return what a rank passes beside x and `out`."""
        given = self._op_and_root()
        if self.counts and self.name == "all_to_all":
            given["send_counts"] = self.rows(world_size, rank)
            given["recv_counts"] = "auto" if self.is_auto else self.received(rank, world_size)
        elif self.counts:
            given["counts"] = "auto" if self.is_auto else self.rows(world_size)
        return given

    def _op_and_root(self) -> dict[str, Any]:
        given: dict[str, Any] = {"op": op_of(self.op)} if self.op else {}
        return given if self.root < 0 else {**given, "root": self.root}

    def is_shared(self, rank: int, which: int) -> bool:
        """Return whether a rank's input (0) or output (1) lies in memory of `comm.empty`."""
        if self.placement == "mixed":
            return (rank + which + self.seed) % 2 == 0
        return self.placement == "symmetric"


def put(comm, case: Case, which: int, shape: tuple[int, ...]) -> Guarded:
    """Return guarded memory for this rank's input (0) or output (1)."""
    if not case.is_shared(comm.rank, which):
        return Guarded(shape, dtype_of(case.dtype), case.offset)
    # Another offset in each rank's arena: nothing may count on equal ones.
    offset = case.offset + dtype_of(case.dtype).itemsize * comm.rank

    def allocate(size_bytes: int) -> np.ndarray:
        return comm.empty(size_bytes, np.uint8)

    return Guarded(shape, dtype_of(case.dtype), offset, allocate)


class Call:
    """A case on one rank: its arrays, the call, and what must be true of them afterwards."""

    def __init__(self, comm, case: Case) -> None:
        self.comm, self.case = comm, case
        rank, world_size = comm.rank, comm.world_size
        self.mine = case.input_of(rank, world_size)
        self.expected = case.expected(world_size)[rank]
        self._start = (
            sum(case.rows(world_size)[:rank]) if case.name in (*GATHERING, *SCATTERING) else 0
        )
        self.has_out = case.way != "new"
        self.is_in_place = case.in_place and self.has_out and self._can_be_in_place()
        shape = (self.mine if self.expected is None else self.expected).shape
        if self.is_in_place:
            self._place(max(self.mine.shape, shape))
        else:
            self._guards = [put(comm, case, 0, self.mine.shape), put(comm, case, 1, shape)]
            self.x, self.out = (guarded.array for guarded in self._guards)
        self.fill()

    def _can_be_in_place(self) -> bool:
        case, is_root = self.case, self.case.root in (-1, self.comm.rank)
        if self.expected is None or (case.name == "scatter" and not is_root):
            return False
        if case.name != "all_to_all":
            return True
        rank, world_size = self.comm.rank, self.comm.world_size
        return case.rows(world_size, rank) == case.received(rank, world_size)

    def _place(self, shape: tuple[int, ...]) -> None:
        """Make one array of which x or `out` is this rank's block."""
        guarded = put(self.comm, self.case, 0, shape)
        self._guards = [guarded]
        assert self.expected is not None
        part = guarded.array[self._start :][: min(len(self.mine), len(self.expected))]
        gathers = self.case.name in GATHERING
        self.x, self.out = (part, guarded.array) if gathers else (guarded.array, part)

    def fill(self) -> None:
        """Poison the output and bring the input in."""
        for guarded in self._guards:
            guarded.poison()
        self.x[...] = self.mine

    def make(self, prefix: str = "", **options: Any) -> Any:
        """Call the method, or one of this prefix, and return what it returns."""
        case, rank = self.case, self.comm.rank
        given = case.arguments(rank, self.comm.world_size)
        if self.has_out:
            given["out"] = self.out
        is_unknown = case.name == "scatter" and rank != case.root and self.has_out
        x = None if is_unknown and case.seed % 2 else self.x
        return getattr(self.comm, prefix + case.name)(x, **given, **options)

    def run(self) -> Any:
        """Make the call in the case's way; return the result."""
        if self.case.way == "plan":
            return self.make("plan_")()
        if self.case.way == "asynchronous":
            return self.make(async_op=True).wait()
        return self.make()

    def check(self, result: Any, where: str = "") -> bytes:
        """Compare with the oracle, look at input and neighbours; return the result's bits."""
        path = path_of(self.comm)
        where += f"rank {self.comm.rank} of {self.comm.world_size}, {self.case}, path {path}"
        for guarded in self._guards:
            guarded.check(where)
        assert_same(self.x, self._input_afterwards(), f"input of {where}")
        if self.expected is None:
            assert result is None, where
            assert (self.out.view(np.uint8) == POISON).all(), f"{where}: out was written"
            return b""
        assert not self.has_out or result is self.out, where
        assert_same(result, self.expected, where)
        return bits(result).tobytes()

    def _input_afterwards(self) -> np.ndarray:
        """Return what x must be: as it was, but for the part that is `out`."""
        if not self.is_in_place or self.case.name in GATHERING:
            return self.mine
        assert self.expected is not None
        after = self.mine.copy()
        after[self._start :][: len(self.expected)] = self.expected
        return after


def path_of(comm) -> str:
    """Return the name of the way that the last call took; between hosts there is none."""
    last_path = getattr(comm._backend, "last_path", None)
    return "between hosts" if last_path is None else last_path().name


def run_case(comm, case: Case) -> bytes:
    """Make one call and check it; return the result's bits."""
    call = Call(comm, case)
    return call.check(call.run())


def run_cases(comm, cases: Sequence[Case]) -> tuple[str, set[str]]:
    """Run cases in turn; return a digest of all results, and the paths that were taken."""
    digest, paths = hashlib.sha256(), set()
    for place, case in enumerate(cases):
        try:
            digest.update(run_case(comm, case))
        except AssertionError as error:
            raise AssertionError(f"case {place}: {error}") from error
        paths.add(path_of(comm))
    return digest.hexdigest(), paths


def check(ranks, world_size: int | str, cases: Sequence[Case], **options: Any) -> set[str]:
    """Run cases on so many ranks, or on ranks placed so; all must be right. Return the paths."""
    replies = ranks.call(world_size, run_cases, cases, **options)
    if {case.name for case in cases} <= set(SAME_EVERYWHERE):
        assert len({digest for digest, _ in replies}) == 1, "the ranks have different bits"
    return set.union(*(paths for _, paths in replies))


def draw(random: Random, name: str, world_size: int, **given: Any) -> Case:
    """Return a case with a random root, placement and so on, but for what is given."""
    drawn = {
        "root": random.randrange(world_size) if name in ROOTED else -1,
        "placement": random.choice(("private", "private", "symmetric", "mixed")),
        "in_place": random.random() < 0.3,
        "offset": random.choice((0, 0, 1, 4)),
        "seed": random.randrange(1000),
        "row": random.choice((0, 0, 3)),
        "way": random.choice(("out", "out", *WAYS)),
    }
    return Case(collective=name, **{**drawn, **given})


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
