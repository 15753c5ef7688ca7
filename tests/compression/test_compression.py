"""Compressed all_reduce: the oracle's bits on every rank, the bounds, error feedback, arrays."""

from __future__ import annotations

import hashlib

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests import compression_oracle as oracle
from tests.dtypes import assert_same, bits
from tests.guarded import Guarded

from gpucoll import Compression
from gpucoll.types import COMPRESSIONS

BLOCKS = ("int8_block", "float8_block")
COUNTS = (0, 1, 255, 256, 257, 512, 2 * 256 * 7, 5000, 20_003)


def inputs_of(world_size: int, count: int, kind: str = "normal", seed: int = 0) -> list[np.ndarray]:
    """Return every rank's input: known to all."""
    made = []
    for rank in range(world_size):
        generator = np.random.default_rng([seed, rank])
        x = generator.standard_normal(count)
        if kind == "wide":
            x *= 2.0 ** generator.uniform(-60, 60, count)
        elif kind == "outliers":
            x[:: 100 + rank] *= 1000
        elif kind == "cancelling":
            x = x / 100 + np.random.default_rng(seed).standard_normal(count) * (-1) ** rank
        elif kind == "bits":
            x = generator.integers(0, 2**32, count, np.uint32).view(np.float32)
        made.append(x.astype(np.float32))
    return made


def parsed(name: str, seed: int | None) -> str | Compression:
    return name if seed is None else Compression(name, seed)


# --- values -------------------------------------------------------------------------------------


def reduce_all(comm, name, seed, op, count, kind):
    """Compare with the oracle's bits: a new array, in place, with `out`, queued, with residuals."""
    inputs = inputs_of(comm.world_size, count, kind)
    x = inputs[comm.rank]
    expected, left = oracle.all_reduce(inputs, op, name, seed)
    how = parsed(name, seed)
    where = f"{name} {seed=} {op} {count=} {kind}"

    source = Guarded(count, np.float32, 4 * (count % 3))
    source.array[...] = x
    assert_same(comm.all_reduce(source.array, op, compression=how), expected, where)
    assert_same(source.array, x, where)
    out = Guarded(count, np.float32, 3)
    assert comm.all_reduce(x, op, out=out.array, compression=how) is out.array
    assert_same(out.array, expected, where)
    work = comm.all_reduce(x, op, compression=how, async_op=True)
    assert_same(work.wait(), expected, where)
    residual = Guarded(count, np.float32, 4)
    residual.array[...] = 0
    y = comm.all_reduce(
        source.array, op, out=source.array, compression=how, residual=residual.array
    )
    assert y is source.array
    assert_same(y, expected, where)
    assert_same(residual.array, left[comm.rank], where)
    for guarded in (source, out, residual):
        guarded.check(where)
    return bits(y).tobytes()


def reduce_all_counts(comm, name):
    digest = hashlib.sha256()
    for turn, count in enumerate(COUNTS):
        for seed in (None, 7 + turn) if name in BLOCKS and turn % 2 else (None,):
            op, kind = ("sum", "avg")[turn % 2], ("normal", "wide", "bits")[turn % 3]
            digest.update(reduce_all(comm, name, seed, op, count, kind))
    return digest.digest()


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_bits_are_the_oracles(ranks, world_size, name):
    got = ranks.call(world_size, reduce_all_counts, name)

    assert len(set(got)) == 1  # the same bits on every rank


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("kind", ["normal", "wide", "outliers", "cancelling"])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_errors_stay_within_the_bound(name, kind):
    """Of the oracle, whose bits ranks have; the bound is nowhere more than 50 times too wide."""
    for world_size in (1, 2, 3, 8):
        for op, seed in (("sum", None), ("avg", None), ("sum", 3)):
            if seed is not None and name not in BLOCKS:
                continue
            inputs = inputs_of(world_size, 20_000, kind)
            if name == "float16":
                inputs = [np.clip(x, -8000, 8000) for x in inputs]  # what it can hold
            got, _ = oracle.all_reduce(inputs, op, name, seed)
            exact = np.sum(inputs, axis=0, dtype=np.float64)
            exact = exact / world_size if op == "avg" else exact
            allowed = oracle.bound(inputs, op, name, seed is not None)
            reached = np.abs(got - exact) / allowed
            assert 0.02 < reached.max() <= 1, f"{world_size=} {op} {seed=}"


