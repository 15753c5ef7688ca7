"""Compiled loops as CPython built-ins: the quick way of small calls.

A ctypes call costs over a microsecond and a Numba dispatch of three arrays half of one; a built-in
whose code reads the arrays itself costs a tenth. Two kinds are made (`gpucoll.kernels.cpu.builtins`
turns an address into a Python object):

- without arguments (`prepared_call`, `queued_call`): runs the call block in its capsule; returns a
  `Status`;
- ``(x, out, op, root)`` (`collective_entry`): serves exact NumPy arrays that match an entry of its
  table (dtype, op and root objects by identity), and returns `out`; everything else, errors too, it
  leaves to Python by returning ``None``: `Context.STATUS` then says why.

What a Python signal handler raised in the middle of a wait is raised by either.
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
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop, get, load32_acquire, load64, put
from gpucoll.transport.shared.flags import HELD, INTERPRETER, release_interpreter
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS
from gpucoll.transport.shared.steps import (
    COUNT,
    DESTINATION,
    DIGEST,
    DIMENSIONS,
    LARGEST_BYTES,
    SIZE_BYTES,
    SOURCE,
)
from gpucoll.transport.shared.words import Call, Context, State, Status
from gpucoll.types import mix_digest

TABLE_CONTEXT = 0
TABLE_ARRAY_TYPE = 1
TABLE_COUNT = 2
TABLE_NONE = 3
TABLE_INT_TYPE = 4
TABLE_SENDS = 5
TABLE_LIST_TYPE = 6
TABLE_SEGMENTS = 7
TABLE_SEEN = 8
TABLE_ENTRIES = 9
ENTRY_WORDS = 4  # dtype object, op object, root object, call block
MAX_ENTRIES = 16
TABLE_WORDS = TABLE_ENTRIES + MAX_ENTRIES * ENTRY_WORDS

_STATE, _STATUS, _RAISED = int(Context.STATE), int(Context.STATUS), int(Context.RAISED)
_IDLE, _BUSY, _NEEDS_PYTHON = int(State.IDLE), int(State.BUSY), int(State.NEEDS_PYTHON)
_OK, _SIGNAL, _NOT_RUN = int(Status.OK), int(Status.SIGNAL), int(Status.NOT_RUN)
_ASIDE, _MORE = int(Status.ASIDE), int(Status.MORE)
_CONTEXT, _LOOP, _ITEM_BYTES = int(Call.CONTEXT), int(Call.LOOP), int(Call.ITEM_BYTES)
_BASE_DIGEST, _SIGNS_COUNT = int(Call.BASE_DIGEST), int(Call.SIGNS_COUNT)
_SOURCE_PARTS, _DESTINATION_PARTS = int(Call.SOURCE_PARTS), int(Call.DESTINATION_PARTS)
_LARGEST_PARTS, _BLOCK_BYTES = int(Call.LARGEST_PARTS), int(Call.BLOCK_BYTES)
_IN_PLACE_BLOCK = int(Call.IN_PLACE_BLOCK)

_PENDING, _N_TRANSFERS = int(Context.PENDING), int(Call.N_TRANSFERS)
_SHORT_BYTES = 8 << 10

_i64 = types.int64
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_i64))
_restore_error = types.ExternalFunction("PyErr_Restore", types.void(_i64, _i64, _i64))
capsule_pointer = types.ExternalFunction("PyCapsule_GetPointer", _i64(_i64, _i64))
new_integer = types.ExternalFunction("PyLong_FromLongLong", _i64(_i64))
_increase_reference = types.ExternalFunction("Py_IncRef", types.void(_i64))


mix = inline(mix_digest)


@inline
def run(context, call, size_bytes):
    """Run the call; return its status.

    Other Python threads run meanwhile, but for a short call only once it waits: to give the
    interpreter away and to take it back costs 40 ns, a tenth of a small all_reduce.
    """
    put(context, _STATE, _BUSY)
    put(context, INTERPRETER, HELD)
    if size_bytes > _SHORT_BYTES:
        release_interpreter(context)
    status = call_loop(get(call, _LOOP), context, call)
    thread = get(context, INTERPRETER)
    put(context, INTERPRETER, 0)
    if thread != HELD:
        _restore_thread(thread)
    put(context, _STATUS, status)
    goes_on = status == _OK or status == _ASIDE or status == _MORE
    put(context, _STATE, _IDLE if goes_on else _NEEDS_PYTHON)
    if status == _SIGNAL:
        _restore_error(get(context, _RAISED), get(context, _RAISED + 1), get(context, _RAISED + 2))
    return status


@inline
def _largest_bytes(call):
    return max(get(call, SIZE_BYTES), get(call, LARGEST_BYTES))


@inline
def new_reference(value):
    """Return a Python object with one more reference: the caller's."""
    _increase_reference(value)
    return value


@inline
def _run_prepared(self, may_overtake):
    call = capsule_pointer(self, 0)
    context = get(call, _CONTEXT)
    status = _NOT_RUN
    if get(context, _STATE) == _IDLE and (may_overtake or get(context, _PENDING) == 0):
        is_table = get(call, _N_TRANSFERS) != 0  # of messages: of whatever size
        status = run(context, call, _SHORT_BYTES + 1 if is_table else _largest_bytes(call))
    return 0 if status == _SIGNAL else new_integer(status)


