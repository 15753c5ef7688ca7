"""Every collective on GPU arrays against the oracle: dtypes, ops, counts, roots, ways, in place."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.calls.gpu.cases import NOT_REDUCIBLE, REDUCIBLE, WAYS, fits, run_cases
from tests.calls.gpu.conftest import EVERYWHERE, REAL, REPLAYED, vendors_in_turn
from tests.collective_cases import COUNTED, COUNTS, MOVEMENTS, REDUCTIONS, ROOTED, SCANS, Case
from tests.dtypes import ALLOWED

from gpucoll import ReduceOp
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import DTYPES


def cases_of(name, world_size, seed, n_cases=24):
    """Return drawn cases of one collective that hold every dtype and way."""
    random = Random(f"{name}-{world_size}-{seed}")
    pairs = [pair for pair in ALLOWED if (name, pair[1]) != ("exclusive_scan", "avg")]
    if world_size == 3 or name == "scan":  # a third is not exact
        pairs = [pair for pair in pairs if pair[1] != "avg" or pair[0].startswith(("int", "uint"))]
    random.shuffle(pairs)
    dtypes = random.sample(DTYPES, len(DTYPES))
    made = []
    for place in range(n_cases):
        dtype, op = pairs[place % len(pairs)]
        if name in MOVEMENTS:
            dtype, op = dtypes[place % len(dtypes)], ""
        counts = random.choice(["", "", *COUNTS]) if name in COUNTED else ""
        case = Case(
            dtype,
            random.choice((0, 1, 2, 3, 5, 64, 257, 1000)),
            op,
            root=random.randrange(world_size) if name in ROOTED else -1,
            in_place=random.random() < 0.3,
            offset=random.choice((0, 0, 16)),
            seed=random.randrange(1000),
            collective=name,
            counts=counts,
            is_auto=bool(counts) and name != "scatter" and random.random() < 0.2,
            row=random.choice((0, 0, 3)),
            way=WAYS[place % len(WAYS)],
        )
        if case.is_auto and name == "reduce_scatter" and case.way == "new":
            continue
        if case.is_auto and case.way == "plan":
            continue
        if fits(case):
            made.append(case)
    return made


@pytest.mark.soak(quick=1)
@EVERYWHERE
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_drawn_cases(gpus, world_size):
    size = gpus.world(world_size)
    cases = [
        case for name in (*REDUCTIONS, *MOVEMENTS) for case in cases_of(name, size, world_size)
    ]
    assert gpus.call(world_size, run_cases, cases) == [len(cases)] * size


@REPLAYED
def test_every_dtype_and_op_that_the_library_reduces(gpus):
    cases = [
        Case(dtype, 65, op, seed=place, collective="all_reduce", in_place=place % 2 == 0)
        for place, (dtype, op) in enumerate(REDUCIBLE)
    ]
    gpus.call(2, run_cases, cases)
    assert {dtype for dtype, _ in REDUCIBLE} == {*DTYPES} - {"int16", "uint16"}


@pytest.mark.soak(quick=1)
@vendors_in_turn("world_size", [1, 2, 3], REAL)
def test_what_the_library_cannot_reduce_goes_by_kernels(gpus, world_size):
    cases = [
        Case(dtype, (65, 6, 2)[place % 3], op, root, seed=place, collective=name)
        for name in REDUCTIONS
        for place, (dtype, op) in enumerate(NOT_REDUCIBLE)
        if (name, op) != ("exclusive_scan", "avg")
        for root in [place % gpus.world(world_size) if name in ROOTED else -1]
    ]
    assert {"int16", "uint16", "complex64", "float32"} < {case.dtype for case in cases}
    gpus.call(world_size, run_cases, cases)


def reduce_in_pieces(comm, kit, cases):
    from gpucoll.backends.gpu import rank_order

    rank_order.SCRATCH_BYTES = 1000
    try:
        return run_cases(comm, kit, cases)
    finally:
        rank_order.SCRATCH_BYTES = 64 << 20


@pytest.mark.soak(quick=1)
@vendors_in_turn("world_size", [2, 3], REAL)
def test_kernels_reduce_in_pieces(gpus, world_size):
    cases = [
        Case(dtype, count, op, root, seed=7, collective=name, in_place=in_place, counts=counts)
        for dtype, op, most in (
            *(("int16", "sum", 1001), ("uint8", "bxor", 1001), ("complex128", "prod", 211)),
        )
        for name in REDUCTIONS
        for count in (1, 100, most)
        for in_place in (False, True)
        for root in [gpus.world(world_size) - 1 if name in ROOTED else -1]
        for counts in (["", "steep"] if name == "reduce_scatter" else [""])
    ]
    assert gpus.call(world_size, reduce_in_pieces, cases) == [len(cases)] * gpus.world(world_size)


def scan_averages(comm, kit):
    """Each rank's average has another divisor; exclusive ones have none on rank 0."""
    values = 6.0 * np.arange(4, dtype=np.float32)
    x = kit.seen_as(kit.bytes_of(values.view(np.uint8) + 0), (4,), "float32")
    kit.write(x, values + comm.rank)
    assert kit.read(comm.scan(x, "avg")).tolist() == (values + comm.rank / 2).tolist()
    with pytest.raises(ArgumentTypeError, match="avg has no identity"):
        comm.exclusive_scan(x, "avg")
    comm.check()


