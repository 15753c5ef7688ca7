"""Block quantisation, compiled as host code with the lanes of a warp as coroutines."""

from __future__ import annotations

import numpy as np
import pytest
from tests.dtypes import any_values, assert_same
from tests.guarded import Guarded

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels import reference_compression as reference
from gpucoll.kernels.block_message import BLOCK, message_bytes, scales_bytes
from gpucoll.kernels.gpu.quantise import FORMATS, dequantise, quantise, requantise

pytestmark = pytest.mark.usefixtures("on_host")

COUNTS = (0, 1, 3, 4, 5, 127, 128, 129, 131, 255, 256, 257, 1000, 4 * BLOCK, 25 * BLOCK + 7)
SEED = 0x1234_5678_9ABC_DEF0
SEQUENCE = (3 << 32) + 7
FIRST_BLOCK = (1 << 32) - 2


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def numbers(count: int, seed: int) -> np.ndarray:
    """Return float32 of every magnitude; the range within a block is wide, too."""
    generator = np.random.default_rng(seed)
    exponents = (
        generator.uniform(-3, 2, count)
        + np.repeat(generator.uniform(-36, 34, blocks_of(count)), BLOCK)[:count]
    )
    signs = generator.choice([-1, 1], count)
    return (signs * 10**exponents).astype(np.float32)


def check_quantise(x, block_format, *, offset=0, blocks=None, where="", **options):
    blocks = blocks_of(x.size) if blocks is None else blocks
    source, message = Guarded(x.size, np.float32, offset), Guarded(message_bytes(blocks), np.uint8)
    source.array[...] = x

    quantise(source.array, message.array, block_format, blocks=blocks, **options)

    message.check(where)
    with np.errstate(all="ignore"):
        expected = reference.quantise(x, block_format, blocks, **options)
    assert_same(message.array, expected, where)
    return message.array


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block_format", FORMATS)
def test_quantise(block_format, seed):
    options = {"seed": seed, "sequence": SEQUENCE, "first_block": FIRST_BLOCK}
    for count in COUNTS:
        for offset in (0, 4, 1):
            where = f"{block_format} {seed=} {count=} {offset=}"
            check_quantise(
                numbers(count, count), block_format, offset=offset, where=where, **options
            )
    check_quantise(numbers(300, 1), block_format, blocks=7, **options)


def hostile(block_format: str) -> np.ndarray:
    """Return blocks of what is hard: zeros, subnormals, ties, the ends of the range, no numbers."""
    limit = reference.LIMITS[block_format]
    tiny = np.float32(1e-45) * np.arange(BLOCK)
    halves = np.arange(BLOCK) / 2 - 63.5
    ties = np.where(np.arange(BLOCK) == 7, limit, halves)
    greatest = np.full(BLOCK, np.finfo(np.float32).max)
    mixed = greatest * np.linspace(-1, 1, BLOCK)
    nan, infinite = np.ones(BLOCK), np.ones(BLOCK)
    nan[200], infinite[17] = np.nan, -np.inf
    rows = [
        np.zeros(BLOCK),
        -np.zeros(BLOCK),
        tiny,
        -tiny,
        ties,
        -ties,
        greatest,
        mixed,
        nan,
        infinite,
    ]
    rows += [np.full(BLOCK, limit * 2.0**-126), np.linspace(-1, 1, BLOCK) * limit * 2.0**-126]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block_format", FORMATS)
def test_hard_blocks(block_format, seed):
    check_quantise(hostile(block_format), block_format, seed=seed)
    with np.errstate(all="ignore"):
        bits = any_values("float32", 40 * BLOCK, 9)
    check_quantise(bits, block_format, seed=seed)
    bits[~np.isfinite(bits)] = 1
    check_quantise(bits, block_format, seed=seed)


@pytest.mark.parametrize("block_format", FORMATS)
def test_what_the_format_holds_is_not_changed_by_chance(block_format):
    codes = np.arange(256, dtype=np.uint8).view(np.dtype(block_format)).astype(np.float32)
    limit = reference.LIMITS[block_format]
    values = np.where(np.abs(codes) <= limit, codes, 0).astype(np.float32)
    message = check_quantise(values, block_format, seed=1)
    back = np.empty(256, np.float32)
    dequantise(message, back, block_format, blocks=1)
    assert np.array_equal(back, values)


