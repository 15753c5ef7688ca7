"""all_gather, gather, scatter, reduce_scatter and all_to_all: counts, shapes, every dtype."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests import oracle
from tests.collective_cases import (
    COUNTED,
    COUNTS,
    MOVEMENTS,
    PLACEMENTS,
    ROOTED,
    SCATTERING,
    SINGLE_COPY_MIN_BYTES,
    SINGLE_COPY_TUNING,
    SMALL_TUNING,
    WAYS,
    Case,
    check,
    counts_around,
    draw,
)

from gpucoll.kernels.cpu.addresses import HAS_STRING_COPY
from gpucoll.transport.shared import layout

WORLD_SIZES = (1, 2, 3, 4, 7)


def op_for(name):
    return "sum" if name == "reduce_scatter" else ""


def counted(random, name, world_size, **given):
    """Return a drawn case with counts; asked for in ways that allow it."""
    is_auto = random.random() < 0.3
    ways = [
        way
        for way in WAYS
        if not is_auto or (way != "plan" and not (way == "new" and name in SCATTERING))
    ]
    return draw(
        random, name, world_size, op=op_for(name), is_auto=is_auto, way=random.choice(ways), **given
    )


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", COUNTED)
def test_counts(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    cases = [
        counted(random, name, world_size, dtype=dtype, counts=counts, count=count)
        for counts in COUNTS
        for dtype in ("int8", "float32")
        for count in (1, 25, 130, 500, 1500)
        for _ in range(2)
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("name", COUNTED)
def test_counts_around_chunks_and_lanes(ranks, name):
    world_size, chunk = 3, 4096
    lane = chunk // world_size & ~255
    random = Random(name)
    cases = [
        counted(random, name, world_size, dtype="int8", counts=counts, count=count + step)
        for counts in ("even", "one", "gaps", "steep")
        for count in (lane // 4, lane, 2 * lane, chunk, 3 * chunk)
        for step in (-1, 0, 1)
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("name", COUNTED)
def test_bits_of_every_way_with_counts(ranks, name):
    cases = [
        Case(
            "bfloat16",
            count,
            op_for(name),
            root=2 if name in ("gather", "scatter") else -1,
            placement=placement,
            in_place=in_place,
            values="any",
            collective=name,
            counts="steep",
        )
        for count in (9, 300, 3000)
        for placement in PLACEMENTS
        for in_place in (False, True)
    ]

    check(ranks, 4, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_single_copy(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    share = SINGLE_COPY_MIN_BYTES // (world_size if name in ("scatter", "all_to_all") else 1)
    cases = [
        draw(random, name, world_size, dtype="int16", count=count, row=0)
        for count in counts_around((share, 5 * share), 2)
        for _ in range(2)
    ]
    if name != "broadcast":
        cases += [
            counted(random, name, world_size, dtype="int8", counts=counts, count=count)
            for counts in COUNTS
            for count in (200, share, 3 * share)
        ]

    paths = check(ranks, world_size, cases, environment=SINGLE_COPY_TUNING)

    assert "SINGLE_COPY" in paths


KERNELS = ["string_copies=0"]
if HAS_STRING_COPY:
    KERNELS += [
        "string_copies=1",
        "nontemporal_fills=1,n_stages=5",
        "nontemporal_fills=2,n_stages=4",
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_each_copy_kernel(ranks, world_size, name, kernel):
    """Slots and stages, below and above the size from which kernels differ."""
    random, chunk = Random(f"{name} {world_size}"), 16384
    tuning = f"one_shot_bytes=8192,rooted_bytes=8192,chunk_bytes={chunk},"
    tuning += f"single_copy_min_bytes={1 << 30},{kernel}"
    shares = world_size if name in ("scatter", "all_to_all") else 1
    sizes = [size // shares for size in (2048, 8192, chunk, 5 * chunk)]
    cases = [
        draw(random, name, world_size, dtype="int8", count=count, placement="private", row=0)
        for count in counts_around([*sizes, 2048], 1)
        for _ in range(2)
    ]

    paths = check(ranks, world_size, cases, environment={"GPUCOLL_CPU_TUNING": tuning})

    assert paths == {"ONE_SHOT", "STAGED"}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["broadcast", "scatter", "all_gather", "gather"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_bound_of_its_own_for_what_comes_from_a_root(ranks, world_size, name, in_place):
    """Read straight from there on, if the root has its own result to copy; never otherwise."""
    tuning = f"{SMALL_TUNING['GPUCOLL_CPU_TUNING']},single_copy_min_bytes={1 << 20}"
    environment = {"GPUCOLL_CPU_TUNING": f"{tuning},root_copy_min_bytes=40000"}
    may_read = all(ranks.call(world_size, can_read_all))
    comes_from_root = name in ("broadcast", "scatter")
    for size, is_large in ((39_996, False), (40_008, True)):
        count = size // (world_size if name == "scatter" else 1)
        case = Case(
            "int8", count, collective=name, root=1 if name in ROOTED else -1, in_place=in_place
        )
        straight = may_read and comes_from_root and is_large and not in_place

        paths = check(ranks, world_size, [case], environment=environment)

        assert paths == {"SINGLE_COPY" if straight else "STAGED"}, (size, paths)


ANY_DTYPE = {
    "structured": np.array(
        [(1, 2.5, b"ab"), (3, 4.5, b"c")], [("a", "i4"), ("b", "f8"), ("c", "S2")]
    ),
    "datetime64": np.array(["2024-01-01", "NaT"], "datetime64[D]"),
    "str": np.array(["one", "three"]),
    "longdouble": np.arange(2, dtype=np.longdouble),
    "void": np.array([b"\0\xff", b"xy"], "V2"),
    "nothing": np.zeros(2, "V0"),
}


def move_any(comm, x):
    """Return what each movement makes of ``x`` turned by the rank, as bytes."""
    mine = np.roll(x, comm.rank)
    small = {
        "broadcast": comm.broadcast(mine, 1),
        "all_gather": comm.all_gather(mine),
        "gather": comm.gather(mine, 1),
        "scatter": comm.scatter(mine, 1),
        "all_to_all": comm.all_to_all(mine),
    }
    return {name: None if y is None else (str(y.dtype), y.tobytes()) for name, y in small.items()}


@pytest.mark.parametrize("kind", ANY_DTYPE)
def test_every_fixed_size_dtype_is_moved(ranks, kind):
    x = ANY_DTYPE[kind]
    inputs = [np.roll(x, rank) for rank in range(2)]

    replies = ranks.call(2, move_any, x)

    for rank, got in enumerate(replies):
        for name, arguments in (
            ("broadcast", (1,)),
            ("all_gather", ()),
            ("gather", (1,)),
            ("scatter", (1,)),
            ("all_to_all", ()),
        ):
            expected = getattr(oracle, name)(inputs, *arguments)[rank]
            right = None if expected is None else (str(x.dtype), expected.tobytes())
            assert got[name] == right, f"{name} of {kind} on rank {rank}"


def gather_numbers(comm):
    gathered = comm.gather(1.5 * comm.rank, 1)
    return (
        comm.all_gather(comm.rank).tolist(),
        comm.all_gather(np.array(comm.rank, "i2")).tolist(),
        comm.all_gather(np.array([[comm.rank]])).tolist(),
        None if gathered is None else gathered.tolist(),
        comm.all_gather(np.array(comm.rank), out=np.zeros(comm.world_size, int)).tolist(),
    )


def test_numbers_and_0d_arrays_are_rows(ranks):
    for rank, got in enumerate(ranks.call(3, gather_numbers)):
        rooted = [0.0, 1.5, 3.0] if rank == 1 else None
        assert got == ([0, 1, 2], [0, 1, 2], [[0], [1], [2]], rooted, [0, 1, 2])


def shapes_of_out(comm):
    """An out of any shape with the right number of elements, contiguous or not."""
    size, r = comm.world_size, comm.rank
    x = np.arange(6 * size, dtype=np.float32).reshape(2 * size, 3) + 100 * r
    calls = {
        "all_reduce": (x, (3, 2 * size), {}),
        "reduce": (x, (6 * size,), {"root": 0}),
        "scan": (x, (1, 6 * size), {}),
        "exclusive_scan": (x, (size, 6), {}),
        "reduce_scatter": (x, (6,), {}),
        "broadcast": (x, (3, 2, size), {"root": 1}),
        "all_gather": (x, (size, 2 * size, 3), {}),
        "gather": (x, (6 * size * size,), {"root": 0}),
        "scatter": (x, (3, 2), {"root": 1}),
        "all_to_all": (x, (size, 2, 3), {}),
    }
    wrong = []
    for name, (data, shape, given) in calls.items():
        inputs = [data + 100 * (rank - r) for rank in range(size)]
        right = getattr(oracle, name)(inputs, **given)[r]
        plain, strided = np.zeros(shape, "f4"), np.zeros((*shape, 2), "f4")
        for order, out in (("contiguous", plain), ("strided", strided[..., 0])):
            packed = np.repeat(data, 2, axis=1)[:, ::2]  # x is not contiguous either
            for given_x in (data, packed):
                out[...] = -1
                result = getattr(comm, name)(given_x, out=out, **given)
                expected = np.full(shape, -1) if right is None else right.reshape(shape)
                is_right = (result is out) if right is not None else (result is None)
                if not is_right or not (out == expected).all():
                    wrong.append((name, order))
        if strided[..., 1].any():
            wrong.append((name, "neighbours"))
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_out_of_any_shape_and_layout(ranks, world_size):
    assert ranks.call(world_size, shapes_of_out) == [[]] * world_size


def ways_of_large_calls(comm):
    """Return whether this rank may read others, and the way of an exclusive_scan."""
    x, peer = np.ones(1 << 20, np.uint8), 1 - comm.rank
    comm.send_recv(x, peer, peer, np.empty_like(x))
    comm.exclusive_scan(x)
    return can_read_all(comm), comm.describe().facts["last call on this rank"]


def can_read_all(comm):
    return bool(comm._group.members.status_words(comm.rank)[layout.STATUS_COPIES // 8])


def test_without_single_copies_no_call_reads_another_process(ranks):
    without = {"GPUCOLL_CPU_TUNING": f"single_copy_min_bytes={layout.NEVER}"}
    for may_read, way in ranks.call(2, ways_of_large_calls, environment=without):
        assert not may_read
        assert "staged" in way
