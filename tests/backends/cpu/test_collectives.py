"""all_reduce and broadcast against the oracle; and every collective as its number goes on."""

from __future__ import annotations

import ctypes
import itertools
from random import Random

import numpy as np
import pytest
from tests.collective_cases import (
    COLLECTIVES,
    COUNTED,
    PLACEMENTS,
    REDUCTIONS,
    SAME_EVERYWHERE,
    SMALL_TUNING,
    Case,
    check,
    counts_around,
    draw,
    run_cases,
    thresholds,
)
from tests.dtypes import covering, dtype_of

from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context

WORLD_SIZES = (1, 2, 3, 4, 7)
SMALL_THRESHOLDS = (32, 256, 1024, 4096, 8192, 12288)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sizes_around_the_real_thresholds(ranks, world_size, placement):
    sizes = ranks.call(world_size, thresholds)[0]
    counts = counts_around(sizes, 4)
    cases = [
        Case("float32", count, op="sum", placement=placement, in_place=bool(place % 2), seed=place)
        for place, count in enumerate(counts)
    ]

    paths = check(ranks, world_size, cases)

    ways = {"private": {"ONE_SHOT", "STAGED"}, "symmetric": {"ONE_SHOT", "SYMMETRIC"}}
    assert world_size == 1 or paths >= ways.get(placement, {"STAGED"})


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_sizes_around_small_thresholds(ranks, world_size, in_place):
    cases = [
        Case(dtype, count, op="sum", placement=placement, in_place=in_place, seed=count % 7)
        for dtype in ("int8", "bfloat16", "complex128")
        for count in counts_around(SMALL_THRESHOLDS, dtype_of(dtype).itemsize)
        for placement in PLACEMENTS
    ]

    paths = check(ranks, world_size, cases, environment=SMALL_TUNING)

    assert world_size == 1 or paths == {"ONE_SHOT", "STAGED", "SYMMETRIC"}


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dtypes_and_operations(ranks, world_size):
    counts = (3, 70, 700, 2500, 10_001)
    turns = itertools.cycle(itertools.product(PLACEMENTS, (False, True), (0, 1)))
    cases = [
        Case(dtype, count, op, placement=placement, in_place=in_place, offset=offset, seed=place)
        for place, ((dtype, op), (placement, in_place, offset)) in enumerate(
            zip(covering(), turns, strict=False)
        )
        for count in counts[place % 3 :: 2]
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_bit_pattern_is_reduced_as_the_reference_says(ranks, world_size):
    cases = [
        Case(dtype, count, op, placement=placement, seed=count, values="any")
        for dtype, op in (
            ("float16", "sum"),
            ("bfloat16", "avg"),
            ("float8_e4m3fn", "max"),
            ("float32", "min"),
            ("float64", "prod"),
            ("int64", "avg"),
            ("complex64", "prod"),
        )
        for count in (100, 5000)
        for placement in PLACEMENTS
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["int16", "float32", "float64", "complex128"])
def test_misaligned_to_every_element_size(ranks, world_size, dtype):
    cases = [
        Case(dtype, count, op="sum", placement=placement, offset=offset, seed=offset)
        for offset in range(1, 16, 2)
        for count in (5, 600, 3000)
        for placement in ("private", "symmetric")
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


# --- broadcast ----------------------------------------------------------------------------------


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_broadcast(ranks, world_size, in_place):
    turns = itertools.cycle(PLACEMENTS)
    cases = [
        Case(dtype, count, root=root, placement=next(turns), in_place=in_place, seed=count % 5)
        for dtype in ("bool", "float8_e5m2", "int32", "complex128")
        for count in counts_around(SMALL_THRESHOLDS, dtype_of(dtype).itemsize)
        for root in {0, count % world_size, world_size - 1}
    ]

    paths = check(ranks, world_size, cases, environment=SMALL_TUNING)

    assert world_size == 1 or paths == {"ONE_SHOT", "STAGED", "SYMMETRIC"}


@pytest.mark.parametrize("world_size", [2, 4])
def test_broadcast_sizes_around_the_real_thresholds(ranks, world_size):
    counts = counts_around(ranks.call(world_size, thresholds)[0], 8)
    cases = [
        Case("float64", count, root=count % world_size, placement=placement)
        for count in counts
        for placement in PLACEMENTS
    ]

    check(ranks, world_size, cases)


def broadcast_any(comm, x):
    template = x if comm.rank == 1 else np.zeros_like(x)
    return comm.broadcast(template, root=1)


@pytest.mark.parametrize(
    "x",
    [
        np.array([(1, 2.5, b"ab"), (3, 4.5, b"c")], [("a", "i4"), ("b", "f8"), ("c", "S2")]),
        np.array(["2024-01-01", "NaT"], "datetime64[D]"),
        np.array(["one", "three"]),
        np.arange(6, dtype=np.longdouble).reshape(2, 3),
        np.array([b"\0\xff", b"xy"], "V2"),
    ],
    ids=lambda x: x.dtype.name,
)
def test_broadcast_moves_every_fixed_size_dtype(ranks, x):
    for result in ranks.call(3, broadcast_any, x):
        assert result.dtype == x.dtype
        assert result.tobytes() == x.tobytes()


# --- the same bits ------------------------------------------------------------------------------


def inexact_cases(placements):
    return [
        Case(dtype, count, op, placement=placement, in_place=in_place, seed=3, values="any")
        for dtype, op in (("float32", "sum"), ("float16", "sum"), ("float64", "prod"))
        for count in (9, 900, 20_001)
        for placement in placements
        for in_place in (False, True)
    ]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_bits_depend_on_neither_placement_nor_tuning(ranks, world_size):
    digests = set()
    for placement, tuning in itertools.product(
        PLACEMENTS,
        (
            "one_shot_bytes=64,chunk_bytes=4096",
            "one_shot_bytes=1048576,chunk_bytes=4096,symmetric_min_bytes=1048576",
            "chunk_bytes=65536,symmetric_min_bytes=1,prefetch_bytes=0",
            "chunk_bytes=12288,prefetch_bytes=4096",
        ),
    ):
        environment = {"GPUCOLL_CPU_TUNING": tuning}
        replies = ranks.call(
            world_size, run_cases, inexact_cases([placement]), environment=environment
        )
        digests |= {digest for digest, _ in replies}

    assert len(digests) == 1


# --- sequence numbers ---------------------------------------------------------------------------

JUST_BEFORE_WRAPPING = 2**31 - 2 - layout.RING


def mixture(world_size, names, counts, placements=PLACEMENTS):
    """Return a few calls of each of these, in these placements and in a mixed order."""
    random = Random(str(names))
    cases = [
        draw(
            random,
            name,
            world_size,
            dtype="float32",
            op="sum" if name in REDUCTIONS else "",
            count=count,
            placement=placement,
            counts="steep" if name in COUNTED and count == 200 else "",
        )
        for name in names
        for count in counts
        for placement in placements
    ]
    random.shuffle(cases)
    return cases


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [*COLLECTIVES, "one rank's broadcasts"])
def test_sequence_numbers_wrap(ranks, world_size, first):
    """Before the mixture, `first` alone: the numbers wrap among its calls or just behind."""
    if first == "one rank's broadcasts":
        cases = [Case("float32", 9000, root=0)] * 4
    else:
        cases = 2 * mixture(world_size, [first], (1, 200, 3000))
    cases += mixture(world_size, COLLECTIVES, (1, 3000))
    tuning = f"{SMALL_TUNING['GPUCOLL_CPU_TUNING']},initial_sequence={JUST_BEFORE_WRAPPING}"

    check(ranks, world_size, cases, environment={"GPUCOLL_CPU_TUNING": tuning})


def start_from(comm, sequence, cases):
    """Go on as a communicator would that has made calls up to this sequence number."""
    group, elsewhere = comm._group, comm.duplicate()
    members = group.members
    elsewhere.barrier()  # nobody is in a call of `comm` any more
    base = members.segment.address
    words = [base + start + group.rank * layout.LINE_BYTES for start in lines_of(members.layout)]
    words += [base + members.layout.header(group.rank, place) for place in range(layout.RING)]
    for address in words:
        ctypes.c_int32.from_address(address).value = sequence
    for field in (Context.sequence, Context.verified, Context.chunk):
        group.context[field] = sequence
    elsewhere.barrier()
    elsewhere.close()
    return run_cases(comm, cases)


def lines_of(places):
    return places.status_lines, places.filled, places.read


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("start", [-9, -2, 2**31 - 9, 2**31 - 2, -(2**31)])
@pytest.mark.parametrize("names", [("all_reduce", "broadcast"), COLLECTIVES], ids=["two", "all"])
def test_sequence_numbers_of_any_size(ranks, start, names):
    cases = mixture(3, names, (1, 200, 9000))

    ranks.call(3, start_from, start, cases, environment=SMALL_TUNING)


# --- many ranks ---------------------------------------------------------------------------------


@pytest.mark.soak
def test_64_ranks(rank_server):
    # Few: each rank works out what all of them bring.
    cases = mixture(64, COLLECTIVES, (1, 200), ["symmetric"])
    cases += mixture(64, SAME_EVERYWHERE, (20_000,), ["private"])
    rank_server.compile([("float32", "sum")])
    with rank_server.fork(64) as pool:
        pool.call(run_cases, cases, limit_s=200)