@REPLAYED
def test_scans_of_averages(gpus):
    gpus.call(gpus.world(2), scan_averages)


def give_lists_of_blocks(comm, kit):
    x = kit.bytes_of(np.ones(4, np.uint8))
    blocks = [kit.bytes_of(np.zeros(4, np.uint8)) for _ in range(comm.world_size)]
    calls = (
        lambda: comm.all_gather(x, out=blocks),
        lambda: comm.gather(x, out=blocks),
        lambda: comm.reduce_scatter(blocks),
        lambda: comm.scatter(blocks),
        lambda: comm.all_to_all(blocks, out=blocks),
    )
    for call in calls:
        with pytest.raises(ArgumentTypeError, match="lists of blocks are for arrays in host mem"):
            call()
    return kit.read(comm.all_reduce(x)).tolist()


@REPLAYED
def test_lists_of_blocks_are_refused(gpus):
    size = gpus.world(2)
    assert gpus.call(2, give_lists_of_blocks) == [[size] * 4] * size


def reduce_float8(comm, kit):
    values = np.array([1, -2, 0.5, 448], "float8_e4m3fn")
    x = kit.seen_as(kit.bytes_of(values.view(np.uint8)), (4,), "float8_e4m3fn")
    comm.all_gather(x)  # a reduction would be known from then on: a GPU does not grow older
    device = comm._gpu._connected.device
    calls = lambda: comm._gpu._connected.issuer.calls.sequence  # noqa: E731
    device.attribute = {"compute_capability_major": 8, "multiprocessor_count": 2}.get
    try:
        before = calls()
        largest = kit.read(comm.all_reduce(x, "max"))
        assert calls() == before + 1
    finally:
        del device.attribute
    comm.check()
    assert largest.tobytes() == values.tobytes()


@pytest.mark.parametrize("gpus", ["nccl", REAL[1]], indirect=True)
def test_float8_on_gpus_before_hopper_goes_by_kernels(gpus):
    gpus.call(2, reduce_float8)


def reduce_float8_alone(comm, kit):
    """NCCL has the kernel that one rank would need, and an oversight that keeps it from it."""
    values = np.array([1, -2, 0.5, 448], "float8_e4m3fn")
    x = kit.seen_as(kit.bytes_of(values.view(np.uint8)), (4,), "float8_e4m3fn")
    averages = kit.read(comm.all_reduce(x, "avg"))
    halves = kit.read(comm.all_reduce(x, ReduceOp.scaled_sum(0.5)))
    comm.check()
    assert averages.tobytes() == values.tobytes()
    assert halves.tolist() == [0.5, -1, 0.25, 224]


@pytest.mark.parametrize("gpus", ["nccl", "rccl", *REAL[1:]], indirect=True)
def test_float8_of_one_rank(gpus):
    gpus.call(1, reduce_float8_alone)


def scan_in_pieces(comm, kit):
    from gpucoll.backends.nccl import collectives

    collectives.SCAN_SCRATCH_BYTES = 1000
    try:
        cases = [
            Case(dtype, 1001, op, seed=7, collective=name, in_place=in_place)
            for dtype, op in (("float64", "sum"), ("int8", "max"), ("bool", "land"))
            for name in SCANS
            for in_place in (False, True)
        ]
        return run_cases(comm, kit, cases)
    finally:
        collectives.SCAN_SCRATCH_BYTES = 64 << 20


@EVERYWHERE
def test_scans_in_pieces(gpus):
    gpus.call(3, scan_in_pieces)


def scale_by_many_factors(comm, kit):
    """More factors in one group than a communicator keeps ops for."""
    factors = [float(number) for number in range(1, 71)]
    x = kit.seen_as(kit.bytes_of(np.ones(4, np.float32).view(np.uint8)), (4,), "float32")
    with comm.group():
        outs = [comm.all_reduce(x, ReduceOp.scaled_sum(factor)) for factor in factors]
    comm.check()
    assert len(comm._gpu._connected.backend.connection._operations) < len(factors)
    found = [float(kit.read(out)[-1]) for out in outs]
    assert found == [comm.world_size * factor for factor in factors]


@EVERYWHERE
def test_many_factors_in_one_group(gpus):
    gpus.call(2, scale_by_many_factors)
