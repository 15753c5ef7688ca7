"""Compiled loops as built-ins of CPython: the fast path of small calls.

A ctypes call costs over a microsecond, and a Numba dispatch of three arrays half of one. A built-in
whose code reads the arrays itself costs a tenth. `gpucoll.kernels.cpu.builtins` turns an address
into a Python object. There are two kinds:

- without arguments (`prepared_call`, `queued_call`): runs the call block in its capsule and returns
  a `Status`;
- ``(x, out, op, root, timeout_s)`` (`gpucoll.entries.collective_entry`; the last is optional):
  serves exact NumPy arrays, and PyTorch tensors on the host, that match an entry of its table
  (dtype, op and root objects by identity), and returns `out`. It leaves everything else, including
  errors, to Python by returning ``None``; `Context.STATUS` then has the reason.

Both raise what a Python signal handler has raised in the middle of a wait.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_FLAGS,
    ARRAY_N_DIMENSIONS,
    C_CONTIGUOUS,
    OBJECT_TYPE,
    WRITEABLE,
)
from gpucoll.arrays.tensor_table import VIEW_WORDS
from gpucoll.entries.deadlines import USUAL, deadline_ns, set_deadline, usual_deadline_ns
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop, get, load32_acquire, load64, put
from gpucoll.transport.shared.flags import HELD, INTERPRETER, release_interpreter
from gpucoll.transport.shared.steps import (
    LARGEST_BYTES,
    SIZE_BYTES,
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
TABLE_FLOAT_TYPE = 9
TABLE_TENSORS = 10  # address of the table with which tensors are read; 0 before the first tensor
TABLE_VIEW = 11  # the view of the tensor that is being read
TABLE_QUEUE = TABLE_VIEW + VIEW_WORDS
TABLE_TUPLE_TYPE = TABLE_QUEUE + 1
TABLE_BLOCKS = TABLE_QUEUE + 2  # address of the tables that `block_arguments` fills
TABLE_WAITS = TABLE_QUEUE + 3  # call block that waits for one message
TABLE_ENTRIES = TABLE_QUEUE + 4
ENTRY_WORDS = 4  # dtype object, op object, root object, call block
MAX_ENTRIES = 16
TABLE_WORDS = TABLE_ENTRIES + MAX_ENTRIES * ENTRY_WORDS

_STATE, _STATUS, _RAISED = int(Context.STATE), int(Context.STATUS), int(Context.RAISED)
_IDLE, _BUSY, _NEEDS_PYTHON = int(State.IDLE), int(State.BUSY), int(State.NEEDS_PYTHON)
_OK, _SIGNAL, _NOT_RUN = int(Status.OK), int(Status.SIGNAL), int(Status.NOT_RUN)
_MISFIT = int(Status.MISFIT)
_NO_ROOM, _NOT_YET = int(Status.NO_ROOM), int(Status.NOT_YET)
_CONTEXT, _LOOP, _PENDING = int(Call.CONTEXT), int(Call.LOOP), int(Context.PENDING)
_LEAVES = int(Call.LEAVES)
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

    Other Python threads run meanwhile; during a short call, only once it waits. Releasing the
    interpreter and taking it back costs 40 ns, a tenth of a small all_reduce.
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
    goes_on = status == _OK or status == _NO_ROOM or status == _NOT_YET or status == _MISFIT
    if status == _SIGNAL:
        goes_on = get(call, _LEAVES) != 0
    put(context, _STATE, _IDLE if goes_on else _NEEDS_PYTHON)
    if status == _SIGNAL:
        _restore_error(get(context, _RAISED), get(context, _RAISED + 1), get(context, _RAISED + 2))
    return status


@inline
def largest_bytes(call):
    """Return the size of the larger of this rank's arrays."""
    return max(get(call, SIZE_BYTES), get(call, LARGEST_BYTES))


@inline
def new_reference(value):
    """Return a Python object with one more reference, which the caller owns."""
    _increase_reference(value)
    return value


@inline
def _run_prepared(self, may_overtake):
    call = capsule_pointer(self, 0)
    context = get(call, _CONTEXT)
    status = _NOT_RUN
    if get(context, _STATE) == _IDLE and (may_overtake or get(context, _PENDING) == 0):
        status = run(context, call, largest_bytes(call))
    return 0 if status == _SIGNAL else new_integer(status)


@compiled
def prepared_call(self, _):
    """Built-in without arguments; `self` is a capsule of the call block."""
    return _run_prepared(self, False)


@compiled
def queued_call(self, _):
    """Built-in without arguments, for the queue of asynchronous calls, when it has the turn."""
    return _run_prepared(self, True)


@inline
def find_call(table, dtype, operation, root):
    """Return the call block for these objects, or 0. For tensors, `dtype` is the dtype's key."""
    for place in range(get(table, TABLE_COUNT)):
        entry = table + 8 * (TABLE_ENTRIES + place * ENTRY_WORDS)
        if get(entry, 0) == dtype and get(entry, 1) == operation and get(entry, 2) == root:
            return get(entry, 3)
    return 0


@inline
def count_of(n_dimensions, dimensions):
    """Return the number of elements of a shape."""
    count = 1
    for place in range(n_dimensions):
        count *= load64(dimensions + 8 * place)
    return count


@inline
def count_elements(array):
    """Return the number of elements of a NumPy array."""
    return count_of(load32_acquire(array + ARRAY_N_DIMENSIONS), load64(array + ARRAY_DIMENSIONS))


@inline
def is_usable(table, x, out):
    """Return whether these are plain contiguous arrays of one dtype object, with `out` writable."""
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
def is_idle(context):
    """Return whether a call can run now."""
    return get(context, _STATE) == _IDLE and get(context, _PENDING) == 0


@inline
def run_within(context, call, size_bytes, timeout_ns):
    """Run the call under a deadline. After a failure, Python resets it when it has read it."""
    usual_ns = usual_deadline_ns(context)
    if timeout_ns != USUAL:
        set_deadline(context, timeout_ns)
    status = run(context, call, size_bytes)
    if timeout_ns != USUAL and (status == _OK or status == _SIGNAL):
        set_deadline(context, usual_ns)
    return status


@inline
def timeout_of(table, arguments, n_arguments, place):
    """Return the deadline in the argument at `place`, which is optional."""
    if n_arguments <= place:
        return USUAL
    none, int_type = get(table, TABLE_NONE), get(table, TABLE_INT_TYPE)
    return deadline_ns(get(arguments, place), none, int_type, get(table, TABLE_FLOAT_TYPE))
