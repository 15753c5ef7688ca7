"""The call block of a call with counts or lists of blocks, and the check of its memory.

The block is the same as ``BlockMaker.of`` of the CPU backend writes, from the values that
`block_arguments` has read.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DIMENSIONS, ARRAY_N_DIMENSIONS
from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.entries.block_arguments import (
    LANDINGS_TABLE,
    OFFSETS,
    PIECES_TABLE,
    RECEIVED,
    SENT,
    are_all,
    are_equal,
    table_of,
)
from gpucoll.entries.collectives import mix
from gpucoll.entries.words import EntryTable
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import load32_acquire, load64
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS, UNKNOWN_BYTES
from gpucoll.transport.shared.words import Call


@inline
def is_exchange(call: Call) -> bool:
    """Return whether this is an all_to_all: ranks know only the rows that they send and get."""
    return call.spreads != 0 and call.gathers != 0


@inline
def show(call: Call, x: int, rows: int) -> None:
    """Note an input's shape for the record of the call: the shape of x, with `rows` rows."""
    n_dimensions, dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS), load64(x + ARRAY_DIMENSIONS)
    call.n_dimensions = n_dimensions
    call.dimensions[0] = rows
    for place in range(1, min(n_dimensions, SHOWN_DIMENSIONS)):
        call.dimensions[place] = load64(dimensions + 8 * place)


@inline
def describe_equal(call: Call, x: int, rows: int, row_count: int, world_size: int) -> None:
    """Describe blocks of one size: ranks compare the whole shape, as in calls without lists."""
    call.n_counts = 0
    call.offsets = Words(0)
    call.pieces = Words(0)
    count = rows * row_count
    block_count = count // world_size if call.spreads else count
    call.block_bytes = block_count * call.item_bytes
    call.largest_bytes = call.block_bytes * call.largest_parts
    if call.signs_count:
        call.n_dimensions = 1
        call.dimensions[0] = block_count
        call.digest = mix(mix(call.base_digest, 1), block_count)
        return
    n_dimensions, dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS), load64(x + ARRAY_DIMENSIONS)
    digest = mix(mix(call.base_digest, n_dimensions), rows)
    for place in range(1, n_dimensions):
        digest = mix(digest, load64(dimensions + 8 * place))
    call.digest = digest


@inline
def _fill_offsets(counts: Words, offsets: Words, row_bytes: int, world_size: int) -> int:
    """Fill in the offsets of blocks, and the last one's end; return the largest block's size."""
    offset = largest = 0
    for rank in range(world_size):
        offsets[rank] = offset
        size_bytes = counts[rank] * row_bytes
        offset += size_bytes
        largest = max(largest, size_bytes)
    offsets[world_size] = offset
    return largest


@inline
def describe_counts(table: EntryTable, call: Call, row_count: int, world_size: int) -> None:
    """Describe blocks of different sizes whose counts all ranks know."""
    counts, offsets = table_of(table, SENT), table_of(table, OFFSETS)
    row_bytes = row_count * call.item_bytes
    largest = _fill_offsets(counts, offsets, row_bytes, world_size)
    call.n_counts = world_size
    call.counts = counts
    call.offsets = offsets
    call.pieces = Words(0)
    call.largest_bytes = offsets[world_size] if call.spreads else largest
    digest = mix(call.base_digest, row_count)
    for rank in range(world_size):
        digest = mix(digest, counts[rank])
    call.digest = digest


@inline
def _describe_pieces(table: EntryTable, call: Call, row_count: int, world_size: int) -> None:
    """Describe an all_to_all: ranks compare a row, and the sizes they send with those expected."""
    describe_counts(table, call, row_count, world_size)
    call.largest_bytes = UNKNOWN_BYTES
    call.digest = mix(call.base_digest, row_count)
    received, row_bytes = table_of(table, RECEIVED), row_count * call.item_bytes
    if not call.landings:
        _fill_offsets(received, table_of(table, LANDINGS_TABLE), row_bytes, world_size)
        call.landings = table_of(table, LANDINGS_TABLE)
    pieces = table_of(table, PIECES_TABLE)
    for rank in range(world_size):
        pieces[rank] = table_of(table, SENT)[rank] * row_bytes
        pieces[world_size + rank] = received[rank] * row_bytes
    call.pieces = pieces


@inline
def describe(
    table: EntryTable, call: Call, x: int, rows: int, row_count: int, is_given: int, world_size: int
) -> bool:
    """Describe the data that moves; return whether the entry can serve it."""
    if is_exchange(call):
        _describe_pieces(table, call, row_count, world_size)
        return True
    equal_rows = rows // world_size if call.spreads else rows
    if is_given:
        describe_counts(table, call, row_count, world_size)
    elif are_all(table, SENT, equal_rows, world_size):
        describe_equal(call, x, rows, row_count, world_size)
    else:
        me = table.context.rank
        if call.flow != Flow.ALL:
            return False  # the other ranks do not know the counts
        if call.spreads == 0 and table_of(table, SENT)[me] != rows:
            return False
        describe_counts(table, call, row_count, world_size)
    return True


@inline
def _is_in_place(table: EntryTable, call: Call, row_bytes: int, world_size: int) -> bool:
    """Return whether a single input and a single output are exactly in place."""
    me = table.context.rank
    ahead, offset = call.source - call.destination, 0
    if is_exchange(call):
        return ahead == 0 and are_equal(table, SENT, RECEIVED, world_size)
    for rank in range(me):
        offset += table_of(table, SENT)[rank] * row_bytes
    return ahead == (-offset if call.spreads else offset)


@inline
def _meet(one: int, one_bytes: int, other: int, other_bytes: int) -> bool:
    return one < other + other_bytes and other < one + one_bytes


@inline
def _shares_memory(
    table: EntryTable, call: Call, row_bytes: int, out_bytes: int, world_size: int
) -> bool:
    """Return whether memory that is written is also read, or written as another block."""
    counts = table_of(table, RECEIVED if is_exchange(call) else SENT)
    is_apart, inputs = call.destination == 0, call.inputs
    n_writes, n_reads = world_size if is_apart else 1, world_size if inputs else 1
    for place in range(n_writes):
        start = call.landings[place] if is_apart else call.destination
        size_bytes = counts[place] * row_bytes if is_apart else out_bytes
        for other in range(place + 1, n_writes):
            landing, other_bytes = call.landings[other], counts[other] * row_bytes
            if _meet(start, size_bytes, landing, other_bytes):
                return True
        for other in range(n_reads):
            read = inputs[other] if inputs else call.source
            read_bytes = call.size_bytes
            if inputs:
                read_bytes = table_of(table, SENT)[other] * row_bytes
            if _meet(start, size_bytes, read, read_bytes):
                return True
    return False


@inline
def memory_serves(
    table: EntryTable, call: Call, row_bytes: int, out_bytes: int, world_size: int
) -> bool:
    """Return whether the arrays have separate memory, or are in place as a whole."""
    is_one_each = call.destination != 0 and not call.inputs
    if is_one_each and _is_in_place(table, call, row_bytes, world_size):
        return True
    return not _shares_memory(table, call, row_bytes, out_bytes, world_size)
