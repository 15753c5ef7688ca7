"""The pieces of a movement, with sender and receiver: their sizes and places, in bytes.

A piece is the data that one rank sends to another. The input of a *spread* movement (scatter,
all_to_all, reduce_scatter) is one block for each rank; in other movements every rank gets the whole
input. The blocks of an input or output may be separate arrays: then a table has their addresses.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, load64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import (
    RANK,
    SEQUENCE,
    SOURCE,
    WORLD_SIZE,
    payload_of,
)
from gpucoll.transport.shared.words import Call

IS_SPREAD, PIECES = int(Call.IS_SPREAD), int(Call.PIECES)
LANDS_APART, LANDINGS = int(Call.LANDS_APART), int(Call.LANDINGS)
INPUTS = int(Call.INPUTS)
_BLOCK_BYTES, _OFFSETS = int(Call.BLOCK_BYTES), int(Call.OFFSETS)
_MORE_THAN_INLINE = layout.INLINE_BYTES + 1  # for such sizes the header gives the input's place


@inline
def block_offset(call, rank):
    """Return the offset of block `rank` in the larger array."""
    table = get(call, _OFFSETS)
    return rank * get(call, _BLOCK_BYTES) if table == 0 else get(table, rank)


@inline
def block_bytes(call, rank):
    """Return the size of block `rank`."""
    table = get(call, _OFFSETS)
    return get(call, _BLOCK_BYTES) if table == 0 else get(table, rank + 1) - get(table, rank)


@inline
def table_bytes(context):
    """Return the size of a rank's posted tables: of its pieces, and of its inputs."""
    return 24 * get(context, WORLD_SIZE)


@inline
def posted_pieces(context, rank):
    """Return the table that `rank` has posted: bytes to each rank, then bytes from each rank."""
    size_bytes = max(table_bytes(context), _MORE_THAN_INLINE)
    return payload_of(context, get(context, SEQUENCE), rank, size_bytes)


@inline
def piece_bytes(context, call, sender, receiver):
    """Return how many bytes go from `sender` to `receiver`."""
    if get(call, PIECES) != 0:
        return load64(posted_pieces(context, sender) + 8 * receiver)
    return block_bytes(call, receiver if get(call, IS_SPREAD) else sender)


@inline
def piece_offset(context, call, sender, receiver):
    """Return the offset of the piece for `receiver` in the input of `sender`."""
    if not get(call, IS_SPREAD):
        return 0
    if get(call, PIECES) == 0:
        return block_offset(call, receiver)
    offset = 0
    for rank in range(receiver):
        offset += piece_bytes(context, call, sender, rank)
    return offset


@inline
def input_piece(context, call, receiver):
    """Return the address of this rank's own piece for `receiver`."""
    table = get(call, INPUTS)
    if table != 0:
        return get(table, receiver)
    return get(call, SOURCE) + piece_offset(context, call, get(context, RANK), receiver)


@inline
def posted_inputs(context, rank):
    """Return the table of addresses that `rank` posted for an input of several arrays."""
    return posted_pieces(context, rank) + 16 * get(context, WORLD_SIZE)


@inline
def landing(call, sender):
    """Return the offset of the piece from `sender` in this rank's output."""
    if not get(call, LANDS_APART):
        return 0
    table = get(call, LANDINGS)
    return block_offset(call, sender) if table == 0 else get(table, sender)


@inline
def pieces_agree(context):
    """Return whether all ranks expect what the others send them; the same on all ranks."""
    world_size = get(context, WORLD_SIZE)
    for sender in range(world_size):
        for receiver in range(world_size):
            sent = load64(posted_pieces(context, sender) + 8 * receiver)
            expected = posted_pieces(context, receiver) + 8 * (world_size + sender)
            if sent != load64(expected):
                return False
    return True


@inline
def largest_piece_bytes(context, call):
    """Return the size of the largest piece of all; the same on all ranks."""
    world_size, largest = get(context, WORLD_SIZE), 0
    if get(call, PIECES) == 0:
        for rank in range(world_size):
            largest = max(largest, block_bytes(call, rank))
        return largest
    for sender in range(world_size):
        for receiver in range(world_size):
            largest = max(largest, piece_bytes(context, call, sender, receiver))
    return largest
