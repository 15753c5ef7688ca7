"""Launch the pack kernels: many arrays into one buffer and back, and casts of single arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyStream
from gpucoll.errors import ArgumentError
from gpucoll.kernels.conversion import CONVERTIBLE, check_conversion
from gpucoll.kernels.gpu.launch import Target, buffer_of, buffers_of, struct, target_of
from gpucoll.kernels.gpu.reduce import ELEMENTS
from gpucoll.kernels.gpu.source import TILE_BYTES, TILE_ELEMENTS, Kernel

SEGMENT = np.dtype(
    [(name, "u8") for name in ("array", "offset", "count", "first_tile", "kind", "padding")]
)
"""``Segment`` of ``pack.cu``."""
ARGUMENTS = np.dtype(
    [
        (name, "u8")
        for name in ("buffer", "table", "n_segments", "tiles", "share", "options", "scale")
    ]
    + [("only", SEGMENT)]
)
"""``PackArguments`` of ``pack.cu``."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_INTO_BUFFER, _HAS_SCALE = 1, 2
_ALIGNMENT_BYTES = 16

COPY = Kernel("copy_segments", "pack.cu", "COPY(copy_segments)")


def convert_kernel(dtype: str, is_pack: bool) -> Kernel:
    """Return the kernel that converts between arrays of any dtype and a buffer of `dtype`."""
    way = "pack" if is_pack else "unpack"
    if dtype == "float64":
        name = f"{way}_float64"
        return Kernel(name, "pack.cu", f"{way.upper()}_SCALED({name})")
    name = f"{way}_{dtype}"
    return Kernel(name, "pack.cu", f"{way.upper()}({name}, {ELEMENTS[dtype]})")


@functools.cache
def kernels() -> list[Kernel]:
    """Return every pack kernel."""
    dtypes = (*CONVERTIBLE, "float64")
    return [COPY, *(convert_kernel(dtype, way) for dtype in dtypes for way in (True, False))]


def load_kernels(like: Buffer, dtypes: Iterable[str] = (), held: str = "") -> None:
    """Compile and load the kernels that pack and unpack arrays on a buffer's device.

    Parameters
    ----------
    like : Buffer
    dtypes, held
        The dtypes of the arrays, and of all elements in the buffer; by default each array keeps its
        own.
    """
    target = target_of([like])
    if not held or {*dtypes} <= {held}:
        target.load(COPY)
        return
    for is_pack in (True, False):
        target.load(convert_kernel(held, is_pack))


@dataclass(frozen=True)
class _Segment:
    """An array with its place in the buffer."""

    array: Buffer
    offset: int
    padding: int


@dataclass(frozen=True)
class _Launch:
    """A kernel with its arguments, and the owners of their memory."""

    kernel: Kernel
    tiles: int
    arguments: Any
    owners: tuple[Any, ...]


def prepare_pack(
    arrays: Sequence[AnyArray],
    buffer: AnyArray,
    offsets: Sequence[int],
    *,
    dtype: str | None = None,
    scale: float | None = None,
    stream: AnyStream = None,
) -> Callable[[], None]:
    """Return a function that enqueues packing arrays into a buffer, and returns, at each call.

    Parameters
    ----------
    arrays : sequence of arrays
        On one GPU, C-contiguous, of any dtype and size.
    buffer : array
        At a multiple of 16 bytes. ``offsets[-1]`` bytes of it are written; the bytes between arrays
        become zero.
    offsets : sequence of int
        The offset of each array in the buffer, in bytes, a multiple of 16; and last the whole size:
        the result of `gpucoll.kernels.cpu.pack.layout`.
    dtype : str, optional
        The dtype of all elements in the buffer; by default each array keeps its own. float32,
        float16, bfloat16, float8_e4m3fn and float8_e5m2 convert into each other, rounded once, to
        nearest even. Values beyond the range become infinite, or NaN for float8_e4m3fn.
    scale : float, optional
        A factor, multiplied in float32 before the rounding (for float64 arrays, in float64).
    stream
        See `gpucoll.kernels.gpu.launch.target_of`; later calls use the same.

    Notes
    -----
    One launch, whatever the number of arrays (with a scale but no dtype, one for each dtype among
    them). The returned function keeps arrays, buffer and the table of them on the device alive;
    keep it until its work is done.

    Cost: each array is read once, and the buffer is written once. Preparing processes each array in
    Python, and copies a small table to the device.
    """
    return _prepare(arrays, buffer, offsets, dtype, scale, stream, is_pack=True)


def prepare_unpack(
    arrays: Sequence[AnyArray],
    buffer: AnyArray,
    offsets: Sequence[int],
    *,
    dtype: str | None = None,
    scale: float | None = None,
    stream: AnyStream = None,
) -> Callable[[], None]:
    """Return a function that fills arrays from a buffer; arguments as for `prepare_pack`."""
    return _prepare(arrays, buffer, offsets, dtype, scale, stream, is_pack=False)


