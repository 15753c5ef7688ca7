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

from gpucoll.arrays.numpy_struct import ARRAY_DATA, ARRAY_DESCRIPTION, C_CONTIGUOUS, WRITEABLE
from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.entries.block_arguments import (
    INPUTS_TABLE,
    LANDINGS_TABLE,
    MOST,
    RECEIVED,
    SENT,
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
from gpucoll.entries.block_words import (
    describe,
    describe_counts,
    describe_equal,
    is_exchange,
    memory_serves,
    show,
)
from gpucoll.entries.collectives import (
    capsule_pointer,
    count_elements,
    find_call,
    is_idle,
    largest_bytes,
    new_reference,
    run_within,
    timeout_of,
)
from gpucoll.entries.words import EntryTable
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import load64
from gpucoll.transport.shared.words import Call, Status

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
def _output_rows(
    table: EntryTable, call: Call, rows: int, total: int, received: int, world_size: int
) -> int:
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
    out_rows = _output_rows(table, call, rows, total, received, world_size)
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
