"""Pack and unpack against the reference: any arrays, as they are and with a cast."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests.dtypes import any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.kernels import reference_compression as reference
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import pack
from gpucoll.types import DTYPES

COUNTS = (0, 1, 3, 16, 17, 0, 100, 255, 256, 257, 1000, 5)


@dataclass
class Piece:
    address: int
    count: int
    dtype: str
    item_bytes: int


def pieces_of(guarded: list[Guarded]) -> list[Piece]:
    arrays = [one.array for one in guarded]
    return [Piece(x.ctypes.data, x.size, x.dtype.name, x.dtype.itemsize) for x in arrays]


def filled(dtypes: tuple[str, ...], counts: tuple[int, ...] = COUNTS) -> list[Guarded]:
    """Return arrays of these dtypes in turn, at all addresses."""
    made = []
    for place, count in enumerate(counts):
        dtype = dtypes[place % len(dtypes)]
        made.append(Guarded(count, dtype_of(dtype), place % 7))
        made[-1].array[...] = any_values(dtype, count, place)
    return made


def check(dtypes, dtype=None, scale=None, alignment_bytes=16, counts=COUNTS):
    """Pack, compare; unpack what was packed into arrays like the first, compare."""
    guarded = filled(dtypes, counts)
    arrays = [one.array.copy() for one in guarded]
    expected = reference.pack(arrays, dtype, scale, alignment_bytes)
    items = [x.dtype.itemsize if dtype is None else dtype_of(dtype).itemsize for x in arrays]
    offsets = pack.layout(
        [x.size * item for x, item in zip(arrays, items, strict=True)], alignment_bytes
    )
    buffer = Guarded(offsets[-1], np.uint8, 3)
    at = buffer.array.ctypes.data

    pack.prepare_pack(pieces_of(guarded), at, offsets, dtype=dtype, scale=scale)()

    views = zip(offsets, arrays, items, strict=False)
    for place, (start, x, item) in enumerate(views):
        end = start + x.size * item
        kind = x.dtype if dtype is None else dtype_of(dtype)
        got, wanted = (bytes_[start:end].copy().view(kind) for bytes_ in (buffer.array, expected))
        assert_same(got, wanted, f"array {place}")
        assert not buffer.array[end : offsets[place + 1]].any(), f"after array {place}"
    buffer.check()

    landed = [Guarded(x.size, x.dtype, (place + 3) % 7) for place, x in enumerate(arrays)]
    pack.prepare_unpack(pieces_of(landed), at, offsets, dtype=dtype, scale=scale)()
    for (start, x, item), one in zip(
        zip(offsets, arrays, items, strict=False), landed, strict=True
    ):
        kind = x.dtype if dtype is None else dtype_of(dtype)
        packed = expected[start : start + x.size * item].copy().view(kind)
        same = dtype is None and scale is None
        assert_same(one.array, packed if same else reference.convert(packed, x.dtype.name, scale))
        one.check()
    for one, x in zip(guarded, arrays, strict=True):
        assert_same(one.array, x)
        one.check()


@pytest.mark.parametrize("alignment_bytes", [16, 64, 1024])
def test_every_dtype_as_it_is(alignment_bytes):
    check(DTYPES, alignment_bytes=alignment_bytes, counts=COUNTS + COUNTS)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("scale", [None, 0.37, -(2.0**-130), 3e38])
@pytest.mark.parametrize("dtype", CONVERTIBLE)
def test_conversion(dtype, scale):
    check(CONVERTIBLE, dtype, scale, counts=COUNTS + COUNTS)


def test_float64_with_a_scale():
    check(("float64",), "float64", 0.1)
    check(("float64",), None, 0.1)


def test_each_keeps_its_dtype_and_is_scaled():
    check(CONVERTIBLE, None, 0.1)


def test_no_arrays_and_many():
    check(("float32",), counts=())
    check(("float32",), counts=(0,))
    check(("float32", "int8"), counts=tuple(range(500)))


def test_streaming_copies(monkeypatch):
    """What a very large pack uses: stores that pass by the caches, from any address to any."""
    monkeypatch.setattr(pack, "_STREAMING_MIN_BYTES", 0)
    check(DTYPES, counts=(*COUNTS, 70_001, 4096, 63, 64, 65))


@pytest.mark.parametrize(
    ("source", "dtype", "scale"),
    [
        ("int32", "float32", None),
        ("float64", "float32", None),
        ("float32", "float64", 2.0),
        ("int8", None, 2.0),
        ("complex64", None, 2.0),
        ("float32", "int8", None),
    ],
)
def test_what_does_not_convert_is_refused(source, dtype, scale):
    piece = Piece(0, 0, source, 1)
    for prepare in (pack.prepare_pack, pack.prepare_unpack):
        with pytest.raises(TypeError, match=source):
            prepare([piece], 0, [0, 0], dtype=dtype, scale=scale)
