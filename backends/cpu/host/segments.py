"""Inputs and outputs of several pieces: a list of arrays, reduced as if it were one array.

The call's table has a row for each array: its end in the whole, and the addresses of its input and
output minus its beginning in the whole. Adding an offset in the whole gives an address. A call
without a table has one piece.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, get
from gpucoll.transport.shared.steps import DESTINATION, SOURCE
from gpucoll.transport.shared.words import Call

SEGMENTS, N_SEGMENTS = int(Call.SEGMENTS), int(Call.N_SEGMENTS)
SEGMENT_BYTES = 24
_END, _INPUT, _OUTPUT = 0, 1, 2


@inline
def segment_at(call, offset):
    """Return the number of the piece that contains this offset in the whole."""
    low, high = 0, get(call, N_SEGMENTS)
    table = get(call, SEGMENTS)
    while low < high:
        middle = (low + high) // 2
        if get(table + middle * SEGMENT_BYTES, _END) > offset:
            high = middle
        else:
            low = middle + 1
    return low


@inline
def run_bytes(call, segment, offset, most_bytes):
    """Return how much of the whole is contiguous from this offset on, at most `most_bytes`."""
    if get(call, SEGMENTS) == 0:
        return most_bytes
    return min(get(get(call, SEGMENTS) + segment * SEGMENT_BYTES, _END) - offset, most_bytes)


@inline
def input_at(call, segment, offset):
    """Return the address of an offset of the whole input."""
    if get(call, SEGMENTS) == 0:
        return get(call, SOURCE) + offset
    return get(get(call, SEGMENTS) + segment * SEGMENT_BYTES, _INPUT) + offset


@inline
def output_at(call, segment, offset):
    """Return the address of an offset of the whole output."""
    if get(call, SEGMENTS) == 0:
        return get(call, DESTINATION) + offset
    return get(get(call, SEGMENTS) + segment * SEGMENT_BYTES, _OUTPUT) + offset


@inline
def copy_in(call, kernel, destination, offset, size_bytes, ahead):
    """Copy a part of the whole input to contiguous memory."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, destination + done, input_at(call, segment, offset + done), step, ahead)
        done += step
        segment += 1


@inline
def copy_out(call, kernel, source, offset, size_bytes, ahead):
    """Copy contiguous memory to a part of the whole output."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, output_at(call, segment, offset + done), source + done, step, ahead)
        done += step
        segment += 1


@inline
def is_one_piece(call):
    """Return whether input and output are one array each."""
    return get(call, SEGMENTS) == 0
