"""Counts and lists of blocks, read by compiled code from Python's objects.

The values go into tables with one word for each rank, whose address is in an entry's table. The
interpreter is held, and no user's code runs here: lists, tuples, ints and arrays are of the exact
types.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_FLAGS,
    ARRAY_N_DIMENSIONS,
    C_CONTIGUOUS,
    OBJECT_TYPE,
    WRITEABLE,
)
from gpucoll.blocks import Words
from gpucoll.entries.collectives import EntryTable, as_integer, clear_error, count_elements
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import load32_acquire, load64

SENT, RECEIVED, OFFSETS, INPUTS_TABLE, LANDINGS_TABLE, PIECES_TABLE = 0, 1, 2, 3, 4, 5
TABLES = 7  # the table of pieces counts twice
MOST = 1 << 40
"""Limit of a count, and of a row's elements and bytes; sums and products then cannot overflow."""
_i64 = types.int64
_list_size = types.ExternalFunction("PyList_Size", _i64(_i64))
_list_item = types.ExternalFunction("PyList_GetItem", _i64(_i64, _i64))
_tuple_size = types.ExternalFunction("PyTuple_Size", _i64(_i64))
_tuple_item = types.ExternalFunction("PyTuple_GetItem", _i64(_i64, _i64))


@inline
def table_of(table: EntryTable, which: int) -> Words:
    """Return a table, which has one word for each rank and one more."""
    world_size = table.context.world_size
    return Words(table.blocks + 8 * which * (world_size + 1))


@inline
def is_list(table: EntryTable, x: int) -> bool:
    """Return whether this is a list."""
    return load64(x + OBJECT_TYPE) == table.list_type


@inline
def is_array(table: EntryTable, x: int, dtype: int, needed: int) -> bool:
    """Return whether this is an array with rows, with this dtype object and these flags."""
    if load64(x + OBJECT_TYPE) != table.array_type:
        return False
    if load64(x + ARRAY_DESCRIPTION) != dtype or load32_acquire(x + ARRAY_N_DIMENSIONS) == 0:
        return False
    return load32_acquire(x + ARRAY_FLAGS) & needed == needed


@inline
def first_array(table: EntryTable, x: int) -> int:
    """Return x, or the first block if x is a list; 0 if that is not an array."""
    if is_list(table, x):
        if _list_size(x) == 0:
            return 0
        x = _list_item(x, 0)
    return x if load64(x + OBJECT_TYPE) == table.array_type else 0


@inline
def rows_of(x: int) -> int:
    """Return the number of rows of an array with rows."""
    return load64(load64(x + ARRAY_DIMENSIONS))


@inline
def row_count_of(x: int) -> int:
    """Return the number of elements in a row, 0 to `MOST`; -1 if there are more."""
    count, dimensions = 1, load64(x + ARRAY_DIMENSIONS)
    for place in range(1, load32_acquire(x + ARRAY_N_DIMENSIONS)):
        length = load64(dimensions + 8 * place)
        if length != 0 and count > MOST // length:
            return -1
        count *= length
    return count


@inline
def read_counts(table: EntryTable, given: int, which: int, world_size: int) -> int:
    """Copy a user's counts, ints in a list or tuple; return their sum, or -1."""
    counts, is_listed = table_of(table, which), is_list(table, given)
    if not is_listed and load64(given + OBJECT_TYPE) != table.tuple_type:
        return -1
    if (_list_size(given) if is_listed else _tuple_size(given)) != world_size:
        return -1
    total = 0
    for rank in range(world_size):
        item = _list_item(given, rank) if is_listed else _tuple_item(given, rank)
        if load64(item + OBJECT_TYPE) != table.int_type:
            return -1
        number = as_integer(item)
        if number < 0 or number > MOST:
            clear_error()
            return -1
        counts[rank] = number
        total += number
    return total


@inline
def _have_same_rows(x: int, other: int) -> bool:
    """Return whether two arrays have the same row shape."""
    n_dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS)
    if n_dimensions != load32_acquire(other + ARRAY_N_DIMENSIONS):
        return False
    dimensions, others = load64(x + ARRAY_DIMENSIONS), load64(other + ARRAY_DIMENSIONS)
    for place in range(1, n_dimensions):
        if load64(dimensions + 8 * place) != load64(others + 8 * place):
            return False
    return True


@inline
def _note_rows(counts: Words, rank: int, rows: int, is_given: int) -> bool:
    """Note the rows of a block; return whether they agree with the user's counts, if given."""
    if is_given:
        return counts[rank] == rows
    counts[rank] = rows
    return rows <= MOST


@inline
def read_inputs(table: EntryTable, xs: int, dtype: int, is_given: int, world_size: int) -> int:
    """Note the addresses and rows of an input's blocks; return the sum of the rows, or -1."""
    inputs, counts, total = table_of(table, INPUTS_TABLE), table_of(table, SENT), 0
    if _list_size(xs) != world_size:
        return -1
    first = _list_item(xs, 0)
    for rank in range(world_size):
        x = _list_item(xs, rank)
        if not is_array(table, x, dtype, C_CONTIGUOUS) or not _have_same_rows(x, first):
            return -1
        if not _note_rows(counts, rank, rows_of(x), is_given):
            return -1
        inputs[rank] = load64(x + ARRAY_DATA)
        total += rows_of(x)
    return total


@inline
def read_outputs(
    table: EntryTable,
    outs: int,
    dtype: int,
    row_count: int,
    which: int,
    is_given: int,
    world_size: int,
) -> int:
    """Note the addresses and rows of an output's blocks; return the sum of the rows, or -1."""
    landings, counts, total = table_of(table, LANDINGS_TABLE), table_of(table, which), 0
    if _list_size(outs) != world_size:
        return -1
    for rank in range(world_size):
        out = _list_item(outs, rank)
        if not is_array(table, out, dtype, C_CONTIGUOUS | WRITEABLE):
            return -1
        count = count_elements(out)
        rows = count // row_count
        if rows * row_count != count or not _note_rows(counts, rank, rows, is_given):
            return -1
        landings[rank] = load64(out + ARRAY_DATA)
        total += rows
    return total


@inline
def are_equal(table: EntryTable, which: int, other: int, world_size: int) -> bool:
    """Return whether two tables of counts are the same."""
    one, two = table_of(table, which), table_of(table, other)
    for rank in range(world_size):  # noqa: SIM110
        if one[rank] != two[rank]:
            return False
    return True


@inline
def are_all(table: EntryTable, which: int, rows: int, world_size: int) -> bool:
    """Return whether all counts of a table equal `rows`."""
    counts = table_of(table, which)
    for rank in range(world_size):  # noqa: SIM110
        if counts[rank] != rows:
            return False
    return True
