"""Inputs and outputs of several pieces: a list of arrays, reduced as if it were one array.

The call's table has a row for each array: its end in the whole, and the addresses of its input and
output minus its beginning in the whole. Adding an offset in the whole gives an address. A call
without a table has one piece.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.words import Call


@inline
def segment_at(call: Call, offset: int) -> int:
    """Return the number of the piece that contains this offset in the whole."""
    low, high = 0, call.n_segments
    while low < high:
        middle = (low + high) // 2
        if call.segments[middle].end > offset:
            high = middle
        else:
            low = middle + 1
    return low


@inline
def run_bytes(call: Call, segment: int, offset: int, most_bytes: int) -> int:
    """Return how much of the whole is contiguous from this offset on, at most `most_bytes`."""
    if not call.segments:
        return most_bytes
    return min(call.segments[segment].end - offset, most_bytes)


@inline
def input_at(call: Call, segment: int, offset: int) -> int:
    """Return the address of an offset of the whole input."""
    if not call.segments:
        return call.source + offset
    return call.segments[segment].input + offset


@inline
def output_at(call: Call, segment: int, offset: int) -> int:
    """Return the address of an offset of the whole output."""
    if not call.segments:
        return call.destination + offset
    return call.segments[segment].output + offset


@inline
def copy_in(
    call: Call, kernel: int, destination: int, offset: int, size_bytes: int, ahead: int
) -> None:
    """Copy a part of the whole input to contiguous memory."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, destination + done, input_at(call, segment, offset + done), step, ahead)
        done += step
        segment += 1


@inline
def copy_out(
    call: Call, kernel: int, source: int, offset: int, size_bytes: int, ahead: int
) -> None:
    """Copy contiguous memory to a part of the whole output."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, output_at(call, segment, offset + done), source + done, step, ahead)
        done += step
        segment += 1


@inline
def is_one_piece(call: Call) -> bool:
    """Return whether input and output are one array each."""
    return not call.segments
