"""The call block of a call with counts or lists of blocks, and the check of its memory.

The block is the same as ``BlockMaker.of`` of the CPU backend writes, from the values that
`block_arguments` has read.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DIMENSIONS, ARRAY_N_DIMENSIONS
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
from gpucoll.entries.collectives import TABLE_CONTEXT, mix
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, load32_acquire, load64, put
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS, UNKNOWN_BYTES
from gpucoll.transport.shared.steps import (
    COUNTS,
    DESTINATION,
    DIGEST,
    DIMENSIONS,
    LARGEST_BYTES,
    N_COUNTS,
    RANK,
    SIZE_BYTES,
    SOURCE,
)
from gpucoll.transport.shared.words import Call, Flow

FLOW, ALL, IS_SPREAD = int(Call.FLOW), int(Flow.ALL), int(Call.IS_SPREAD)
LANDS_APART, ITEM_BYTES = int(Call.LANDS_APART), int(Call.ITEM_BYTES)
INPUTS, LANDINGS = int(Call.INPUTS), int(Call.LANDINGS)
_OFFSETS, _PIECES = int(Call.OFFSETS), int(Call.PIECES)
_BLOCK_BYTES, _BASE_DIGEST = int(Call.BLOCK_BYTES), int(Call.BASE_DIGEST)
_SIGNS_COUNT, _LARGEST_PARTS = int(Call.SIGNS_COUNT), int(Call.LARGEST_PARTS)


@inline
def is_exchange(call):
    """Return whether this is an all_to_all: ranks know only the rows that they send and get."""
    return get(call, IS_SPREAD) != 0 and get(call, LANDS_APART) != 0


@inline
def show(call, x, rows):
    """Note an input's shape for the record of the call: the shape of x, with `rows` rows."""
    n_dimensions, dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS), load64(x + ARRAY_DIMENSIONS)
    put(call, DIMENSIONS, n_dimensions)
    put(call, DIMENSIONS + 1, rows)
    for place in range(1, min(n_dimensions, SHOWN_DIMENSIONS)):
        put(call, DIMENSIONS + 1 + place, load64(dimensions + 8 * place))


@inline
def describe_equal(call, x, rows, row_count, world_size):
    """Describe blocks of one size: ranks compare the whole shape, as in calls without lists."""
    put(call, N_COUNTS, 0)
    put(call, _OFFSETS, 0)
    put(call, _PIECES, 0)
    count = rows * row_count
    block_count = count // world_size if get(call, IS_SPREAD) else count
    put(call, _BLOCK_BYTES, block_count * get(call, ITEM_BYTES))
    put(call, LARGEST_BYTES, get(call, _BLOCK_BYTES) * get(call, _LARGEST_PARTS))
    if get(call, _SIGNS_COUNT):
        put(call, DIMENSIONS, 1)
        put(call, DIMENSIONS + 1, block_count)
        put(call, DIGEST, mix(mix(get(call, _BASE_DIGEST), 1), block_count))
        return
    n_dimensions, dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS), load64(x + ARRAY_DIMENSIONS)
    digest = mix(mix(get(call, _BASE_DIGEST), n_dimensions), rows)
    for place in range(1, n_dimensions):
        digest = mix(digest, load64(dimensions + 8 * place))
    put(call, DIGEST, digest)


@inline
def _fill_offsets(counts, offsets, row_bytes, world_size):
    """Fill in the offsets of blocks, and the last one's end; return the largest block's size."""
    offset = largest = 0
    for rank in range(world_size):
        put(offsets, rank, offset)
        size_bytes = get(counts, rank) * row_bytes
        offset += size_bytes
        largest = max(largest, size_bytes)
    put(offsets, world_size, offset)
    return largest


@inline
def describe_counts(table, call, row_count, world_size):
    """Describe blocks of different sizes whose counts all ranks know."""
    counts, offsets = table_of(table, SENT), table_of(table, OFFSETS)
    row_bytes = row_count * get(call, ITEM_BYTES)
    largest = _fill_offsets(counts, offsets, row_bytes, world_size)
    put(call, N_COUNTS, world_size)
    put(call, COUNTS, counts)
    put(call, _OFFSETS, offsets)
    put(call, _PIECES, 0)
    put(call, LARGEST_BYTES, get(offsets, world_size) if get(call, IS_SPREAD) else largest)
    digest = mix(get(call, _BASE_DIGEST), row_count)
    for rank in range(world_size):
        digest = mix(digest, get(counts, rank))
    put(call, DIGEST, digest)