def test_the_greatest_error_of_one_element_comes_near_the_bound():
    """Half a step lost twice: what the bound is made of does occur."""
    x = np.zeros(256, np.float32)
    x[0], x[1:] = 127, np.linspace(-126.5, 126.5, 255, dtype=np.float32)
    got, _ = oracle.all_reduce([x, x], "sum", "int8_block")
    allowed = oracle.bound([x, x], "sum", "int8_block", False)

    assert 0.45 < (np.abs(got - 2.0 * x) / allowed).max() <= 1


@pytest.mark.ranks(2)
def test_what_is_not_finite_stays_in_its_block_and_out_of_the_residual(comm):
    x = np.ones(1000, np.float32)
    x[300] = np.inf if comm.rank else 1
    for name in COMPRESSIONS:
        residual = np.full(1000, 0.25, np.float32)
        y = comm.all_reduce(x, compression=name, residual=residual)
        hurt = slice(256, 512) if name in BLOCKS else slice(300, 301)
        assert not np.isfinite(y[hurt]).any()
        assert np.isfinite(y[: hurt.start]).all()
        assert np.isfinite(y[hurt.stop :]).all()
        assert np.isfinite(residual).all()
        assert np.isfinite(
            comm.all_reduce(np.ones_like(x), compression=name, residual=residual)
        ).all()


# --- error feedback -----------------------------------------------------------------------------


def feed_back(comm, name, op, turns):
    """Return the error of the sum of many results, with and without a residual, and the bound."""
    residual = np.zeros(3000, np.float32)
    fed, plain, exact = (np.zeros(3000) for _ in range(3))
    greatest = 0.0
    for turn in range(turns):
        inputs = inputs_of(comm.world_size, 3000, "outliers", seed=turn % 3)
        x = inputs[comm.rank]
        fed += comm.all_reduce(x, op, compression=name, residual=residual)
        plain += comm.all_reduce(x, op, compression=name)
        exact += np.sum(inputs, axis=0, dtype=np.float64)
        greatest = max(greatest, sum(float(np.abs(x).max()) for x in inputs))
    left = comm.all_reduce(residual.astype(np.float64))
    divisor = comm.world_size if op == "avg" else 1
    # Nothing is lost but float32's own roundings: 3 P + 6 of them a turn, each at most u times what
    # is there, which is at most twice the sum of the greatest magnitudes.
    roundings = turns * (3 * comm.world_size + 6) * 2.0**-24 * 2 * greatest
    lost = np.abs(fed * divisor + left - exact).max()
    return (
        lost / roundings,
        np.abs(fed * divisor - exact).max(),
        np.abs(plain * divisor - exact).max(),
    )


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_residuals_hold_exactly_what_was_lost(ranks, name, op):
    for lost, with_feedback, without in ranks.call(3, feed_back, name, op, 30):
        assert lost <= 1
        assert with_feedback < without / 3


@pytest.mark.soak(quick=2)
@pytest.mark.ranks(3)
def test_chance_needs_no_residual_for_errors_to_average_out(comm):
    x = np.full(2560, 0.3, np.float32)
    x[::256] = 127  # a step of 1: each 0.3 is lost to nearest
    turns = 200
    total = np.zeros(2560)
    for turn in range(turns):
        total += comm.all_reduce(x, "avg", compression=Compression("int8_block", seed=turn))
    others = np.delete(total, np.s_[::256])
    # Each value has a variance of at most 1/4 step twice: 5 deviations of the mean of all.
    assert abs(others.mean() / turns - 0.3) < 5 * (0.5 / (turns * others.size)) ** 0.5
    assert comm.all_reduce(x, "avg", compression="int8_block")[1] == 0


