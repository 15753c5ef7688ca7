"""Launch the block quantisation kernels. `docs/gpu_kernels.md` describes the messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.block_message import BLOCK, message_bytes
from gpucoll.kernels.gpu.launch import buffer_of, struct, target_of
from gpucoll.kernels.gpu.source import THREADS, Kernel

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.arrays.library import AnyArray, AnyStream

FORMATS = {
    "int8": "BlockInt8",
    "float8_e4m3fn": "BlockFloat8E4m3fn",
    "float8_e5m2": "BlockFloat8E5m2",
}
"""Block format -> its type in ``quantise.cu``."""

_WORDS = ("array", "message", "count", "blocks", "messages", "result", "divisor", "residual")
ARGUMENTS = np.dtype([(name, "u8") for name in (*_WORDS, "seed", "sequence", "first_block")])
"""``QuantiseArguments`` of ``quantise.cu``."""
_WARP = 32
_WORD = 1 << 64


class Rounding(TypedDict, total=False):
    """The arguments of `prepare_quantise` that say how it rounds, and where it keeps the errors."""

    seed: int | None
    sequence: int
    first_block: int
    residual: AnyArray | None


def block_kernel(which: str, block_format: str, is_stochastic: bool = False) -> Kernel:
    """Return the kernel that does `which`: "quantise", "dequantise" or "requantise"."""
    if block_format not in FORMATS:
        raise ArgumentError(
            f"block_format must be one of {', '.join(FORMATS)}; got {block_format!r}"
        )
    if which == "dequantise":
        name = f"dequantise_{block_format}"
        return Kernel(name, "quantise.cu", f"DEQUANTISE({name}, {FORMATS[block_format]})")
    name = f"{which}_{block_format}_{'stochastic' if is_stochastic else 'nearest'}"
    truth = "true" if is_stochastic else "false"
    definition = f"{which.upper()}({name}, {FORMATS[block_format]}, {truth})"
    return Kernel(name, "quantise.cu", definition)


@functools.cache
def kernels() -> list[Kernel]:
    """Return every quantisation kernel."""
    made = [block_kernel("dequantise", block_format) for block_format in FORMATS]
    for which in ("quantise", "requantise"):
        for is_stochastic in (False, True):
            made += [block_kernel(which, name, is_stochastic) for name in FORMATS]
    return made


def load_kernels(block_format: str, is_stochastic: bool, like: Buffer) -> None:
    """Compile and load the kernels for a format on a buffer's device, before they are launched."""
    target = target_of([like])
    for which in ("quantise", "requantise", "dequantise"):
        target.load(block_kernel(which, block_format, is_stochastic))


def quantise(
    source: AnyArray,
    message: AnyArray,
    block_format: str,
    *,
    blocks: int,
    stream: AnyStream = None,
    **options: Unpack[Rounding],
) -> None:
    """Fill a message with the codes of `source`: see `prepare_quantise`. Enqueues and returns.

    For `stream` see `gpucoll.kernels.gpu.launch.target_of`.
    """
    enqueue = prepare_quantise(source, message, block_format, blocks=blocks, **options)
    enqueue(_stream_of(source, "source", stream))


def prepare_quantise(
    source: AnyArray,
    message: AnyArray,
    block_format: str,
    *,
    blocks: int,
    seed: int | None = None,
    sequence: int = 0,
    first_block: int = 0,
    residual: AnyArray | None = None,
) -> Callable[[int], None]:
    """Return a function that fills a message with the codes of `source`, on a given stream.

    It does not keep any array alive.

    Parameters
    ----------
    source : array of float32
        On a GPU, C-contiguous, of at most ``256 * blocks`` elements; missing elements count as
        zeros.
    message : array of one-byte elements
        At a multiple of 16 bytes; exactly `message_bytes` of it are written.
    block_format : str
        "int8", "float8_e4m3fn" or "float8_e5m2".
    blocks : int
        Number of blocks of the message.
    seed : int, optional
        Round stochastically, with Philox bits that depend only on seed, sequence and the number of
        the element (all 64-bit). Default: round to nearest even.
    first_block : int
        Number of the first block, for the random bits.
    residual : array of float32, optional
        Of the source's size. It is added to the source first; then what quantisation has lost of
        the sum is written back to it (zero where that is not finite): error feedback.

    Notes
    -----
    A block with a NaN or an infinity becomes NaN. Cost: one pass; 4 bytes read and 1.016 written
    per element.
    """
    given, made = _floats(source, "source", blocks), _message(message, "message", blocks, 1)
    buffers = [given, made]
    kept = 0
    if residual is not None:
        lost = _floats(residual, "residual", blocks)
        if lost.count != given.count:
            raise ArgumentError(f"residual has {lost.count} elements, source {given.count}")
        buffers.append(lost)
        kept = lost.address
    kernel = block_kernel("quantise", block_format, seed is not None)
    return _prepared(
        kernel,
        buffers,
        blocks,
        array=given.address,
        message=made.address,
        count=given.count,
        residual=kept,
        seed=(seed or 0) % _WORD,
        sequence=sequence % _WORD,
        first_block=first_block % _WORD,
    )