def cast(
    source: AnyArray, destination: AnyArray, *, scale: float | None = None, stream: AnyStream = None
) -> None:
    """Convert an array's elements to another dtype. Enqueues and returns.

    Parameters
    ----------
    source, destination : array
        On one GPU, C-contiguous, of one size; their dtypes are two of float32, float16, bfloat16,
        float8_e4m3fn, float8_e5m2. They must not overlap.
    scale, stream
        As in `prepare_pack`.
    """
    given, written = buffer_of(source, "source"), buffer_of(destination, "destination")
    if given.count != written.count:
        raise ArgumentError(f"destination has {written.count} elements, source {given.count}")
    check_conversion(given.dtype, written.dtype, scale)
    target = target_of([written, given], stream)
    if given.count == 0:
        return
    # As if packed into a buffer that is the destination: elements may be written at any address.
    segments = [_Segment(given, 0, 0)]
    launch = _launch_of(segments, written, written.dtype, scale, target, is_pack=True)
    target.launch(launch.kernel, launch.tiles, [launch.arguments])


def _prepare(
    arrays: Sequence[AnyArray],
    buffer: AnyArray,
    offsets: Sequence[int],
    dtype: str | None,
    scale: float | None,
    stream: AnyStream,
    *,
    is_pack: bool,
) -> Callable[[], None]:
    whole, parts = buffer_of(buffer, "buffer"), buffers_of(arrays, "arrays")
    groups: dict[str, list[_Segment]] = {}
    for part, segment in zip(parts, _segments(parts, whole, offsets, dtype), strict=True):
        held = dtype or part.dtype
        ends = (part.dtype, held) if is_pack else (held, part.dtype)
        check_conversion(*ends, scale)
        if segment.array.count or segment.padding:
            groups.setdefault(held if dtype or scale is not None else "", []).append(segment)
    target = target_of([whole, *parts], stream)
    launches = [
        _launch_of(segments, whole, held, scale, target, is_pack=is_pack)
        for held, segments in groups.items()
    ]

    def run() -> None:
        for launch in launches:
            target.launch(launch.kernel, launch.tiles, [launch.arguments])

    return run


def _segments(
    parts: Sequence[Buffer], whole: Buffer, offsets: Sequence[int], dtype: str | None
) -> list[_Segment]:
    """Return each array with its place; raise if the places do not fit."""
    if len(offsets) != len(parts) + 1:
        raise ArgumentError(
            f"{len(parts)} arrays need {len(parts) + 1} offsets; got {len(offsets)}"
        )
    if whole.size_bytes < offsets[-1] or whole.address % _ALIGNMENT_BYTES:
        raise ArgumentError(
            f"buffer must have {offsets[-1]} bytes at a multiple of {_ALIGNMENT_BYTES}; it has "
            f"{whole.size_bytes} at {whole.address:#x}"
        )
    segments = []
    for place, (part, (start, end)) in enumerate(zip(parts, pairwise(offsets), strict=True)):
        size_bytes = part.count * (
            ITEM_BYTES.get(dtype, part.item_bytes) if dtype else part.item_bytes
        )
        if start % _ALIGNMENT_BYTES or start < 0 or end - start < size_bytes:
            raise ArgumentError(
                f"arrays[{place}] takes {size_bytes} bytes, from a multiple of {_ALIGNMENT_BYTES} "
                f"on; its offsets are {start} and {end}"
            )
        segments.append(_Segment(part, start, end - start - size_bytes))
    return segments


def _launch_of(
    segments: Sequence[_Segment],
    whole: Buffer,
    held: str,
    scale: float | None,
    target: Target,
    *,
    is_pack: bool,
) -> _Launch:
    """Return the launch that moves these segments; `held` is the buffer's dtype, if one."""
    copies = scale is None and all(segment.array.dtype == held or not held for segment in segments)
    rows, tiles = [], 0
    for segment in segments:
        array = segment.array
        count = array.size_bytes if copies else array.count
        padding = segment.padding if is_pack else 0
        kind = 0 if copies or held == "float64" else CONVERTIBLE.index(array.dtype)
        rows.append((array.address, segment.offset, count, tiles, kind, padding))
        tiles += max(-(-count // (TILE_BYTES if copies else TILE_ELEMENTS)), int(padding > 0))
    table = np.array(rows, SEGMENT)
    address, owner = 0, None
    if len(segments) > 1:
        address, owner = target.launcher.upload(table, target.number, target.stream)
    options = _INTO_BUFFER * is_pack | _HAS_SCALE * (scale is not None)
    width = np.float64 if held == "float64" else np.float32
    bits = width(scale or 0).view("u8" if held == "float64" else "u4")
    arguments = struct(
        ARGUMENTS,
        buffer=whole.address,
        table=address,
        n_segments=len(segments),
        tiles=tiles,
        share=-(-tiles // target.blocks(tiles)),
        options=options,
        scale=int(bits),
        only=table[0],
    )
    kernel = COPY if copies else convert_kernel(held, is_pack)
    return _Launch(kernel, tiles, arguments, (owner, whole, *segments))
