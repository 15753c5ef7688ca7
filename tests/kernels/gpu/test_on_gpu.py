"""Every kernel on a GPU against the reference: CuPy's and PyTorch's arrays, on another stream.

The same tests run on the host, so that a test which needs a GPU is not one that never ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.dtypes import ALLOWED, HALF_TYPES, any_values, assert_same, dtype_of
from tests.kernels.gpu.device import Bench, HostBench, HostDeviceBench, require_numba_cuda

from gpucoll.kernels import reference, reference_compression
from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.gpu.pack import cast, prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.quantise import FORMATS, dequantise, quantise, requantise
from gpucoll.kernels.gpu.reduce import reduce_arrays, ring_step
from gpucoll.kernels.gpu.source import TILE_BYTES
from gpucoll.types import DTYPES, ReduceOp

EVERY_DTYPE = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float64", "complex128")
SCALE = 0.3


def on_gpu(library: str) -> Any:
    return pytest.param(library, marks=pytest.mark.gpu)


@pytest.fixture(params=[on_gpu("cupy"), on_gpu("torch"), "host", "host-device"])
def bench(request):
    yield from bench_of(request)


@pytest.fixture(params=[on_gpu("cupy"), "host", "host-device"])
def one_bench(request):
    """For what does not depend on the library."""
    yield from bench_of(request)


def bench_of(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "host-device":
        request.getfixturevalue("monkeypatch").delenv("GPUCOLL_CPU_ONLY", raising=False)
        made = HostDeviceBench()
        yield made
        made.close()
    elif request.param == "host":
        request.getfixturevalue("on_host")
        yield HostBench()
    else:
        yield Bench(request.param)


def check_reduce(
    bench, dtype, op, size, n_sources=2, offsets=(0,), *, in_place=False, function=None
):
    where = f"{dtype} {op} {size=} {n_sources=} {offsets=} {in_place=}"
    turn = itertools.cycle(offsets)
    inputs = [any_values(dtype, size, seed) for seed in range(n_sources)]
    parameter = (3 if "int" in dtype else 0.7) if op == "scaled_sum" else n_sources
    with bench.current():
        sources = [bench.guarded(x, next(turn)) for x in inputs]
        destinations = [bench.empty(size, dtype, next(turn)) for _ in range(2)]
        if in_place:
            destinations[0] = sources[-1]
        chosen = ReduceOp.scaled_sum(parameter) if op == "scaled_sum" else function or op
        reduce_arrays(
            chosen,
            [each.array for each in destinations],
            [each.array for each in sources],
            divisor=parameter,
        )
    expected = reference.reduce(op, inputs, parameter)
    for destination in destinations:
        assert_same(destination.read(), expected, where)
    for source, x in zip(sources, inputs, strict=True):
        if source not in destinations:
            assert_same(source.read(), x, f"source of {where}")


@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_reduce(one_bench, dtype, op):
    item_bytes = dtype_of(dtype).itemsize
    tile = TILE_BYTES // item_bytes
    for size in (1, 257, tile + 3, 5 * tile + 17):
        check_reduce(one_bench, dtype, op, size, 3, (item_bytes * (size % 5),))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_libraries_and_places(bench, dtype):
    item_bytes = dtype_of(dtype).itemsize
    size = 3 * TILE_BYTES // item_bytes + 5
    operation = "lor" if dtype == "bool" else "sum"
    for n_sources, in_place in itertools.product((1, 2, 7, 16), (False, True)):
        check_reduce(bench, dtype, operation, size, n_sources, in_place=in_place)
    for offsets in ((1,), (item_bytes,), (0, item_bytes), (3, 0, 0)):
        check_reduce(bench, dtype, operation, size, 2, offsets)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_code(one_bench, dtype):
    width = dtype_of(dtype).itemsize
    codes = np.arange(1 << 8 * width, dtype=f"u{width}").view(dtype_of(dtype))
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    finite = codes.astype(np.float32)
    finite = np.sort(finite[np.isfinite(finite)])
    with np.errstate(over="ignore"):
        ties = np.concatenate([(finite[1:] + finite[:-1]) / 2, finite * np.float32(1.0625)])
    near = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    numbers = np.concatenate(
        [bits, finite, ties, *near, np.array([448, 464, 465, 57344, 61440], np.float32)]
    )
    with one_bench.current():
        held, wide = one_bench.guarded(codes), one_bench.empty(codes.size, "float32")
        given, made = one_bench.guarded(numbers), one_bench.empty(numbers.size, dtype)
        cast(held.array, wide.array)
        cast(given.array, made.array)
    assert_same(wide.read(), codes.astype(np.float32), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(made.read(), numbers.astype(dtype_of(dtype)), dtype)


def test_ring_step(bench):
    received, mine = any_values("float16", 70_000, 1), any_values("float16", 70_000, 2)
    with bench.current():
        given = [bench.guarded(received), bench.guarded(mine)]
        made = [bench.empty(70_000, "float16") for _ in range(2)]
        ring_step("sum", [x.array for x in made], *(x.array for x in given))
    for x in made:
        assert_same(x.read(), reference.reduce("sum", [received, mine]))


def test_an_explicit_stream(bench):
    x = any_values("float32", 100_000, 1)
    with bench.current():
        given, made = bench.guarded(x), bench.empty(x.size, "float32")
    reduce_arrays("sum", [made.array], [given.array, given.array], stream=bench.stream)
    bench.stream.synchronize()
    assert_same(made.read(), reference.reduce("sum", [x, x]))


def check_pack(bench, dtypes, counts, dtype=None, scale=None):
    inputs = [
        any_values(name, count, seed)
        for seed, (name, count) in enumerate(zip(itertools.cycle(dtypes), counts, strict=False))
    ]
    held = [x if dtype is None else reference_compression.convert(x, dtype, scale) for x in inputs]
    offsets = reference_compression.layout([x.nbytes for x in held])
    with bench.current():
        arrays = [bench.guarded(x, x.dtype.itemsize * (i % 3)) for i, x in enumerate(inputs)]
        outputs = [bench.empty(x.size, x.dtype.name) for x in inputs]
        buffer = bench.empty(offsets[-1], "uint8")
        options = {"dtype": dtype, "scale": scale}
        prepare_pack([x.array for x in arrays], buffer.array, offsets, **options)()
        prepare_unpack([x.array for x in outputs], buffer.array, offsets, dtype=dtype)()
    packed = buffer.read()
    for x, output, start, end in zip(held, outputs, offsets[:-1], offsets[1:], strict=True):
        assert_same(packed[start : start + x.nbytes].view(x.dtype), x)
        assert not packed[start + x.nbytes : end].any()
        back = output.read()
        assert_same(back, x if dtype is None else reference_compression.convert(x, back.dtype.name))


def test_pack_500_arrays(bench):
    generator = np.random.default_rng(3)
    counts = np.exp(generator.uniform(0, np.log(20_000), 500)).astype(int) * (
        np.arange(500) % 9 > 0
    )
    check_pack(bench, EVERY_DTYPE, counts)


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("dtype", CONVERTIBLE)
def test_pack_converts(one_bench, dtype, scale):
    check_pack(one_bench, CONVERTIBLE, (0, 1, 3, 4095, 4096, 4097, 50_000, 17), dtype, scale)


def numbers(count: int) -> np.ndarray:
    generator = np.random.default_rng(count)
    x = generator.normal(0, 1, count) * 10 ** generator.uniform(-3, 2, count)
    x = x.astype(np.float32)
    for block, value in enumerate((0.0, np.nan, np.inf, 1e-45, 3.4e38)):
        x[block * 512 : block * 512 + (256 if value in (0.0, 1e-45) else 1)] = value
    return x


@pytest.mark.parametrize("seed", [None, 1 << 40], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block_format", FORMATS)
def test_quantise(bench, block_format, seed):
    x, blocks = numbers(100_003), 392
    options = {"seed": seed, "sequence": 7 << 33, "first_block": (1 << 32) - 3}
    size_bytes = message_bytes(blocks)
    expected = reference_compression.quantise(x, block_format, blocks, **options)
    total = reference_compression.dequantise_reduce([expected] * 3, block_format, blocks, x.size, 3)
    padded = np.zeros(blocks * 256, np.float32)
    padded[: x.size] = total
    again = reference_compression.quantise(padded, block_format, blocks, **options)
    for offset in (0, 4):
        with bench.current():
            given, message = bench.guarded(x, offset), bench.empty(size_bytes, "uint8")
            quantise(given.array, message.array, block_format, blocks=blocks, **options)
            three = bench.guarded(np.concatenate([expected] * 3))
            back, result = bench.empty(x.size, "float32", offset), bench.empty(size_bytes, "uint8")
            of = {"blocks": blocks, "sources": 3, "divisor": 3}
            dequantise(three.array, back.array, block_format, **of)
            requantise(three.array, result.array, block_format, **of, **options)
        assert_same(message.read(), expected)
        assert_same(back.read(), total)
        assert_same(result.read(), again)


def test_error_feedback(one_bench):
    x, lost, blocks = numbers(5000), np.full(5000, 0.01, np.float32), 20
    with np.errstate(all="ignore"):
        expected = reference_compression.quantise(x + lost, "int8", blocks)
        kept = x + lost - reference_compression.dequantise(expected, "int8", blocks, x.size)
    with one_bench.current():
        given, residual = one_bench.guarded(x), one_bench.guarded(lost)
        message = one_bench.empty(message_bytes(blocks), "uint8")
        quantise(given.array, message.array, "int8", blocks=blocks, residual=residual.array)
    assert_same(message.read(), expected)
    assert_same(residual.read(), np.where(np.isfinite(kept), kept, np.float32(0)))


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e5m2", "float64", "complex64"])
def test_a_users_operation(bench, dtype):
    if isinstance(bench, HostBench):
        pytest.skip("a user's operation is compiled for a GPU only")
    if not isinstance(bench, HostDeviceBench):
        require_numba_cuda()
    add = ReduceOp.custom(lambda a, b: a + b)
    for n_sources, offsets in ((2, (0,)), (5, (0,)), (3, (1,))):
        check_reduce(bench, dtype, "sum", 10_007, n_sources, offsets, function=add)
