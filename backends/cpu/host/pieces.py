"""The pieces of a movement, with sender and receiver: their sizes and places, in bytes.

A piece is the data that one rank sends to another. The input of a *spread* movement (scatter,
all_to_all, reduce_scatter) is one block for each rank; in other movements every rank gets the whole
input. The blocks of an input or output may be separate arrays: then a table has their addresses.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import load64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import payload_of
from gpucoll.transport.shared.words import Call, Context

_MORE_THAN_INLINE = layout.INLINE_BYTES + 1  # for such sizes the header gives the input's place


@inline
def block_offset(call: Call, rank: int) -> int:
    """Return the offset of block `rank` in the larger array."""
    table = call.offsets
    return rank * call.block_bytes if not table else table[rank]


@inline
def block_bytes(call: Call, rank: int) -> int:
    """Return the size of block `rank`."""
    table = call.offsets
    return call.block_bytes if not table else table[rank + 1] - table[rank]


@inline
def table_bytes(context: Context) -> int:
    """Return the size of a rank's posted tables: of its pieces, and of its inputs."""
    return 24 * context.world_size


@inline
def posted_pieces(context: Context, rank: int) -> int:
    """Return the table that `rank` has posted: bytes to each rank, then bytes from each rank."""
    size_bytes = max(table_bytes(context), _MORE_THAN_INLINE)
    return payload_of(context, context.sequence, rank, size_bytes)


@inline
def piece_bytes(context: Context, call: Call, sender: int, receiver: int) -> int:
    """Return how many bytes go from `sender` to `receiver`."""
    if call.pieces:
        return load64(posted_pieces(context, sender) + 8 * receiver)
    return block_bytes(call, receiver if call.spreads else sender)


@inline
def piece_offset(context: Context, call: Call, sender: int, receiver: int) -> int:
    """Return the offset of the piece for `receiver` in the input of `sender`."""
    if not call.spreads:
        return 0
    if not call.pieces:
        return block_offset(call, receiver)
    offset = 0
    for rank in range(receiver):
        offset += piece_bytes(context, call, sender, rank)
    return offset


@inline
def input_piece(context: Context, call: Call, receiver: int) -> int:
    """Return the address of this rank's own piece for `receiver`."""
    table = call.inputs
    if table:
        return table[receiver]
    return call.source + piece_offset(context, call, context.rank, receiver)


@inline
def posted_inputs(context: Context, rank: int) -> int:
    """Return the table of addresses that `rank` posted for an input of several arrays."""
    return posted_pieces(context, rank) + 16 * context.world_size


@inline
def landing(call: Call, sender: int) -> int:
    """Return the offset of the piece from `sender` in this rank's output."""
    if not call.gathers:
        return 0
    table = call.landings
    return block_offset(call, sender) if not table else table[sender]


@inline
def pieces_agree(context: Context) -> bool:
    """Return whether all ranks expect what the others send them; the same on all ranks."""
    world_size = context.world_size
    for sender in range(world_size):
        for receiver in range(world_size):
            sent = load64(posted_pieces(context, sender) + 8 * receiver)
            expected = posted_pieces(context, receiver) + 8 * (world_size + sender)
            if sent != load64(expected):
                return False
    return True


@inline
def largest_piece_bytes(context: Context, call: Call) -> int:
    """Return the size of the largest piece of all; the same on all ranks."""
    world_size, largest = context.world_size, 0
    if not call.pieces:
        for rank in range(world_size):
            largest = max(largest, block_bytes(call, rank))
        return largest
    for sender in range(world_size):
        for receiver in range(world_size):
            largest = max(largest, piece_bytes(context, call, sender, receiver))
    return largest
