"""Collectives with counts or lists of blocks, as built-ins of CPython that read NumPy arrays.

``(x, out, op, root, timeout_s, counts, receive_counts)`` serves contiguous arrays, and lists of
them, of a dtype seen before. Counts are lists or tuples of ints, or None. The entry describes the
call as Python would (`gpucoll.calls.block_preparation`, ``BlockMaker.of`` of the CPU backend),
whatever the counts are: new counts cost the same as repeated ones. It leaves doubtful cases to
Python by returning None: counts that do not fit, blocks that share memory, arrays without rows,
rows without bytes. On ranks other than the root, x is `out` in a scatter, and `out` is x in a
gather.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_N_DIMENSIONS,
    C_CONTIGUOUS,
    WRITEABLE,
)
from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.entries.block_arguments import (
    INPUTS_TABLE,
    LANDINGS_TABLE,
    MOST,
    OFFSETS,
    PIECES_TABLE,
    RECEIVED,
    SENT,
    are_all,
    are_equal,
    first_array,
    is_array,
    is_list,
    read_counts,
    read_inputs,
    read_outputs,
    row_count_of,
    rows_of,
    table_of,
)
from gpucoll.entries.collectives import (
    EntryTable,
    capsule_pointer,
    count_elements,
    find_call,
    is_idle,
    largest_bytes,
    mix,
    new_reference,
    run_within,
    timeout_of,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import load32_acquire, load64
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS, UNKNOWN_BYTES
from gpucoll.transport.shared.words import Call, Status

# --- the call block, and the check of its memory --------------------------------------------------

# The block is the same as ``BlockMaker.of`` of the CPU backend writes, from the values that
# `block_arguments` has read.


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


# --- the entry ------------------------------------------------------------------------------------


_GIVEN, _GIVEN_RECEIVED = 5, 6  # indices of the arguments
_MOST_BYTES = 1 << 60


@inline
def _is_given(table: EntryTable, arguments: Words, place: int) -> bool:
    return arguments[place] != table.none


@inline
def _only_gets(table: EntryTable, call: Call) -> bool:
    """Return whether this rank has no input: it is not the root of a scatter."""
    return call.flow == Flow.FROM_ROOT and table.context.rank != call.root


# --- the arguments --------------------------------------------------------------------------------


@inline
def _fits_counts(
    table: EntryTable, call: Call, rows: int, total: int, is_given: int, world_size: int
) -> bool:
    """Return whether an input of one array has the rows in the counts, if there are counts."""
    me = table.context.rank
    counts = table_of(table, SENT)
    if call.spreads == 0:
        return not is_given or rows == counts[me]
    if is_given:
        return rows == total
    if rows % world_size:
        return False
    for rank in range(world_size):
        counts[rank] = rows // world_size
    return True


@inline
def _read_input(
    table: EntryTable, call: Call, x: int, total: int, is_given: int, world_size: int
) -> int:
    """Note this rank's input in the call; return its rows, or -1 if Python must check."""
    first = first_array(table, x)
    dtype, rows = load64(first + ARRAY_DESCRIPTION), -1
    if is_list(table, x):
        if call.spreads:
            rows = read_inputs(table, x, dtype, is_given, world_size)
        call.inputs = table_of(table, INPUTS_TABLE)
        call.source = 0
    else:
        if not is_array(table, x, dtype, C_CONTIGUOUS):
            return -1
        rows = rows_of(x)
        if not _fits_counts(table, call, rows, total, is_given, world_size):
            return -1
        call.inputs = Words(0)
        call.source = load64(x + ARRAY_DATA)
    return rows


@inline
def _read_output(
    table: EntryTable, call: Call, x: int, out: int, row_count: int, rows: int, arguments: Words
) -> bool:
    """Note this rank's output in the call; return whether it fits. `rows` is for a single array."""
    dtype = load64(first_array(table, x) + ARRAY_DESCRIPTION)
    call.landings = Words(0)
    if not is_list(table, out):
        if not is_array(table, out, dtype, C_CONTIGUOUS | WRITEABLE):
            return False
        call.destination = load64(out + ARRAY_DATA)
        return rows >= 0 and count_elements(out) == rows * row_count
    if call.gathers == 0:
        return False
    is_all = is_exchange(call)
    which = RECEIVED if is_all else SENT
    is_given = _is_given(table, arguments, _GIVEN_RECEIVED if is_all else _GIVEN)
    call.landings = table_of(table, LANDINGS_TABLE)
    call.destination = 0
    world_size = table.context.world_size
    return read_outputs(table, out, dtype, row_count, which, is_given, world_size) >= 0