# --- arrays -------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_half_types_are_widened_and_rounded_once_more(comm, name, dtype):
    inputs = [x.astype(np.dtype(dtype)) for x in inputs_of(3, 1000)]
    wide = [x.astype(np.float32) for x in inputs]
    expected, left = oracle.all_reduce(wide, "sum", name)
    residual = np.zeros(1000, np.float32)

    got = comm.all_reduce(inputs[comm.rank], compression=name, residual=residual)

    assert_same(got, expected.astype(np.dtype(dtype)))
    assert_same(residual, left[comm.rank])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BLOCKS)
def test_lists_are_fused_and_share_no_scale(comm, name):
    shapes, dtypes = [(3, 100), (), (0, 5), (257,)], ["float32", "float16", "float32", "bfloat16"]
    inputs = [
        [
            (10.0**place * inputs_of(2, 300, seed=place)[rank][: int(np.prod(shape))])
            .astype(np.dtype(dtype))
            .reshape(shape)
            for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        for rank in range(2)
    ]
    packed = []
    for arrays in inputs:
        whole = np.zeros(512 + 256 + 257, np.float32)
        for start, x in zip((0, 512, 768, 768), arrays, strict=True):
            whole[start : start + x.size] = x.reshape(-1).astype(np.float32)
        packed.append(whole)
    expected, left = oracle.all_reduce(packed, "avg", name)
    xs = inputs[comm.rank]
    residuals = [np.zeros(x.size, np.float32) for x in xs]

    got = comm.all_reduce(xs, "avg", compression=name, residual=residuals)
    outs = tuple(np.empty_like(x) for x in xs)
    again = comm.all_reduce(tuple(xs), "avg", out=outs, compression=name)

    assert isinstance(got, list)
    assert isinstance(again, tuple)
    for place, start in enumerate((0, 512, 768, 768)):
        x = xs[place]
        part = slice(start, start + x.size)
        wanted = expected[part].astype(x.dtype).reshape(x.shape)
        assert_same(got[place], wanted, place)
        assert_same(outs[place], wanted, place)
        assert again[place] is outs[place]
        assert_same(residuals[place], left[comm.rank][part], place)
    assert comm.all_reduce([], compression=name) == []


@pytest.mark.ranks(2)
def test_strided_arrays_numbers_and_groups(comm):
    inputs = inputs_of(2, 600)
    x = inputs[comm.rank]
    expected, _ = oracle.all_reduce([one[::2].copy() for one in inputs], "sum", "int8_block")
    out = np.zeros((300, 2), np.float32)
    comm.all_reduce(x[::2], out=out[:, 1], compression="int8_block")
    assert_same(out[:, 1].copy(), expected)
    assert not out[:, 0].any()
    number = comm.all_reduce(np.float32(comm.rank + 1), compression="int8_block")
    assert type(number) is np.float32
    assert number == 3
    with comm.group():
        later = comm.all_reduce(x[::2].copy(), compression="int8_block")
    assert_same(later, expected)


@pytest.mark.soak
@pytest.mark.ranks(2)
def test_pytorch_tensors(comm):
    torch = pytest.importorskip("torch")
    inputs = inputs_of(2, 1000)
    tensor, residual = torch.from_numpy(inputs[comm.rank].copy()), torch.zeros(1000)
    expected, left = oracle.all_reduce(inputs, "avg", "float8_block")

    got = comm.all_reduce(tensor, "avg", out=tensor, compression="float8_block", residual=residual)

    assert got is tensor
    assert_same(tensor.numpy(), expected)
    assert_same(residual.numpy(), left[comm.rank])
