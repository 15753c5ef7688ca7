"""The kernels of block quantisation on a Host device, as calls of the CPU's kernels.

A last block that is not full is processed in separate memory, as by the CPU's own callers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.kernels.block_message import BLOCK, message_bytes, scales_bytes
from gpucoll.kernels.cpu import addresses
from gpucoll.kernels.cpu.addresses import CopyKind, Kernel, address_of

__all__ = ["block_calls"]

_COPY = CopyKind("read", "write")
_FLOAT_BYTES = 4
_ONE_BITS = 0x3F800000
"""The bits of 1.0 as float32."""


class _Calls:
    """Calls in the order in which they run, with the memory that they use."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.keep: list[Any] = []

    def words(self, values: Any, dtype: Any) -> int:
        """Return the address of values that live as long as the calls."""
        held = np.array(values, dtype)
        self.keep.append(held)
        return int(held.ctypes.data)

    def scratch(self, count: int) -> int:
        """Return the address of `count` float32, all zero."""
        return self.words(np.zeros(count, np.float32), np.float32)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy bytes."""
        if size_bytes:
            self.made.append((addresses.copy_kernel(_COPY), destination, source, size_bytes, 0))

    def add(self, total: int, left: int, right: int, count: int) -> None:
        """Add float32 numbers up."""
        to, of = self.words([total], np.int64), self.words([left, right], np.int64)
        self.made.append((addresses.reduce_kernel("float32", "sum"), to, 1, of, 2, count, 0, 0))


def block_calls(name: str, arguments: npt.NDArray[Any]) -> tuple[list[tuple[int, ...]], Any]:
    """Return the calls of a kernel of `gpucoll.kernels.gpu.quantise`, and objects they use."""
    which, _, rest = name.partition("_")
    given = {field: int(arguments[0][field]) for field in arguments.dtype.names or ()}
    calls = _Calls()
    blocks = given["blocks"]
    if which == "dequantise":
        _dequantise(calls, rest, given, given["array"], given["count"])
        return calls.made, calls.keep
    block_format, _, rounding = rest.rpartition("_")
    by_chance = rounding == "stochastic"
    if which == "requantise":
        floats = calls.scratch(BLOCK * blocks)
        _dequantise(calls, block_format, given, floats, BLOCK * blocks)
        _quantise(calls, block_format, given, floats, given["result"], by_chance)
        if given["residual"]:
            _keep_lost(calls, block_format, {**given, "message": given["result"]}, floats, True)
        return calls.made, calls.keep
    floats, count, residual = given["array"], given["count"], given["residual"]
    padded = floats
    if residual or count < BLOCK * blocks:  # missing elements count as zeros
        padded = calls.scratch(BLOCK * blocks)
        if residual:
            calls.add(padded, floats, residual, count)
        else:
            calls.copy(padded, floats, _FLOAT_BYTES * count)
    _quantise(calls, block_format, given, padded, given["message"], by_chance)
    if residual:
        _keep_lost(calls, block_format, given, padded)
    return calls.made, calls.keep


def _quantise(
    calls: _Calls,
    block_format: str,
    given: dict[str, int],
    floats: int,
    message: int,
    by_chance: bool,
) -> None:
    """Make a message of whole blocks."""
    blocks, start = given["blocks"], scales_bytes(given["blocks"])
    gap = start - _FLOAT_BYTES * blocks
    calls.copy(message + _FLOAT_BYTES * blocks, calls.words(np.zeros(gap + 1), np.uint8), gap)
    random = calls.words([given[each] for each in ("seed", "sequence", "first_block")], np.uint64)
    kernel = _quantise_kernel(block_format, by_chance)
    calls.made.append((kernel, message, message + start, floats, blocks, random))


def _dequantise(
    calls: _Calls, block_format: str, given: dict[str, int], floats: int, count: int
) -> None:
    """Add messages up, divided or not; a last block that is not full is made separately."""
    blocks, messages = given["blocks"], given["message"]
    bits = given["divisor"]
    divisor = calls.words([bits], np.uint64)  # its lower half is the float
    kernel = _dequantise_kernel(block_format, bits != 0)
    start, stride = scales_bytes(blocks), message_bytes(blocks)
    whole, rest = divmod(min(count, BLOCK * blocks), BLOCK)
    sources = given["messages"] or 1
    calls.made.append((kernel, floats, messages, stride, start, sources, whole, divisor))
    if rest:
        # The last block is a message of its own: its scale is where that message begins.
        scale, codes, last = _FLOAT_BYTES * whole, start + BLOCK * whole, calls.scratch(BLOCK)
        first = messages + scale
        calls.made.append((kernel, last, first, stride, codes - scale, sources, 1, divisor))
        calls.copy(floats + _FLOAT_BYTES * BLOCK * whole, last, _FLOAT_BYTES * rest)


def _keep_lost(
    calls: _Calls, block_format: str, given: dict[str, int], held: int, of_sum: bool = False
) -> None:
    """Store in the residual what the message has lost of the held values; for a sum, add it."""
    blocks, divisor = given["blocks"], given["divisor"]
    meant = calls.scratch(BLOCK * blocks)
    _dequantise(calls, block_format, {**given, "messages": 1, "divisor": 0}, meant, BLOCK * blocks)
    name = "gpucoll_lost_of_sum" if of_sum else "gpucoll_lost"
    kernel = address_of(Kernel(name, ("lost", "emit_lost"), (of_sum,)))
    factor = calls.words([divisor or _ONE_BITS], np.uint64)
    calls.made.append((kernel, given["residual"], held, meant, given["count"], factor))


@functools.cache
def _quantise_kernel(block_format: str, by_chance: bool) -> int:
    name = f"gpucoll_quantise_{block_format}{'_by_chance' if by_chance else ''}"
    emitter = ("quantise_kernels", "emit_quantise")
    return address_of(Kernel(name, emitter, (block_format, by_chance)))


@functools.cache
def _dequantise_kernel(block_format: str, divides: bool) -> int:
    name = f"gpucoll_dequantise_{block_format}{'_divided' if divides else ''}"
    emitter = ("quantise_kernels", "emit_dequantise")
    return address_of(Kernel(name, emitter, (block_format, divides)))