# --- the call -------------------------------------------------------------------------------------


@inline
def _prepare_block(table: EntryTable, call: Call, out: int, total: int, world_size: int) -> Call:
    """Prepare a scatter off its root, where `out` defines a row; return the call, or 0."""
    me = table.context.rank
    dtype = load64(first_array(table, out) + ARRAY_DESCRIPTION)
    if total < 0 or not is_array(table, out, dtype, C_CONTIGUOUS | WRITEABLE):
        return Call(0)
    count, rows = count_elements(out), table_of(table, SENT)[me]
    if rows == 0 or count == 0 or count % rows:
        return Call(0)
    if total > _MOST_BYTES // (count // rows * call.item_bytes):
        return Call(0)
    call.source = 0
    call.inputs = Words(0)
    call.landings = Words(0)
    call.size_bytes = 0
    call.count = count
    call.destination = load64(out + ARRAY_DATA)
    show(call, out, rows_of(out))
    describe_counts(table, call, count // rows, world_size)
    return call


@inline
def _output_rows(table: EntryTable, call: Call, total: int, received: int) -> int:
    """Return the rows of an output in one array; -1 if they are not known."""
    if call.gathers:
        return received if is_exchange(call) else total
    return table_of(table, SENT)[table.context.rank]


@inline
def _prepare_both(
    table: EntryTable, call: Call, arguments: Words, total: int, received: int
) -> Call:
    """Prepare a call of a rank that has an input; return it, or 0 if Python must check."""
    x, out = arguments[0], arguments[1]
    world_size, is_given = table.context.world_size, total >= 0
    rows = _read_input(table, call, x, total, is_given, world_size)
    if rows < 0 or rows > MOST:
        return Call(0)
    first = first_array(table, x)
    row_count = row_count_of(first)
    row_bytes = row_count * call.item_bytes
    if row_count <= 0 or row_bytes <= 0 or row_bytes > MOST:
        return Call(0)
    if total > _MOST_BYTES // row_bytes:
        return Call(0)
    call.count = rows * row_count
    call.size_bytes = rows * row_bytes
    show(call, first, rows)
    if call.flow == Flow.TO_ROOT and table.context.rank != call.root:
        call.destination = 0
        call.landings = Words(0)
        if is_given:
            describe_counts(table, call, row_count, world_size)
        else:
            describe_equal(call, first, rows, row_count, world_size)
        return call
    out_rows = _output_rows(table, call, total, received)
    if out_rows > _MOST_BYTES // row_bytes:
        return Call(0)
    if not _read_output(table, call, x, out, row_count, out_rows, arguments):
        return Call(0)
    if not memory_serves(table, call, row_bytes, out_rows * row_bytes, world_size):
        return Call(0)
    return call if describe(table, call, first, rows, row_count, is_given, world_size) else Call(0)


@inline
def _prepare(table: EntryTable, arguments: Words) -> Call:
    """Fill in the call block for these arguments; return it, or 0 if Python must check."""
    x, total, received = arguments[0], -1, -1
    world_size, first = table.context.world_size, first_array(table, x)
    if first == 0:
        return Call(0)
    dtype = load64(first + ARRAY_DESCRIPTION)
    call = find_call(table, dtype, arguments[2], arguments[3])
    if not call:
        return Call(0)
    is_given = _is_given(table, arguments, _GIVEN)
    if is_given:
        total = read_counts(table, arguments[_GIVEN], SENT, world_size)
        if total < 0:
            return Call(0)
    if _is_given(table, arguments, _GIVEN_RECEIVED):
        received = read_counts(table, arguments[_GIVEN_RECEIVED], RECEIVED, world_size)
        if received < 0:
            return Call(0)
    if _only_gets(table, call):
        return _prepare_block(table, call, arguments[1], total, world_size)
    return _prepare_both(table, call, arguments, total, received)


@compiled
def block_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, out, op, root, timeout_s, counts, receive_counts)``: `out`, or None."""
    table = EntryTable(capsule_pointer(self, 0))
    context = table.context
    context.status = Status.NOT_RUN
    timeout_ns = timeout_of(table, arguments, n_arguments, 4)
    if n_arguments == 7 and timeout_ns >= 0 and is_idle(context):
        call = _prepare(table, arguments)
        if call:
            status = run_within(context, call, largest_bytes(call), timeout_ns)
            if status == Status.OK:
                return new_reference(arguments[1])
            if status == Status.SIGNAL:
                return 0
    return new_reference(table.none)