def dequantise(
    messages: AnyArray,
    destination: AnyArray,
    block_format: str,
    *,
    blocks: int,
    sources: int = 1,
    divisor: float | None = None,
    stream: AnyStream = None,
) -> None:
    """Fill `destination` from messages: see `prepare_dequantise`. Enqueues and returns."""
    enqueue = prepare_dequantise(
        messages, destination, block_format, blocks=blocks, sources=sources, divisor=divisor
    )
    enqueue(_stream_of(destination, "destination", stream))


def prepare_dequantise(
    messages: AnyArray,
    destination: AnyArray,
    block_format: str,
    *,
    blocks: int,
    sources: int = 1,
    divisor: float | None = None,
) -> Callable[[int], None]:
    """Return a function that fills `destination` with the values of messages, added in order.

    Parameters
    ----------
    messages : array of one-byte elements
        `sources` messages of equal numbers of blocks, one after another; at a multiple of 16 bytes.
    destination : array of float32
        Of at most ``256 * blocks`` elements.
    block_format, blocks
        As in `prepare_quantise`.
    sources : int
        Number of messages.
    divisor : float, optional
        The sum is divided by it.
    """
    given = _message(messages, "messages", blocks, sources)
    written = _floats(destination, "destination", blocks)
    return _prepared(
        block_kernel("dequantise", block_format),
        [written, given],
        blocks,
        array=written.address,
        message=given.address,
        count=written.count,
        messages=sources,
        divisor=_divisor_bits(divisor),
    )


def requantise(
    messages: AnyArray,
    result: AnyArray,
    block_format: str,
    *,
    blocks: int,
    sources: int,
    divisor: float | None = None,
    stream: AnyStream = None,
    **options: Unpack[Rounding],
) -> None:
    """Add messages up and quantise the sum: see `prepare_requantise`. Enqueues and returns."""
    enqueue = prepare_requantise(
        messages, result, block_format, blocks=blocks, sources=sources, divisor=divisor, **options
    )
    enqueue(_stream_of(result, "result", stream))


def prepare_requantise(
    messages: AnyArray,
    result: AnyArray,
    block_format: str,
    *,
    blocks: int,
    sources: int,
    divisor: float | None = None,
    seed: int | None = None,
    sequence: int = 0,
    first_block: int = 0,
    residual: AnyArray | None = None,
) -> Callable[[int], None]:
    """Return a function that dequantises messages and quantises the result, in one pass.

    The bits are those of `dequantise` followed by `quantise`.

    Parameters
    ----------
    result : array of one-byte elements
        The resulting message; it may be any of the messages that are read.
    residual : array of float32, optional
        Of at most ``256 * blocks`` elements. What the result has lost of the sum, times the
        divisor, is added to it (zero where that is not finite).
    messages, block_format, blocks, sources, divisor, seed, sequence, first_block
        As in `prepare_dequantise` and `prepare_quantise`.
    """
    given = _message(messages, "messages", blocks, sources)
    made = _message(result, "result", blocks, 1)
    kept = None if residual is None else _floats(residual, "residual", blocks)
    return _prepared(
        block_kernel("requantise", block_format, seed is not None),
        [made, given, *([] if kept is None else [kept])],
        blocks,
        message=given.address,
        count=BLOCK * blocks if kept is None else kept.count,
        messages=sources,
        result=made.address,
        residual=0 if kept is None else kept.address,
        divisor=_divisor_bits(divisor),
        seed=(seed or 0) % _WORD,
        sequence=sequence % _WORD,
        first_block=first_block % _WORD,
    )


def _prepared(
    kernel: Kernel, buffers: list[Buffer], blocks: int, **values: int
) -> Callable[[int], None]:
    target = target_of(buffers)
    if not blocks:
        return lambda stream: None
    arguments = struct(ARGUMENTS, blocks=blocks, **values)
    return target.prepared(kernel, -(-blocks * _WARP // THREADS), [arguments])


def _stream_of(x: AnyArray, what: str, stream: AnyStream) -> int:
    return target_of([buffer_of(x, what)], stream).stream


def _divisor_bits(divisor: float | None) -> int:
    """Return a divisor's bits; 0, the bits of 0.0, means no division."""
    if divisor is None:
        return 0
    if divisor == 0:
        raise ArgumentError("divisor must not be 0")
    return int(np.float32(divisor).view(np.uint32))


def _floats(x: AnyArray, what: str, blocks: int) -> Buffer:
    buffer = buffer_of(x, what)
    if buffer.dtype != "float32":
        raise ArgumentTypeError(f"{what} must be float32; it is {buffer.dtype}: cast it first")
    if buffer.count > BLOCK * blocks:
        raise ArgumentError(
            f"{what} has {buffer.count} elements; {blocks} blocks hold {BLOCK * blocks}"
        )
    return buffer


def _message(x: AnyArray, what: str, blocks: int, messages: int) -> Buffer:
    buffer = buffer_of(x, what)
    needed = message_bytes(blocks) * messages
    if buffer.item_bytes != 1:
        raise ArgumentTypeError(f"{what} must have elements of one byte; it is {buffer.dtype}")
    if messages < 1 or buffer.count < needed or buffer.address % 16:
        raise ArgumentError(
            f"{what} must have {needed} bytes at a multiple of 16, of at least one message; it has "
            f"{buffer.count} at {buffer.address:#x}"
        )
    return buffer
