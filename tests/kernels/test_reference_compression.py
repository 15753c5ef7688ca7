"""The reference of compression against values worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpucoll.kernels import reference_compression as reference

BLOCK = reference.BLOCK
FORMATS = tuple(reference.LIMITS)


def block_of(*values: Any) -> np.ndarray:
    x = np.zeros(BLOCK, np.float32)
    x[: len(values)] = values
    return x


def parts(message: np.ndarray, blocks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return a message's scales and codes."""
    start = reference.scales_bytes(blocks)
    return message[: 4 * blocks].view(np.float32), message[start:]


# Of Random123's file of known answers (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(key, counter, words):
    assert tuple(int(word) for word in reference.philox(key, counter)) == words


def test_which_bits_are_whose():
    seed, sequence, block = 5 + (7 << 32), 11 + (13 << 32), 1 << 31
    drawn = reference.random_bits(block, seed, sequence)

    for element in (0, 1, 5, 127, 128, 133, 255):
        number = block * 32 + element % 128 // 4
        words = reference.philox((5, 7), (number & 0xFFFFFFFF, number >> 32, 11, 13))
        word = int(words[element % 4])
        assert drawn[element] == (word & 0xFFFF if element < 128 else word >> 16)


def test_layout():
    assert reference.layout([]) == [0]
    assert reference.layout([0, 1, 16, 17]) == [0, 0, 16, 32, 64]
    assert reference.layout([1, 1024], 1024) == [0, 1024, 2048]


def test_pack_writes_zeros_between():
    packed = reference.pack([np.array([1, 2, 3], np.int8), np.array([4], np.int16)])

    assert packed.tolist() == [1, 2, 3] + [0] * 13 + [4] + [0] * 15


def test_one_rounding_after_the_scale():
    # In bfloat16 1 + 2**-7 is there and half of its last bit is not: scaled first, it is exact.
    x = np.array([1 + 2**-8], np.float32)

    assert reference.convert(x, "bfloat16", 256.0) == ml_dtypes.bfloat16(256)
    assert reference.convert(x, "float16", 256.0) == 257
    assert reference.convert(np.array([3], ml_dtypes.bfloat16), "bfloat16", 0.5) == 1.5


def test_message_sizes():
    assert [reference.message_bytes(blocks) for blocks in (0, 1, 4, 5)] == [0, 272, 1040, 1312]


@pytest.mark.parametrize("block_format", FORMATS)
def test_zeros(block_format):
    scales, codes = parts(reference.quantise(block_of(-0.0), block_format, 1))

    assert scales == np.float32(2.0**-126)
    assert codes[0] == (0 if block_format == "int8" else 0x80)  # an integer has no sign of zero
    assert not codes[1:].any()


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan(block_format, value):
    x = np.concatenate([block_of(1.0), block_of(1.0, value), block_of(1.0)])
    message = reference.quantise(x, block_format, 3)
    scales, codes = parts(message, 3)

    assert scales.view(np.uint32)[1] == 0x7FC00000
    assert not codes[BLOCK : 2 * BLOCK].any()
    got = reference.dequantise(message, block_format, 3, 3 * BLOCK).reshape(3, BLOCK)
    assert np.isnan(got[1]).all()
    assert got[0].tolist() == got[2].tolist() == block_of(1.0).tolist()


def test_int8_by_hand():
    x = block_of(127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.49999)
    message = reference.quantise(x, "int8", 1)
    scales, codes = parts(message)

    assert scales == 1
    assert codes.view(np.int8)[:8].tolist() == [127, -127, 0, 2, 2, 0, -2, 126]


def test_float8_by_hand():
    x = block_of(448, -448, 1.0625, 1.1875, 2.0**-10, 1.5 * 2.0**-9, 17)
    message = reference.quantise(x, "float8_e4m3fn", 1)

    assert parts(message)[0] == 1
    expected = [448, -448, 1, 1.25, 0, 2 * 2.0**-9, 16]
    assert reference.dequantise(message, "float8_e4m3fn", 1, 7).tolist() == expected


@pytest.mark.parametrize("block_format", FORMATS)
def test_the_greatest_and_the_least(block_format):
    greatest = np.finfo(np.float32).max
    for value in (greatest, -greatest, np.float32(2.0**-149), np.float32(2.0**-126)):
        x = block_of(value)
        got = reference.dequantise(
            reference.quantise(x, block_format, 1), block_format, 1, BLOCK
        ).astype(np.float64)
        limit = reference.LIMITS[block_format]
        allowed = max(abs(float(value)) * 2.0**-22, 2.0**-126 * (0.5 if limit == 127 else 2**-9))
        assert abs(got[0] - float(value)) <= allowed


@pytest.mark.parametrize("block_format", FORMATS)
def test_what_a_format_holds_is_never_changed_by_chance(block_format):
    limit = reference.LIMITS[block_format]
    if block_format == "int8":
        held = np.arange(-127, 128).astype(np.float32)
    else:
        held = np.arange(256, dtype=np.uint8).view(np.dtype(block_format)).astype(np.float32)
        held = held[np.isfinite(held)]
    held = np.concatenate([np.full(1, limit, np.float32), held])[:BLOCK]
    for seed in range(5):
        message = reference.quantise(held, block_format, 1, seed=seed)
        assert reference.dequantise(message, block_format, 1, held.size).tolist() == held.tolist()


@pytest.mark.parametrize("block_format", FORMATS)
def test_chances_are_the_fractions(block_format):
    """The mean of N draws lies within 5 standard deviations, sqrt(1/4 / N) steps each at most."""
    limit, n_draws = reference.LIMITS[block_format], 4096
    value, step = {"int8": (3.3, 1.0), "float8_e4m3fn": (1.03, 0.125), "float8_e5m2": (1.03, 0.25)}[
        block_format
    ]
    for scaled, wide in ((value, step), (-value, step), (0.3 * 2.0**-9, 2.0**-9)):
        if block_format != "float8_e4m3fn" and abs(scaled) < 1:
            continue
        x = np.full((n_draws // 255 + 1, BLOCK), scaled, np.float32)
        x[:, 0] = limit
        message = reference.quantise(x.reshape(-1), block_format, len(x), seed=9)
        got = reference.dequantise(message, block_format, len(x), x.size).reshape(x.shape)[:, 1:]
        assert set(np.unique(got).tolist()) <= {
            np.floor(scaled / wide) * wide,
            np.ceil(scaled / wide) * wide,
        }
        assert abs(got.mean() - np.float32(scaled)) < 5 * wide * (0.25 / got.size) ** 0.5


def test_reduction_goes_left_to_right_and_divides_last():
    messages = [reference.quantise(block_of(value), "int8", 1) for value in (127 * 2.0**24, 63, 63)]

    total = reference.dequantise_reduce(messages, "int8", 1, 1)
    assert total == np.float32(127 * 2.0**24)  # each 63 is below half of the last bit
    assert reference.dequantise_reduce(messages, "int8", 1, 1, 3) == total / np.float32(3)