@inline
def _describe_pieces(table, call, row_count, world_size):
    """Describe an all_to_all: ranks compare a row, and the sizes they send with those expected."""
    describe_counts(table, call, row_count, world_size)
    put(call, LARGEST_BYTES, UNKNOWN_BYTES)
    put(call, DIGEST, mix(get(call, _BASE_DIGEST), row_count))
    received, row_bytes = table_of(table, RECEIVED), row_count * get(call, ITEM_BYTES)
    if get(call, LANDINGS) == 0:
        _fill_offsets(received, table_of(table, LANDINGS_TABLE), row_bytes, world_size)
        put(call, LANDINGS, table_of(table, LANDINGS_TABLE))
    pieces = table_of(table, PIECES_TABLE)
    for rank in range(world_size):
        put(pieces, rank, get(table_of(table, SENT), rank) * row_bytes)
        put(pieces, world_size + rank, get(received, rank) * row_bytes)
    put(call, _PIECES, pieces)


@inline
def describe(table, call, x, rows, row_count, is_given, world_size):
    """Describe the data that moves; return whether the entry can serve it."""
    if is_exchange(call):
        _describe_pieces(table, call, row_count, world_size)
        return True
    equal_rows = rows // world_size if get(call, IS_SPREAD) else rows
    if is_given:
        describe_counts(table, call, row_count, world_size)
    elif are_all(table, SENT, equal_rows, world_size):
        describe_equal(call, x, rows, row_count, world_size)
    else:
        me = get(get(table, TABLE_CONTEXT), RANK)
        if get(call, FLOW) != ALL:
            return False  # the other ranks do not know the counts
        if get(call, IS_SPREAD) == 0 and get(table_of(table, SENT), me) != rows:
            return False
        describe_counts(table, call, row_count, world_size)
    return True


@inline
def _is_in_place(table, call, row_bytes, world_size):
    """Return whether a single input and a single output are exactly in place."""
    me = get(get(table, TABLE_CONTEXT), RANK)
    ahead, offset = get(call, SOURCE) - get(call, DESTINATION), 0
    if is_exchange(call):
        return ahead == 0 and are_equal(table, SENT, RECEIVED, world_size)
    for rank in range(me):
        offset += get(table_of(table, SENT), rank) * row_bytes
    return ahead == (-offset if get(call, IS_SPREAD) else offset)


@inline
def _meet(one, one_bytes, other, other_bytes):
    return one < other + other_bytes and other < one + one_bytes


@inline
def _shares_memory(table, call, row_bytes, out_bytes, world_size):
    """Return whether memory that is written is also read, or written as another block."""
    counts = table_of(table, RECEIVED if is_exchange(call) else SENT)
    is_apart, inputs = get(call, DESTINATION) == 0, get(call, INPUTS)
    n_writes, n_reads = world_size if is_apart else 1, world_size if inputs else 1
    for place in range(n_writes):
        start = get(get(call, LANDINGS), place) if is_apart else get(call, DESTINATION)
        size_bytes = get(counts, place) * row_bytes if is_apart else out_bytes
        for other in range(place + 1, n_writes):
            landing, other_bytes = get(get(call, LANDINGS), other), get(counts, other) * row_bytes
            if _meet(start, size_bytes, landing, other_bytes):
                return True
        for other in range(n_reads):
            read = get(inputs, other) if inputs else get(call, SOURCE)
            read_bytes = get(call, SIZE_BYTES)
            if inputs:
                read_bytes = get(table_of(table, SENT), other) * row_bytes
            if _meet(start, size_bytes, read, read_bytes):
                return True
    return False


@inline
def memory_serves(table, call, row_bytes, out_bytes, world_size):
    """Return whether the arrays have separate memory, or are in place as a whole."""
    is_one_each = get(call, DESTINATION) != 0 and get(call, INPUTS) == 0
    if is_one_each and _is_in_place(table, call, row_bytes, world_size):
        return True
    return not _shares_memory(table, call, row_bytes, out_bytes, world_size)
