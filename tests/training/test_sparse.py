"""Chunked top-k against a plain reference, its size, and what it conserves."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from gpucoll import Communicator, Compression, UsageError
from gpucoll.training import sparse

SPARSELOCO = Compression("topk", density=1 / 64, bits=2, chunk=4096)


def reference(how, values):
    """Return what arrives of the values: one chunk, one value after the other."""
    arrives = np.zeros(len(values), np.float32)
    for begin in range(0, len(values), how.chunk):
        chunk = np.zeros(how.chunk, np.float32)
        chunk[: len(values) - begin] = values[begin : begin + how.chunk]
        kept = sorted(range(how.chunk), key=lambda i: (-abs(chunk[i]), i))[: how.kept]
        magnitudes = [abs(float(chunk[i])) for i in kept]
        mean = sum(magnitudes) / how.kept
        upper = [magnitude for magnitude in magnitudes if magnitude > mean]
        lower = [magnitude for magnitude in magnitudes if magnitude <= mean]
        low = high = mean
        if how.bits == 2:
            low, high = sum(lower) / len(lower), sum(upper) / len(upper) if upper else mean
        elif how.bits > 2:
            low, high = min(magnitudes), max(magnitudes)
        levels = 2 ** (how.bits - 1)
        steps = np.arange(levels, dtype=np.float32) / np.float32(max(levels - 1, 1))
        between = truncated(low) + (truncated(high) - truncated(low)) * steps
        for i in kept:
            if begin + i < len(values):
                nearest = between[np.abs(abs(chunk[i]) - between).argmin()]
                arrives[begin + i] = np.copysign(nearest, chunk[i])
    return arrives


def truncated(level):
    """Return a level in bfloat16, without its lower bits."""
    return (np.array([level], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[
        0
    ]


def sent(how, values):
    """Return what arrives, and what is left."""
    left = values.copy()
    message = sparse.take(how, left)
    assert len(message) == sparse.message_bytes(how, len(values))
    total = np.zeros_like(values)
    sparse.add(how, message, total)
    return total, left


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [64, 100, 4096])
@pytest.mark.parametrize("density", [1 / 64, 0.3, 1.0])
@pytest.mark.parametrize("count", [0, 1, 300, 6400, 8195])
def test_it_is_the_reference(bits, chunk, density, count):
    how = Compression("topk", density=density, bits=bits, chunk=chunk)
    random = np.random.default_rng(count + chunk + bits)
    # Half of the values are small integers, so that many magnitudes are equal.
    values = random.normal(size=count).astype(np.float32) * 100
    values[::2] = values[::2].astype(np.int32) % 5
    values[4500:] = 0

    total, left = sent(how, values)

    np.testing.assert_array_equal(total, reference(how, values))
    np.testing.assert_array_equal(left, values - total)


def test_a_message_is_exactly_146_times_smaller():
    n = 4096 * 250
    size = sparse.message_bytes(SPARSELOCO, n)

    assert Compression("topk") == SPARSELOCO
    assert 8 * size / n == 0.21875 == 64 * (12 + 2) / 4096
    assert 4 * n / size == 1024 / 7  # 146.2857
    assert sparse.message_bytes(SPARSELOCO, 1) == 112  # the last chunk is filled up
    assert sparse.message_bytes(SPARSELOCO, 4097) == 224
    few = Compression("topk", density=1 / 64, chunk=64)
    assert (
        sparse.message_bytes(few, 640) == 10 + 40
    )  # 8 bits for each, and levels: few have no order


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_nothing_is_lost(bits):
    """With two levels all values are multiples of 2**-20 below 16, so that sums are exact."""
    how = Compression("topk", density=1 / 16, bits=bits, chunk=256, decay=1.0)
    random = np.random.default_rng(bits)
    given, arrived = np.zeros((2, 1000))
    residual = np.zeros(1000, np.float32)
    for _ in range(50):
        gradient = (random.integers(-255, 256, size=1000) / 2.0**8).astype(np.float32)
        given += gradient
        residual += gradient
        arrived += sent_and_left(how, residual)

    each_step = 0 if bits <= 2 else 16 * 2.0**-24  # levels between two others are rounded
    np.testing.assert_allclose(arrived + residual, given, rtol=0, atol=50 * each_step)
    assert np.abs(residual).max() < 16


def sent_and_left(how, residual):
    total = np.zeros_like(residual)
    sparse.add(how, sparse.take(how, residual), total)
    return total


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_what_is_not_finite_spoils_its_chunk_once(spoilt, bits):
    how = Compression("topk", bits=bits)
    values = np.ones(8192, np.float32)
    values[:100] = spoilt

    total, left = sent(how, values)

    assert not np.isfinite(total[:64]).any()
    assert np.isfinite(total[4096:]).all()
    assert np.isfinite(left).all()


def test_the_greatest_finite_values_stay_finite():
    values = np.full(4096, np.finfo(np.float32).max)
    values[::2] = np.finfo(np.float32).tiny

    total, left = sent(SPARSELOCO, values)

    assert np.isfinite(total).all()
    assert np.isfinite(left).all()


BAD = [
    ("density", 0, "keeps none of a chunk of 4096: 0.000244140625 keeps one"),
    ("density", float("nan"), "density must be in 0..1; got nan"),
    ("density", "1/64", "density must be a number; got '1/64'"),
    ("bits", 9, "bits must be in 1..8; got 9"),
    ("bits", 2.0, "bits must be an int; got 2.0"),
    ("chunk", 1, "chunk must be in 2..65536; got 1"),
    ("decay", 1.1, "decay must be in 0..1; got 1.1"),
    ("decay", True, "decay must be a number; got True"),
    ("seed", 1, "it takes no seed"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD)
def test_bad_arguments(name, value, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        Compression("topk", **{name: value})


@pytest.mark.ranks(1)
def test_it_is_for_training_only_and_others_take_none_of_its_arguments(comm: Communicator):
    for name in ("density", "bits", "chunk", "decay"):
        with pytest.raises(UsageError, match=f"int8_block takes no {name}"):
            Compression("int8_block", **{name: 1})
    for how in ("topk", SPARSELOCO):
        with pytest.raises(UsageError, match=r"gpucoll\.training\.DiLoCo"):
            comm.all_reduce(np.ones(3, np.float32), compression=how)


def test_the_order_of_words_carries_any_level():
    words = np.sort(np.random.default_rng(0).permutation(4096)[:64]).astype(np.uint32)
    for low, high in itertools.product((0, 1, 0x7F80, 0xFFFF), repeat=2):
        levels = np.array([low | high << 16], np.uint32)
        row = words[None].copy()
        sparse._exchange(row, levels)
        assert sorted(row[0]) == words.tolist()
        assert sparse._levels_of_order(row) == levels
