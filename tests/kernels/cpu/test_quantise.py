"""Quantise and dequantise: the reference's bits, whatever the values and addresses."""

from __future__ import annotations

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests.dtypes import assert_same
from tests.guarded import Guarded

from gpucoll.kernels import reference_compression as reference
from gpucoll.kernels.block_message import HALVES, message_bytes
from gpucoll.kernels.cpu import quantise as kernels
from gpucoll.kernels.cpu.block_codes import FORMATS

BLOCK = reference.BLOCK
COUNTS = (0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2000)
SEEDS = (None, 0, 2**64 - 1)
GREATEST = np.finfo(np.float32).max
LEAST = np.float32(2.0**-149)


def wide_values(count: int, seed: int) -> np.ndarray:
    """Return finite values of all magnitudes, whole blocks of similar ones among them."""
    generator = np.random.default_rng(seed)
    exponents = np.repeat(generator.uniform(-140, 120, -(-count // 100)), 100)[:count]
    with np.errstate(over="ignore"):
        x = generator.standard_normal(count) * 2.0**exponents
    return x.astype(np.float32)


def any_bits(count: int, seed: int) -> np.ndarray:
    """Return all kinds of bits; NaN and infinities in every block."""
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(np.float32)


def midpoints(block_format: str) -> np.ndarray:
    """Return blocks of scale 1: every code's value, what lies half way, and both neighbours."""
    limit = np.float32(FORMATS[block_format].limit)
    if block_format == "int8":
        codes = np.arange(-127, 128).astype(np.float32)
    else:
        codes = np.arange(256, dtype=np.uint8).view(np.dtype(block_format)).astype(np.float32)
        codes = np.unique(codes[np.isfinite(codes)])
    half = (codes[1:] + codes[:-1]) / np.float32(2)
    up = np.nextafter(half, np.float32(np.inf))
    down = np.nextafter(half, np.float32(-np.inf))
    points = np.concatenate([codes, half, up, down, [-0.0]]).astype(np.float32)
    n_rows = -(-points.size // (BLOCK - 1))
    points.resize(n_rows * (BLOCK - 1))
    first = np.full((n_rows, 1), limit)
    return np.hstack([first, points.reshape(n_rows, BLOCK - 1)]).reshape(-1)


def check(
    x: np.ndarray,
    block_format: str,
    blocks: int,
    seed: int | None,
    *,
    offsets: tuple[int, int, int] = (0, 0, 0),
    **more: int,
) -> None:
    """Compare message and what it means with the reference's."""
    source = Guarded(x.size, np.float32, offsets[0])
    source.array[...] = x
    size_bytes = message_bytes(blocks, block_format)
    message = Guarded(size_bytes, np.uint8, offsets[1])
    where = f"{block_format} {x.size} elements {blocks=} {seed=} {offsets=} {more}"

    kernels.quantise(source.array, message.array, block_format, blocks=blocks, seed=seed, **more)
    expected = reference.quantise(x, block_format, blocks, seed=seed, **more)
    assert_same(message.array, expected, where)
    destination = Guarded(x.size, np.float32, offsets[2])
    kernels.dequantise(message.array, destination.array, block_format, blocks=blocks)
    assert_same(
        destination.array, reference.dequantise(expected, block_format, blocks, x.size), where
    )
    for guarded in (source, message, destination):
        guarded.check(where)
    assert_same(source.array, x, where)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block_format", FORMATS)
def test_counts_and_addresses(block_format, seed):
    for turn, count in enumerate(COUNTS):
        offsets = ((0, 0, 0), (1, 3, 2), (4, 0, 0), (0, 1, 0), (0, 0, 4))[turn % 5]
        blocks = -(-count // BLOCK) + turn % 3
        check(wide_values(count, count), block_format, blocks, seed, offsets=offsets)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block_format", FORMATS)
def test_any_bits(block_format, seed):
    check(any_bits(4 * BLOCK, 1), block_format, 4, seed)
    check(midpoints(block_format), block_format, midpoints(block_format).size // BLOCK, seed)


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize(
    "value", [np.nan, -np.inf, np.inf, GREATEST, -GREATEST, LEAST, -LEAST, -0.0]
)
def test_a_special_value_anywhere_in_a_block(block_format, value):
    """Each vector of a block takes part in its greatest magnitude, and in nobody else's."""
    for place in (0, 1, 15, 16, 31, 63, 64, 100, 127, 128, 200, 254, 255):
        x = np.zeros((3, BLOCK), np.float32)
        x[1, place] = value
        x[0, 255] = x[2, 0] = 1
        check(x.reshape(-1), block_format, 3, None)
        check(x.reshape(-1), block_format, 3, 7)


@pytest.mark.parametrize("block_format", FORMATS)
def test_blocks_of_extreme_magnitudes(block_format):
    limit = FORMATS[block_format].limit
    magnitudes = [
        2.0**-149,
        2.0**-140,
        2.0**-127,
        2.0**-126,
        limit * 2.0**-126,
        2.0**-100,
        2.0**127,
    ]
    magnitudes += [float(GREATEST), float(GREATEST) / 2, limit * 2.0**-126 * (1 + 2**-23)]
    ramp = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    x = np.concatenate([ramp * np.float32(magnitude) for magnitude in magnitudes])
    for seed in SEEDS:
        check(x, block_format, len(magnitudes), seed)


@pytest.mark.parametrize("block_format", FORMATS)
def test_chances_at_their_very_edge(block_format):
    """Fractions that, with the bits drawn, are just enough to round up, and just not enough."""
    limit = np.float32(FORMATS[block_format].limit)
    drawn = reference.random_bits(0, 3, 0)
    if block_format == "int8":
        least, unit = 0, 2.0**-16
    else:
        least, unit = 1, 2.0**-16 * (0.125 if block_format == "float8_e4m3fn" else 0.25)
    for off in (-1.0, -0.5625, -0.5, -0.4375, 0.0, 0.4375):
        x = (least + (65536 - drawn + off) * unit).astype(np.float32)
        x[0] = limit
        check(x, block_format, 1, 3)
        check(-x, block_format, 1, 3)


@pytest.mark.parametrize("block_format", FORMATS)
def test_the_greatest_of_a_block_may_be_scaled_beyond_the_limit(block_format):
    """By an ulp, which no code may show: magnitudes for which it is so, with every drawn number."""
    limit = np.float32(FORMATS[block_format].limit)
    magnitudes = np.random.default_rng(2).uniform(1, 2, 4000).astype(np.float32)
    beyond = magnitudes[magnitudes * (limit / magnitudes) > limit][:40]
    assert len(beyond) == 40
    x = np.repeat(beyond, BLOCK) * np.tile(np.array([1, -1], np.float32), 20 * BLOCK)
    for seed in (None, *range(10)):
        check(x, block_format, len(beyond), seed)


@pytest.mark.parametrize("block_format", FORMATS)
def test_places_of_random_bits(block_format):
    """Halves of the numbers are used in full, and part of a call draws what the whole would."""
    x = wide_values(3 * BLOCK, 3)
    for first_block in (0, 1, (1 << 27) - 1, (1 << 59) - 2, (1 << 64) - 3):
        check(x, block_format, 3, 1 << 40, first_block=first_block, sequence=(5 << 32) + 1)
    whole = np.empty(message_bytes(3), np.uint8)
    kernels.quantise(x, whole, block_format, blocks=3, seed=4, sequence=2, first_block=10)
    last = np.empty(message_bytes(1), np.uint8)
    kernels.quantise(
        x[2 * BLOCK :], last, block_format, blocks=1, seed=4, sequence=2, first_block=12
    )
    assert_same(whole[-BLOCK:], last[-BLOCK:])


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("block_format", FORMATS)
def test_other_widths_of_vectors(monkeypatch, block_format, width):
    """Processors with narrower or wider vectors get the same bits."""
    monkeypatch.setattr("gpucoll.kernels.cpu.quantise_kernels.vector_bytes", lambda: width)
    for name in ("_quantise_kernel", "_dequantise_kernel"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).__wrapped__)
    for seed in (None, 3):
        check(wide_values(2 * BLOCK + 100, 5), block_format, 3, seed)
        check(midpoints(block_format)[: 4 * BLOCK], block_format, 4, seed)


@pytest.mark.parametrize("block_format", FORMATS)
def test_every_code_is_read(block_format):
    """Also those that quantise never writes."""
    message = np.zeros(message_bytes(1), np.uint8)
    message[16:] = np.arange(BLOCK)
    for scale in (1.0, 2.0**-126, 3.3, float(GREATEST), np.nan, -1.0):
        message[:4].view(np.float32)[0] = scale
        got = np.empty(BLOCK, np.float32)
        kernels.dequantise(message, got, block_format, blocks=1)
        assert_same(got, reference.dequantise(message, block_format, 1, BLOCK), scale)


@pytest.mark.parametrize("divisor", [None, 3, 7])
@pytest.mark.parametrize("block_format", FORMATS)
def test_reduction_of_messages(block_format, divisor):
    for sources, count in ((1, 300), (2, 1), (3, 256), (3, 2000), (7, 511)):
        blocks = -(-count // BLOCK) + 1
        inputs = [wide_values(count, seed) for seed in range(sources)]
        messages = [reference.quantise(x, block_format, blocks) for x in inputs]
        destination = Guarded(count, np.float32, 4 * (count % 3))

        kernels.dequantise(
            np.concatenate(messages),
            destination.array,
            block_format,
            blocks=blocks,
            sources=sources,
            divisor=divisor,
        )

        expected = reference.dequantise_reduce(messages, block_format, blocks, count, divisor)
        assert_same(destination.array, expected, f"{sources=} {count=}")
        destination.check(f"{sources=} {count=}")


@pytest.mark.parametrize("dtype", HALVES)
def test_half_types_as_messages(dtype):
    for count in COUNTS:
        blocks, sources = -(-count // BLOCK) + 1, 3
        inputs = [wide_values(count, seed) for seed in range(sources)]
        size_bytes = message_bytes(blocks, dtype)
        messages = Guarded(sources * size_bytes, np.uint8, count % 5)
        rows = messages.array.reshape(sources, size_bytes)
        halves = [reference.convert(x, dtype) for x in inputs]
        for row, x, half in zip(rows, inputs, halves, strict=True):
            kernels.quantise(x, row, dtype, blocks=blocks)
            assert_same(row[: 2 * count], np.frombuffer(half.tobytes(), np.uint8), count)
            assert not row[2 * count :].any()
        destination = Guarded(count, np.float32, count % 7)

        kernels.dequantise(
            messages.array, destination.array, dtype, blocks=blocks, sources=sources, divisor=5
        )

        with np.errstate(all="ignore"):
            first, second, third = (half.astype(np.float32) for half in halves)
            assert_same(destination.array, (first + second + third) / np.float32(5), count)
        messages.check(count)
        destination.check(count)