@pytest.mark.parametrize("block_format", ["float8_e4m3fn", "float8_e5m2"])
def test_chance_at_its_edges(block_format):
    """Fractions for which the random bits just suffice to round up, or just do not."""
    shift = 20 if block_format == "float8_e4m3fn" else 21
    drawn = reference.random_bits(0, SEED, 0)
    for beside in (-2, -1, 0, 1):
        # In 2**-shift of a step; what lies below the last of the 16 bits is rounded first.
        fraction = ((65535 - drawn) << (shift - 16)) + (1 << (shift - 17)) + beside
        bits = np.float32(1).view(np.uint32) + np.clip(fraction, 0, (1 << shift) - 1)
        x = bits.astype(np.uint32).view(np.float32).copy()
        x[0] = reference.LIMITS[block_format]  # the scale is 1
        message = check_quantise(x, block_format, seed=SEED, where=str(beside))
        codes = message[-BLOCK:][1:]
        is_up = codes != np.ones(1, np.dtype(block_format)).view(np.uint8)
        assert is_up.all() if beside >= 0 else not is_up.any()


def test_seeds_sequences_and_places_give_other_bits():
    x = np.full(BLOCK, 0.5, np.float32)
    x[0] = 127
    options = [{"seed": 1}, {"seed": 2}, {"seed": 1, "sequence": 1}, {"seed": 1, "first_block": 1}]
    made = [check_quantise(x, "int8", **each).tobytes() for each in options]
    assert len(set(made)) == len(made)
    assert check_quantise(x, "int8", seed=1).tobytes() == made[0]


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize(("n_messages", "divisor"), [(1, None), (1, 3), (2, None), (5, 5)])
def test_dequantise(block_format, n_messages, divisor):
    for count in COUNTS:
        blocks = blocks_of(count) + count % 2
        messages = Guarded(message_bytes(blocks) * n_messages, np.uint8)
        # Any codes and scales at all: what quantise never writes has its meaning too.
        messages.array[...] = any_values("uint8", messages.array.size, count)
        parts = messages.array.reshape(n_messages, -1)
        for offset in (0, 4, 2):
            made = Guarded(count, np.float32, offset)
            options = {"sources": n_messages, "divisor": divisor}
            dequantise(messages.array, made.array, block_format, blocks=blocks, **options)
            made.check()
            expected = reference.dequantise_reduce(parts, block_format, blocks, count, divisor)
            assert_same(made.array, expected, f"{count=} {offset=}")


@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block_format", FORMATS)
def test_requantise_is_both_in_one(block_format, seed):
    blocks, n_messages = 11, 3
    parts = [
        reference.quantise(numbers(blocks * BLOCK, part), block_format, blocks)
        for part in range(n_messages)
    ]
    messages = Guarded(message_bytes(blocks) * n_messages, np.uint8)
    messages.array[...] = np.concatenate(parts)
    options = {"seed": seed, "sequence": SEQUENCE, "first_block": 5}
    total = reference.dequantise_reduce(parts, block_format, blocks, blocks * BLOCK, n_messages)
    expected = reference.quantise(total, block_format, blocks, **options)

    for made in (Guarded(message_bytes(blocks), np.uint8).array, messages.array[: parts[0].size]):
        requantise(
            messages.array, made, block_format, blocks=blocks, sources=3, divisor=3, **options
        )
        assert_same(made, expected)
    messages.check()


