"""Chunked top-k: the few greatest values of each chunk, in a few bits each, as bytes.

A message has no header. The values are cut into chunks; the last one is filled up with zeros. Of
each chunk the `Compression.kept` values with the greatest magnitudes travel (of equal ones, those
with the lowest index), each as one word: its index in the chunk, then `Compression.bits` bits: its
sign and the number of its magnitude. The magnitudes of a chunk are evenly spaced between two levels
in bfloat16:

- 2 bits: the means of the kept magnitudes up to their mean, and of those above it;
- 1 bit: their mean, twice;
- more bits: their least and their greatest.

The words' order is free, so it carries the levels: it is ascending but for the first 32 pairs of
words, of which each is exchanged if its bit of the two levels is set. A chunk that keeps fewer than
64 values has no such order; its levels follow the words, in 4 bytes. So 64 of 4096 values in 12 + 2
bits are 112 bytes: 0.21875 bits a value, 146.3 times fewer than float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpucoll import Compression

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint32]

_LEVEL_BITS = 32
_KEPT_WITH_ORDER = 2 * _LEVEL_BITS
_MAGNITUDE = np.int32(0x7FFFFFFF)
_HALF, _UPPER = np.uint32(16), np.uint32(0xFFFF0000)
_CHUNKS_AT_ONCE = 64
"""A multiple of 8, so that their words fill whole bytes. Chunks of 4096 values take 1 MiB."""


def message_bytes(how: Compression, count: int) -> int:
    """Return the size of the message of `count` values."""
    chunks = -(-count // how.chunk)
    levels = 0 if _has_order(how) else 4 * chunks
    return -(-chunks * how.kept * _word_bits(how) // 8) + levels


def take(how: Compression, values: Floats) -> Bytes:
    """Return the message of a flat array, and leave in it what the message does not have.

    What is left of values that are not finite is zero.
    """
    words, levels = [], []
    for rows, begin, end in _blocks(how, len(values)):
        block = values[begin:end]
        if end - begin < rows * how.chunk:
            block = np.zeros(rows * how.chunk, np.float32)
            block[: end - begin] = values[begin:end]
        of_words, of_levels = _take_rows(how, block.reshape(rows, how.chunk))
        words.append(_to_bytes(of_words, _word_bits(how)))
        levels.append(of_levels)
        if end - begin < rows * how.chunk:
            values[begin:end] = block[: end - begin]
    if not _has_order(how):
        words += [of_levels.astype("<u4").view(np.uint8) for of_levels in levels]
    return np.concatenate(words) if words else np.empty(0, np.uint8)


def add(how: Compression, message: Bytes, total: Floats) -> None:
    """Add the values of a message to a flat array."""
    kept, word_bits = how.kept, _word_bits(how)
    behind = message_bytes(how, len(total)) - (0 if _has_order(how) else _chunks(how, total) * 4)
    place = 0
    for rows, begin, end in _blocks(how, len(total)):
        size = -(-rows * kept * word_bits // 8)
        words = _to_words(message[place : place + size], rows * kept, word_bits)
        words = words.reshape(rows, kept)
        place += size
        if _has_order(how):
            levels = _levels_of_order(words >> np.uint32(how.bits))
        else:
            levels = message[behind : behind + 4 * rows].view("<u4").astype(np.uint32)
            behind += 4 * rows
        index = (words >> np.uint32(how.bits)).astype(np.intp)
        index += begin + how.chunk * np.arange(rows)[:, None]
        sent = _values(how, words, levels)
        if end - begin < rows * how.chunk:
            is_there = index < end  # the others fill the last chunk up
            index, sent = index[is_there], sent[is_there]
        total[index] += sent  # no index occurs twice


def _take_rows(how: Compression, rows: Floats) -> tuple[Words, Words]:
    """Return the words and levels of chunks, and subtract from the chunks what these say."""
    index = _greatest(rows, how.kept)
    values = np.take_along_axis(rows, index, 1)
    levels = _levels(np.abs(values), how)
    with np.errstate(invalid="ignore", over="ignore"):
        words = (index.astype(np.uint32) << np.uint32(how.bits)) | _codes(how, values, levels)
        left: Floats = values - _values(how, words, levels)
    np.put_along_axis(rows, index, left, 1)
    spoilt = ~np.isfinite(_magnitudes(how, levels)).all(1)
    if spoilt.any():
        rows[spoilt] = np.where(np.isfinite(rows[spoilt]), rows[spoilt], 0)
    if _has_order(how):
        _exchange(words, levels)
    return words, levels


def _greatest(rows: Floats, kept: int) -> NDArray[np.intp]:
    """Return the places of the greatest magnitudes of each row, ascending.

    As integers the bits of magnitudes have the same order, and NaN is above all.
    """
    magnitudes = rows.view(np.int32) & _MAGNITUDE
    place = rows.shape[1] - kept
    least = np.partition(magnitudes, place, axis=1)[:, place, None]
    chosen = magnitudes >= least
    if np.count_nonzero(chosen) != len(rows) * kept:
        above, ties = magnitudes > least, magnitudes == least
        free = kept - np.count_nonzero(above, axis=1)[:, None]
        chosen = above | (ties & (np.cumsum(ties, axis=1) <= free))
    return np.nonzero(chosen)[1].reshape(len(rows), kept)


def _levels(magnitudes: Floats, how: Compression) -> Words:
    """Return the two levels of each row as bits: the lower one, and above it the upper one."""
    if how.bits > 2:
        low, high = magnitudes.min(1), magnitudes.max(1)
    else:
        exact = magnitudes.astype(np.float64)
        mean = exact.mean(1)
        low = high = mean.astype(np.float32)
        if how.bits == 2:
            is_high = exact > mean[:, None]
            n_high = np.count_nonzero(is_high, axis=1)
            of_high = np.where(is_high, exact, 0).sum(1) / np.maximum(n_high, 1)
            of_low = np.where(is_high, 0, exact).sum(1) / (how.kept - n_high)  # the least is there
            low = of_low.astype(np.float32)
            high = np.where(n_high > 0, of_high, mean).astype(np.float32)
    levels: Words = (low.view(np.uint32) >> _HALF) | (high.view(np.uint32) & _UPPER)
    return levels


def _magnitudes(how: Compression, levels: Words) -> Floats:
    """Return the magnitudes of each row: 2 ** (bits - 1) of them."""
    low = (levels << _HALF).view(np.float32)[:, None]
    high = (levels & _UPPER).view(np.float32)[:, None]
    steps = max((1 << (how.bits - 1)) - 1, 1)
    parts = np.arange(1 << (how.bits - 1), dtype=np.float32) / np.float32(steps)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitudes: Floats = low + (high - low) * parts
    return magnitudes


def _codes(how: Compression, values: Floats, levels: Words) -> Words:
    """Return the sign of each value, and behind it the number of the nearest magnitude."""
    magnitudes = _magnitudes(how, levels)
    between: Floats = (magnitudes[:, 1:] + magnitudes[:, :-1]) / np.float32(2)
    numbers = np.zeros(values.shape, np.uint32)
    for column in between.T:
        numbers += np.abs(values) > column[:, None]
    return (np.signbit(values).astype(np.uint32) << np.uint32(how.bits - 1)) | numbers


def _values(how: Compression, words: Words, levels: Words) -> Floats:
    """Return what words stand for."""
    sign_bit = np.uint32(1 << (how.bits - 1))
    numbers = (words & (sign_bit - np.uint32(1))).astype(np.intp)
    magnitudes = np.take_along_axis(_magnitudes(how, levels), numbers, 1)
    return np.where((words & sign_bit) != 0, -magnitudes, magnitudes)


def _exchange(words: Words, levels: Words) -> None:
    """Write the levels into the order of ascending words."""
    pairs = words[:, :_KEPT_WITH_ORDER].reshape(len(words), _LEVEL_BITS, 2)
    is_set = (levels[:, None] >> np.arange(_LEVEL_BITS, dtype=np.uint32)) & 1 != 0
    words[:, :_KEPT_WITH_ORDER] = np.where(is_set[:, :, None], pairs[:, :, ::-1], pairs).reshape(
        len(words), _KEPT_WITH_ORDER
    )


def _levels_of_order(index: Words) -> Words:
    """Return the levels that the order of words carries."""
    pairs = index[:, :_KEPT_WITH_ORDER].reshape(len(index), _LEVEL_BITS, 2)
    is_set = (pairs[:, :, 0] > pairs[:, :, 1]).astype(np.uint32)
    levels: Words = np.bitwise_or.reduce(is_set << np.arange(_LEVEL_BITS, dtype=np.uint32), axis=1)
    return levels


def _to_bytes(words: Words, word_bits: int) -> Bytes:
    """Return the lower bits of words, one behind the other."""
    bits = np.unpackbits(words.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)
    return np.packbits(bits[:, 32 - word_bits :])


def _to_words(message: Bytes, count: int, word_bits: int) -> Words:
    bits = np.zeros((count, 32), np.uint8)
    unpacked = np.unpackbits(message, count=count * word_bits)
    bits[:, 32 - word_bits :] = unpacked.reshape(count, word_bits)
    return np.packbits(bits, axis=1).view(">u4").astype(np.uint32).reshape(-1)


def _blocks(how: Compression, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield how many chunks are packed at once, and where their values begin and end."""
    size = _CHUNKS_AT_ONCE * how.chunk
    for begin in range(0, count, size):
        end = min(begin + size, count)
        yield -(-(end - begin) // how.chunk), begin, end


def _chunks(how: Compression, values: Floats) -> int:
    return -(-len(values) // how.chunk)


def _has_order(how: Compression) -> bool:
    return how.kept >= _KEPT_WITH_ORDER


def _word_bits(how: Compression) -> int:
    return (how.chunk - 1).bit_length() + how.bits