@compiled(_i64(_i64, _i64))
def prepared_call(self, _):
    """Built-in without arguments; `self` is a capsule of the call block."""
    return _run_prepared(self, False)


@compiled(_i64(_i64, _i64))
def queued_call(self, _):
    """Do the same for the queue of asynchronous calls, whose turn it is."""
    return _run_prepared(self, True)


@inline
def find_call(table, dtype, operation, root):
    """Return the call block of these objects, or 0."""
    for place in range(get(table, TABLE_COUNT)):
        entry = table + 8 * (TABLE_ENTRIES + place * ENTRY_WORDS)
        if get(entry, 0) == dtype and get(entry, 1) == operation and get(entry, 2) == root:
            return get(entry, 3)
    return 0


@inline
def count_elements(array):
    """Return how many elements a NumPy array has."""
    dimensions, count = load64(array + ARRAY_DIMENSIONS), 1
    for place in range(load32_acquire(array + ARRAY_N_DIMENSIONS)):
        count *= load64(dimensions + 8 * place)
    return count


@inline
def _sign(call, array, count):
    """Write what the ranks must agree on, an array's shape or a block's count, into the call."""
    dimensions = load64(array + ARRAY_DIMENSIONS)
    n_dimensions = load32_acquire(array + ARRAY_N_DIMENSIONS)
    if get(call, _SIGNS_COUNT):
        put(call, DIMENSIONS, 1)
        put(call, DIMENSIONS + 1, count)
        put(call, DIGEST, mix(mix(get(call, _BASE_DIGEST), 1), count))
        return
    digest = mix(get(call, _BASE_DIGEST), n_dimensions)
    put(call, DIMENSIONS, n_dimensions)
    for place in range(n_dimensions):
        length = load64(dimensions + 8 * place)
        digest = mix(digest, length)
        if place < SHOWN_DIMENSIONS:
            put(call, DIMENSIONS + 1 + place, length)
    put(call, DIGEST, digest)


@inline
def _divides(array, parts):
    """Return whether the first dimension divides into equal blocks."""
    if parts == 1:
        return True
    if load32_acquire(array + ARRAY_N_DIMENSIONS) == 0:
        return False
    return load64(load64(array + ARRAY_DIMENSIONS)) % parts == 0


@inline
def is_usable(table, x, out):
    """Return whether these are plain contiguous arrays of one dtype object, `out` writeable."""
    array_type = get(table, TABLE_ARRAY_TYPE)
    if load64(x + OBJECT_TYPE) != array_type or load64(out + OBJECT_TYPE) != array_type:
        return False
    if load64(out + ARRAY_DESCRIPTION) != load64(x + ARRAY_DESCRIPTION):
        return False
    if not load32_acquire(x + ARRAY_FLAGS) & C_CONTIGUOUS:
        return False
    needed = C_CONTIGUOUS | WRITEABLE
    return load32_acquire(out + ARRAY_FLAGS) & needed == needed


@inline
def _prepare(table, x, out, operation, root):
    """Fill in the call block for these arrays; return it, or 0 where Python has to look."""
    if not is_usable(table, x, out):
        return 0
    call = find_call(table, load64(x + ARRAY_DESCRIPTION), operation, root)
    if call == 0:
        return 0
    source_parts, destination_parts = get(call, _SOURCE_PARTS), get(call, _DESTINATION_PARTS)
    count = count_elements(x)
    size_bytes = count * get(call, _ITEM_BYTES)
    block_bytes = size_bytes // source_parts
    source, destination = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
    if not _divides(x, source_parts):
        return 0
    if x != out or source_parts != destination_parts:
        if count_elements(out) * source_parts != count * destination_parts:
            return 0
        ahead, behind = source - destination, destination - source
        if (
            ahead != get(call, _IN_PLACE_BLOCK) * block_bytes
            and ahead < block_bytes * destination_parts
            and behind < size_bytes
        ):
            return 0
    put(call, COUNT, count)
    put(call, SIZE_BYTES, size_bytes)
    put(call, _BLOCK_BYTES, block_bytes)
    put(call, LARGEST_BYTES, block_bytes * get(call, _LARGEST_PARTS))
    put(call, SOURCE, source)
    put(call, DESTINATION, destination)
    _sign(call, x, count // source_parts)
    return call


@compiled(_i64(_i64, _i64, _i64))
def collective_entry(self, arguments, n_arguments):
    """Built-in of ``(x, out, op, root)``; `self` is a capsule of the table."""
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    put(context, _STATUS, _NOT_RUN)
    if n_arguments == 4 and get(context, _STATE) == _IDLE and get(context, _PENDING) == 0:
        x, out = get(arguments, 0), get(arguments, 1)
        call = _prepare(table, x, out, get(arguments, 2), get(arguments, 3))
        if call != 0:
            status = run(context, call, _largest_bytes(call))
            if status == _OK:
                return new_reference(out)
            if status == _SIGNAL:
                return 0
    return new_reference(get(table, TABLE_NONE))