@pytest.mark.parametrize("block_format", FORMATS)
def test_error_feedback(block_format):
    x, residual = numbers(700, 1), Guarded(700, np.float32, 4)
    residual.array[...] = numbers(700, 2)
    x[5] = np.inf
    x[300:302] = residual.array[300:302] = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        total = x + residual.array
        expected = reference.quantise(total, block_format, 3)
        lost = total - reference.dequantise(expected, block_format, 3, 700)
    message = np.empty(message_bytes(3) + 16, np.uint8)
    message = message[-message.ctypes.data % 16 :][: message_bytes(3)]

    quantise(x, message, block_format, blocks=3, residual=residual.array)

    residual.check()
    assert_same(message, expected)
    assert_same(residual.array, np.where(np.isfinite(lost), lost, np.float32(0)))


@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("divisor", [None, 3])
@pytest.mark.parametrize("block_format", FORMATS)
def test_error_feedback_of_a_result(block_format, divisor, seed):
    """What the sum loses, undivided, joins a residual; the result takes a message's place."""
    blocks, n_messages = 3, 3
    for count in (0, 1, 255, 257, 3 * BLOCK - 5, 3 * BLOCK):
        rows = [numbers(count, part) for part in range(n_messages)]
        residual = Guarded(count, np.float32, 4)
        residual.array[...] = numbers(count, 9)
        if count > 300:
            rows[1][5] = np.inf
            residual.array[299] = np.finfo(np.float32).max
            rows[0][299] = rows[1][299] = rows[2][299] = np.finfo(np.float32).max
        with np.errstate(all="ignore"):
            parts = [reference.quantise(row, block_format, blocks) for row in rows]
            total = reference.dequantise_reduce(parts, block_format, blocks, count, divisor)
            options = {"seed": seed, "sequence": SEQUENCE, "first_block": 5}
            expected = reference.quantise(total, block_format, blocks, **options)
            lost = total - reference.dequantise(expected, block_format, blocks, count)
            lost = lost if divisor is None else lost * np.float32(divisor)
            kept = residual.array + lost
        messages = Guarded(message_bytes(blocks) * n_messages, np.uint8)
        messages.array[...] = np.concatenate(parts)
        made = messages.array[parts[0].size : 2 * parts[0].size]

        requantise(
            messages.array,
            made,
            block_format,
            blocks=blocks,
            sources=n_messages,
            divisor=divisor,
            residual=residual.array,
            **options,
        )

        residual.check()
        messages.check()
        if np.isfinite(total).all():  # else what lies behind the end of a NaN block may differ
            assert_same(made, expected, f"{count=}")
        assert_same(residual.array, np.where(np.isfinite(kept), kept, np.float32(0)), f"{count=}")


def test_sizes_of_messages():
    for blocks in range(9):
        assert scales_bytes(blocks) == reference.scales_bytes(blocks)
        assert message_bytes(blocks) == reference.message_bytes(blocks)


def floats(count):
    return np.zeros(count, np.float32)


@pytest.mark.parametrize(
    ("source", "size_bytes", "options", "error", "text"),
    [
        (
            floats(257),
            272,
            {"blocks": 1},
            ArgumentError,
            "source has 257 elements; 1 blocks hold 256",
        ),
        (floats(256), 271, {"blocks": 1}, ArgumentError, "message must have 272 bytes"),
        (np.zeros(3), 272, {"blocks": 1}, ArgumentTypeError, "must be float32; it is float64"),
        (floats(3), 272, {"blocks": 1, "block_format": "int4"}, ArgumentError, "got 'int4'"),
        (floats(3), 272, {"blocks": 1, "residual": floats(2)}, ArgumentError, "residual has 2"),
    ],
)
def test_refused(source, size_bytes, options, error, text):
    message = Guarded(size_bytes, np.uint8).array
    with pytest.raises(error, match=text):
        quantise(source, message, **{"block_format": "int8", **options})


def test_a_misaligned_message_is_refused():
    with pytest.raises(ArgumentError, match="at a multiple of 16"):
        dequantise(Guarded(300, np.uint8, 1).array, floats(256), "int8", blocks=1)
    with pytest.raises(ArgumentError, match="divisor must not be 0"):
        dequantise(Guarded(300, np.uint8).array, floats(256), "int8", blocks=1, divisor=0)
    with pytest.raises(ArgumentTypeError, match="elements of one byte"):
        dequantise(floats(300), floats(256), "int8", blocks=1)
