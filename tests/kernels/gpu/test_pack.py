"""Pack, unpack and cast, compiled as host code, against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.dtypes import HALF_TYPES, any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels import reference_compression as reference
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.gpu.pack import cast, prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.source import TILE_BYTES, TILE_ELEMENTS

pytestmark = pytest.mark.usefixtures("on_host")

EVERY_DTYPE = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float64", "complex128")
NEAR = (0, 1, 3, 4, 5, 15, 16, 17, 255, 1023, 1024, 1025)
COUNTS = (*NEAR, *(TILE_ELEMENTS + step for step in (-1, 0, 1)), 3 * TILE_BYTES + 5)
SCALE = 0.3


def arrays_of(dtypes, counts, offsets=(0,)):
    """Return guarded arrays of random bits, of dtypes and at addresses in turn."""
    turns = zip(itertools.cycle(dtypes), itertools.cycle(offsets), strict=False)
    made = []
    for seed, (count, (dtype, offset)) in enumerate(zip(counts, turns, strict=False)):
        guarded = Guarded(count, dtype_of(dtype), offset)
        guarded.array[...] = any_values(dtype, count, seed)
        made.append(guarded)
    return made


def offsets_of(guarded, dtype=None, alignment_bytes=16):
    item_bytes = dtype_of(dtype).itemsize if dtype else 0
    sizes = [each.array.size * (item_bytes or each.array.itemsize) for each in guarded]
    return reference.layout(sizes, alignment_bytes)


def check_round_trip(guarded, dtype=None, scale=None, alignment_bytes=16, where=""):
    offsets = offsets_of(guarded, dtype, alignment_bytes)
    before = [each.array.copy() for each in guarded]
    buffer = Guarded(offsets[-1], np.uint8)
    arrays = [each.array for each in guarded]

    prepare_pack(arrays, buffer.array, offsets, dtype=dtype, scale=scale)()

    buffer.check(where)
    packed = buffer.array.copy()
    for x, start, end in zip(before, offsets[:-1], offsets[1:], strict=True):
        held = (
            x
            if dtype is None and scale is None
            else reference.convert(x, dtype or x.dtype.name, scale)
        )
        part = packed[start : start + held.nbytes].view(held.dtype)
        assert_same(part, held, where)
        assert not packed[start + held.nbytes : end].any(), where

    for each in guarded:
        each.poison()
    prepare_unpack(arrays, buffer.array, offsets, dtype=dtype, scale=scale)()

    assert np.array_equal(buffer.array, packed)
    for each, x, start in zip(guarded, before, offsets[:-1], strict=True):
        each.check(where)
        held_dtype = np.dtype(dtype) if dtype else x.dtype
        held = packed[start : start + x.size * held_dtype.itemsize].view(held_dtype)
        copies = held_dtype == x.dtype and scale is None
        expected = held if copies else reference.convert(held, x.dtype.name, scale)
        assert_same(each.array, expected, where)


@pytest.mark.parametrize("offsets", [(0,), (4,), (0, 1, 2, 8, 12, 3)], ids=str)
def test_copies_of_every_dtype(offsets):
    check_round_trip(arrays_of(EVERY_DTYPE, [*COUNTS, *COUNTS[::-1]], offsets))


def test_bits_of_nan_are_kept():
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype_of("float16"))
    buffer = np.zeros(codes.nbytes, np.uint8)
    for dtype in (None, "float16"):
        prepare_pack([codes], buffer, [0, codes.nbytes], dtype=dtype)()
        assert np.array_equal(buffer.view(np.uint16), codes.view(np.uint16))


def test_bits_of_nan_are_kept_beside_arrays_that_are_converted():
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype_of("float16"))
    buffer, back = np.zeros(codes.nbytes + 16, np.uint8), np.zeros_like(codes)
    offsets = [0, codes.nbytes, codes.nbytes + 16]
    prepare_pack([codes, zeros(8)], buffer, offsets, dtype="float16")()
    prepare_unpack([back, zeros(8)], buffer, offsets, dtype="float16")()
    assert np.array_equal(back.view(np.uint16), codes.view(np.uint16))


def test_hundreds_of_arrays():
    generator = np.random.default_rng(5)
    counts = np.exp(generator.uniform(0, np.log(3000), 500)).astype(int) * (np.arange(500) % 7 > 0)
    check_round_trip(arrays_of(EVERY_DTYPE, counts))
    check_round_trip(arrays_of(CONVERTIBLE, counts), "bfloat16", SCALE)


def test_gaps_are_zeroed():
    check_round_trip(arrays_of(("float32", "int8"), [5, 0, 256, 700, 1]), alignment_bytes=1024)
    buffer = Guarded(4096, np.uint8)
    prepare_pack([np.zeros(0)], buffer.array, [0, 4096])()
    buffer.check()
    assert not buffer.array.any()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_gap_behind_a_whole_tile_is_zeroed(dtype):
    x = np.ones(TILE_ELEMENTS, np.float32)
    size_bytes = x.nbytes if dtype is None else 2 * x.size
    buffer = Guarded(size_bytes + 48, np.uint8)
    prepare_pack([x], buffer.array, [0, size_bytes + 48], dtype=dtype)()
    buffer.check()
    assert not buffer.array[size_bytes:].any()


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("dtype", CONVERTIBLE)
def test_conversions(dtype, scale):
    for offsets in ((0,), (0, 4, 1, 2)):
        guarded = arrays_of(CONVERTIBLE, [*COUNTS, *NEAR], offsets)
        check_round_trip(guarded, dtype, scale, where=f"{dtype} {scale} {offsets}")


def test_a_scale_without_a_dtype():
    guarded = arrays_of(("float32", "float64", "bfloat16"), [*NEAR, TILE_ELEMENTS + 1])
    check_round_trip(guarded, None, SCALE)


def test_it_can_be_called_again():
    x, buffer = np.arange(100.0), np.zeros(800, np.uint8)
    run = prepare_pack([x], buffer, [0, 800])
    for value in (1, 2):
        x[...] = value
        run()
        assert (buffer.view(np.float64) == value).all()


@pytest.mark.parametrize(("source", "destination"), list(itertools.product(CONVERTIBLE, repeat=2)))
def test_casts(source, destination):
    for size, offset in itertools.product((0, 1, 5, 4095, 4096, 10_000), (0, 4, 7)):
        given, made = (
            Guarded(size, dtype_of(source), offset),
            Guarded(size, dtype_of(destination), 4),
        )
        given.array[...] = any_values(source, size, 3)
        cast(given.array, made.array)
        made.check()
        assert_same(made.array, reference.convert(given.array, destination), f"{size=} {offset=}")


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_code_and_every_rounding(dtype):
    """All codes, and float32 numbers on, beside and between any two of them."""
    width = dtype_of(dtype).itemsize
    codes = np.arange(1 << 8 * width, dtype=f"u{width}").view(dtype_of(dtype))
    wide, back = np.empty(codes.size, np.float32), np.empty_like(codes)
    cast(codes, wide)
    assert_same(wide, codes.astype(np.float32), dtype)
    cast(wide, back)
    assert_same(back, codes, dtype)

    finite = np.sort(wide[np.isfinite(wide)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    edge = np.float32(finite[-1] + (finite[-1] - finite[-2]) / 2)
    ends = np.array([edge, -edge, 1e38, -1e38, 1e-45, np.inf, -np.inf], np.float32)
    values = np.concatenate([middle, ends])
    infinity = np.float32(np.inf)
    for numbers in (values, np.nextafter(values, infinity), np.nextafter(values, -infinity)):
        made = np.empty(numbers.size, dtype_of(dtype))
        cast(numbers, made)
        with np.errstate(over="ignore"):
            assert_same(made, numbers.astype(dtype_of(dtype)), dtype)


def zeros(count, dtype="float32"):
    return np.zeros(count, dtype)


def aligned_bytes(count):
    return Guarded(count, np.uint8).array


@pytest.mark.parametrize(
    ("arrays", "offsets", "options", "error", "text"),
    [
        ([zeros(4)], [0], {}, ArgumentError, "1 arrays need 2 offsets; got 1"),
        ([zeros(4)], [0, 128], {}, ArgumentError, "buffer must have 128 bytes"),
        ([zeros(5)], [0, 16], {}, ArgumentError, r"arrays\[0\] takes 20 bytes"),
        (
            [zeros(1), zeros(1)],
            [0, 8, 16],
            {},
            ArgumentError,
            r"arrays\[1\] .* offsets are 8 and 16",
        ),
        ([zeros(4, "int32")], [0, 16], {"dtype": "float32"}, ArgumentTypeError, "int32 cannot be"),
        ([zeros(2, "c8")], [0, 16], {"scale": 2.0}, ArgumentTypeError, "complex64 with a scale"),
        ([zeros(2, "f8")], [0, 16], {"dtype": "float32"}, ArgumentTypeError, "float64 cannot be"),
        ([zeros(8)[::2]], [0, 16], {}, ArgumentError, r"arrays\[0\] must be C-contiguous"),
    ],
)
def test_refused(arrays, offsets, options, error, text):
    with pytest.raises(error, match=text):
        prepare_pack(arrays, aligned_bytes(64), offsets, **options)


def test_a_misaligned_buffer_is_refused():
    with pytest.raises(ArgumentError, match="at a multiple of 16"):
        prepare_pack([zeros(4)], aligned_bytes(64)[8:], [0, 16])


def test_casts_refused():
    with pytest.raises(ArgumentTypeError, match="float64 cannot be converted to float32"):
        cast(zeros(2, "f8"), zeros(2))
    with pytest.raises(ArgumentError, match="destination has 3 elements, source 2"):
        cast(zeros(2), zeros(3))
