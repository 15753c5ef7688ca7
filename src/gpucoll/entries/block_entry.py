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
    C_CONTIGUOUS,
    WRITEABLE,
)
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
    FLOW,
    INPUTS,
    IS_SPREAD,
    ITEM_BYTES,
    LANDINGS,
    LANDS_APART,
    describe,
    describe_counts,
    describe_equal,
    is_exchange,
    memory_serves,
    show,
)
from gpucoll.entries.collectives import (
    TABLE_CONTEXT,
    TABLE_NONE,
    capsule_pointer,
    count_elements,
    find_call,
    is_idle,
    largest_bytes,
    new_reference,
    run_within,
    timeout_of,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import get, load64, put
from gpucoll.transport.shared.steps import (
    COUNT,
    DESTINATION,
    RANK,
    ROOT,
    SIZE_BYTES,
    SOURCE,
    WORLD_SIZE,
)
from gpucoll.transport.shared.words import Context, Flow, Status

_STATUS = int(Context.STATUS)
_OK, _SIGNAL, _NOT_RUN = int(Status.OK), int(Status.SIGNAL), int(Status.NOT_RUN)
_FROM_ROOT, _TO_ROOT = int(Flow.FROM_ROOT), int(Flow.TO_ROOT)
_GIVEN, _GIVEN_RECEIVED = 5, 6  # indices of the arguments
_MOST_BYTES = 1 << 60


@inline
def _is_given(table, arguments, place):
    return get(arguments, place) != get(table, TABLE_NONE)


@inline
def _only_gets(table, call):
    """Return whether this rank has no input: it is not the root of a scatter."""
    return get(call, FLOW) == _FROM_ROOT and get(get(table, TABLE_CONTEXT), RANK) != get(call, ROOT)


# --- the arguments --------------------------------------------------------------------------------


@inline
def _fits_counts(table, call, rows, total, is_given, world_size):
    """Return whether an input of one array has the rows in the counts, if there are counts."""
    me = get(get(table, TABLE_CONTEXT), RANK)
    counts = table_of(table, SENT)
    if get(call, IS_SPREAD) == 0:
        return not is_given or rows == get(counts, me)
    if is_given:
        return rows == total
    if rows % world_size:
        return False
    for rank in range(world_size):
        put(counts, rank, rows // world_size)
    return True


@inline
def _read_input(table, call, x, total, is_given, world_size):
    """Note this rank's input in the call; return its rows, or -1 if Python must check."""
    first = first_array(table, x)
    dtype, rows = load64(first + ARRAY_DESCRIPTION), -1
    if is_list(table, x):
        if get(call, IS_SPREAD):
            rows = read_inputs(table, x, dtype, is_given, world_size)
        put(call, INPUTS, table_of(table, INPUTS_TABLE))
        put(call, SOURCE, 0)
    else:
        if not is_array(table, x, dtype, C_CONTIGUOUS):
            return -1
        rows = rows_of(x)
        if not _fits_counts(table, call, rows, total, is_given, world_size):
            return -1
        put(call, INPUTS, 0)
        put(call, SOURCE, load64(x + ARRAY_DATA))
    return rows


@inline
def _read_output(table, call, x, out, row_count, rows, arguments):
    """Note this rank's output in the call; return whether it fits. `rows` is for a single array."""
    dtype = load64(first_array(table, x) + ARRAY_DESCRIPTION)
    put(call, LANDINGS, 0)
    if not is_list(table, out):
        if not is_array(table, out, dtype, C_CONTIGUOUS | WRITEABLE):
            return False
        put(call, DESTINATION, load64(out + ARRAY_DATA))
        return rows >= 0 and count_elements(out) == rows * row_count
    if get(call, LANDS_APART) == 0:
        return False
    is_all = is_exchange(call)
    which = RECEIVED if is_all else SENT
    is_given = _is_given(table, arguments, _GIVEN_RECEIVED if is_all else _GIVEN)
    put(call, LANDINGS, table_of(table, LANDINGS_TABLE))
    put(call, DESTINATION, 0)
    world_size = get(get(table, TABLE_CONTEXT), WORLD_SIZE)
    return read_outputs(table, out, dtype, row_count, which, is_given, world_size) >= 0


# --- the call -------------------------------------------------------------------------------------


@inline
def _prepare_block(table, call, out, total, world_size):
    """Prepare a scatter off its root, where `out` defines a row; return the call, or 0."""
    me = get(get(table, TABLE_CONTEXT), RANK)
    dtype = load64(first_array(table, out) + ARRAY_DESCRIPTION)
    if total < 0 or not is_array(table, out, dtype, C_CONTIGUOUS | WRITEABLE):
        return 0
    count, rows = count_elements(out), get(table_of(table, SENT), me)
    if rows == 0 or count == 0 or count % rows:
        return 0
    if total > _MOST_BYTES // (count // rows * get(call, ITEM_BYTES)):
        return 0
    put(call, SOURCE, 0)
    put(call, INPUTS, 0)
    put(call, LANDINGS, 0)
    put(call, SIZE_BYTES, 0)
    put(call, COUNT, count)
    put(call, DESTINATION, load64(out + ARRAY_DATA))
    show(call, out, rows_of(out))
    describe_counts(table, call, count // rows, world_size)
    return call


@inline
def _output_rows(table, call, rows, total, received, world_size):
    """Return the rows of an output in one array; -1 if they are not known."""
    if get(call, LANDS_APART):
        return received if is_exchange(call) else total
    return get(table_of(table, SENT), get(get(table, TABLE_CONTEXT), RANK))


@inline
def _prepare_both(table, call, arguments, total, received):
    """Prepare a call of a rank that has an input; return it, or 0 if Python must check."""
    x, out = get(arguments, 0), get(arguments, 1)
    world_size, is_given = get(get(table, TABLE_CONTEXT), WORLD_SIZE), total >= 0
    rows = _read_input(table, call, x, total, is_given, world_size)
    if rows < 0 or rows > MOST:
        return 0
    first = first_array(table, x)
    row_count = row_count_of(first)
    row_bytes = row_count * get(call, ITEM_BYTES)
    if row_count <= 0 or row_bytes <= 0 or row_bytes > MOST:
        return 0
    if total > _MOST_BYTES // row_bytes:
        return 0
    put(call, COUNT, rows * row_count)
    put(call, SIZE_BYTES, rows * row_bytes)
    show(call, first, rows)
    if get(call, FLOW) == _TO_ROOT and get(get(table, TABLE_CONTEXT), RANK) != get(call, ROOT):
        put(call, DESTINATION, 0)
        put(call, LANDINGS, 0)
        if is_given:
            describe_counts(table, call, row_count, world_size)
        else:
            describe_equal(call, first, rows, row_count, world_size)
        return call
    out_rows = _output_rows(table, call, rows, total, received, world_size)
    if out_rows > _MOST_BYTES // row_bytes:
        return 0
    if not _read_output(table, call, x, out, row_count, out_rows, arguments):
        return 0
    if not memory_serves(table, call, row_bytes, out_rows * row_bytes, world_size):
        return 0
    return call if describe(table, call, first, rows, row_count, is_given, world_size) else 0


@inline
def _prepare(table, arguments):
    """Fill in the call block for these arguments; return it, or 0 if Python must check."""
    x, total, received = get(arguments, 0), -1, -1
    world_size, first = get(get(table, TABLE_CONTEXT), WORLD_SIZE), first_array(table, x)
    if first == 0:
        return 0
    dtype = load64(first + ARRAY_DESCRIPTION)
    call = find_call(table, dtype, get(arguments, 2), get(arguments, 3))
    if call == 0:
        return 0
    is_given = _is_given(table, arguments, _GIVEN)
    if is_given:
        total = read_counts(table, get(arguments, _GIVEN), SENT, world_size)
        if total < 0:
            return 0
    if _is_given(table, arguments, _GIVEN_RECEIVED):
        received = read_counts(table, get(arguments, _GIVEN_RECEIVED), RECEIVED, world_size)
        if received < 0:
            return 0
    if _only_gets(table, call):
        return _prepare_block(table, call, get(arguments, 1), total, world_size)
    return _prepare_both(table, call, arguments, total, received)


@compiled
def block_entry(self, arguments, n_arguments):
    """Built-in of ``(x, out, op, root, timeout_s, counts, receive_counts)``: `out`, or None."""
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    put(context, _STATUS, _NOT_RUN)
    timeout_ns = timeout_of(table, arguments, n_arguments, 4)
    if n_arguments == 7 and timeout_ns >= 0 and is_idle(context):
        call = _prepare(table, arguments)
        if call != 0:
            status = run_within(context, call, largest_bytes(call), timeout_ns)
            if status == _OK:
                return new_reference(get(arguments, 1))
            if status == _SIGNAL:
                return 0
    return new_reference(get(table, TABLE_NONE))
