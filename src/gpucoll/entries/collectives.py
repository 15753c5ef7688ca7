"""Compiled loops as built-ins of CPython: the fast path of small calls.

A ctypes call costs over a microsecond, and a Numba dispatch of three arrays half of one. A built-in
whose code reads the arrays itself costs a tenth. `gpucoll.kernels.cpu.builtins` turns an address
into a Python object. There are two kinds:

- without arguments (`prepared_call`, `queued_call`): runs the call block in its capsule and returns
  a `Status`;
- ``(x, out, op, root, timeout_s)`` (`gpucoll.entries.collective_entry`; the last is optional):
  serves exact NumPy arrays, and PyTorch tensors on the host, that match an entry of its table
  (dtype, op and root objects by identity), and returns `out`. It leaves everything else, including
  errors, to Python by returning ``None``; `Context.status` then has the reason.

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
from gpucoll.arrays.tensor_table import TensorTable, TensorView
from gpucoll.blocks import Block, Field, Words, words
from gpucoll.config import LONGEST_TIMEOUT_S
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop, compare_exchange64, load32_acquire, load64
from gpucoll.transport.shared.flags import HELD, NOT_HELD, release_interpreter
from gpucoll.transport.shared.words import Call, Context, Pending, Segment, State, Status
from gpucoll.types import mix_digest

MAX_ENTRIES = 16
_SHORT_BYTES = 8 << 10

_i64 = types.int64
restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_i64))
restore_error = types.ExternalFunction("PyErr_Restore", types.void(_i64, _i64, _i64))
clear_error = types.ExternalFunction("PyErr_Clear", types.void())
capsule_pointer = types.ExternalFunction("PyCapsule_GetPointer", _i64(_i64, _i64))
as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))
_as_double = types.ExternalFunction("PyFloat_AsDouble", types.float64(_i64))
new_integer = types.ExternalFunction("PyLong_FromLongLong", _i64(_i64))
call_object = types.ExternalFunction("PyObject_VectorcallDict", _i64(_i64, _i64, _i64, _i64))
_increase_reference = types.ExternalFunction("Py_IncRef", types.void(_i64))
drop_reference = types.ExternalFunction("Py_DecRef", types.void(_i64))
mix = inline(mix_digest)

# --- the tables that entries read: Python's objects by identity, and the calls for them -----------


class Entry(Block):
    """The call for one dtype, op and root, each an address of a Python object."""

    dtype: int  # for tensors: the dtype's key
    operation: int
    root: int
    call: Field[Call]


class EntryTable(Block):
    """What the built-ins of one collective, or of messages, have in their capsule."""

    context: Field[Context]
    array_type: int
    count: int  # of entries
    none: int
    int_type: int
    sends: int  # whether its messages are sent
    list_type: int
    segments: Field[Segment]  # the first of a list's arrays
    seen: Field[Words]  # hash table of addresses
    float_type: int
    tensors: Field[TensorTable]  # with it tensors are read; 0 before the first tensor
    tensor_view: Field[TensorView] = words(TensorView.n_words)  # of the tensor that is being read
    queue: Field[Pending]
    tuple_type: int
    blocks: int  # address of the tables that `block_arguments` fills
    waits: Field[Call]  # waits for one message
    entries: Field[Entry] = words(MAX_ENTRIES * Entry.n_words)


# --- the deadline of one call, if it has its own --------------------------------------------------


SLICE_S = 0.02
"""Time after which a wait looks whether to continue."""
LEAST_SLICE_S = 1e-4

USUAL = 0
"""In place of nanoseconds: the communicator's deadline."""
UNKNOWN = -1
"""In place of nanoseconds: Python must check the argument."""

_MOST_SLICE_NS, _LEAST_SLICE_NS = int(SLICE_S * 1e9), int(LEAST_SLICE_S * 1e9)
_LONGEST_S = float(LONGEST_TIMEOUT_S)


@inline
def deadline_ns(seconds: int, none: int, int_type: int, float_type: int) -> int:
    """Return a ``timeout_s`` in nanoseconds, if it is a plain float or int in range."""
    if seconds == none:
        return USUAL
    kind = load64(seconds + OBJECT_TYPE)
    if kind != float_type and kind != int_type:
        return UNKNOWN
    number = _as_double(seconds)
    if number > 0 and number <= _LONGEST_S:
        return max(1, int(number * 1e9))
    clear_error()  # an int that no float can hold sets one
    return UNKNOWN


@inline
def set_deadline(context: Context, timeout_ns: int) -> None:
    """Set the deadline of the next call."""
    context.timeout_ns = timeout_ns
    context.slice_ns = max(min(_MOST_SLICE_NS, timeout_ns), _LEAST_SLICE_NS)


# --- running a call -------------------------------------------------------------------------------


@inline
def _end(context: Context, call: Call, status: int) -> None:
    """Note how a call ended, and whether the next may run without Python."""
    context.status = status
    goes_on = (
        status == Status.OK
        or status == Status.NO_ROOM
        or status == Status.NOT_YET
        or status == Status.MISFIT
    )
    if status == Status.SIGNAL:
        goes_on = call.leaves != 0
    context.state = State.IDLE if goes_on else State.NEEDS_PYTHON


@inline
def run(context: Context, call: Call, size_bytes: int) -> int:
    """Run the call; return its status.

    Other Python threads run meanwhile; during a short call, only once it waits. Releasing the
    interpreter and taking it back costs 40 ns, a tenth of a small all_reduce.
    """
    context.state = State.BUSY
    context.interpreter = HELD
    if size_bytes > _SHORT_BYTES:
        release_interpreter(context)
    status = call_loop(call.loop, context, call)
    thread = context.interpreter
    context.interpreter = 0
    if thread != HELD:
        restore_thread(thread)
    _end(context, call, status)
    if status == Status.SIGNAL:
        restore_error(context.raised[0], context.raised[1], context.raised[2])
    return status


@inline
def run_without_python(context: Context, call: Call) -> int:
    """Run the call in a thread that does not hold the interpreter; return its status.

    The caller has seen to it that no other thread calls the communicator; one may close it. After
    SIGNAL, `Context.raised` has what a signal handler raised.
    """
    if compare_exchange64(context.at.state, State.IDLE, State.BUSY) != State.IDLE:
        return Status.NOT_RUN
    context.interpreter = NOT_HELD
    status = call_loop(call.loop, context, call)
    context.interpreter = 0
    _end(context, call, status)
    return status


@inline
def largest_bytes(call: Call) -> int:
    """Return the size of the larger of this rank's arrays."""
    return max(call.size_bytes, call.largest_bytes)


@inline
def new_reference(value: int) -> int:
    """Return a Python object with one more reference, which the caller owns."""
    _increase_reference(value)
    return value


@inline
def _run_prepared(self: int, may_overtake: int) -> int:
    call = Call(capsule_pointer(self, 0))
    context = call.context
    status: int = Status.NOT_RUN
    if context.state == State.IDLE and (may_overtake or context.pending == 0):
        status = run(context, call, largest_bytes(call))
    return 0 if status == Status.SIGNAL else new_integer(status)


@compiled
def prepared_call(self: int, _: int) -> int:
    """Built-in without arguments; `self` is a capsule of the call block."""
    return _run_prepared(self, False)


@compiled
def queued_call(self: int, _: int) -> int:
    """Built-in without arguments, for the queue of asynchronous calls, when it has the turn."""
    return _run_prepared(self, True)


@inline
def find_call(table: EntryTable, dtype: int, operation: int, root: int) -> Call:
    """Return the call block for these objects, or 0. For tensors, `dtype` is the dtype's key."""
    for place in range(table.count):
        entry = table.entries[place]
        if entry.dtype == dtype and entry.operation == operation and entry.root == root:
            return entry.call
    return Call(0)


@inline
def count_of(n_dimensions: int, dimensions: Words) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for place in range(n_dimensions):
        count *= dimensions[place]
    return count


@inline
def count_elements(array: int) -> int:
    """Return the number of elements of a NumPy array."""
    return count_of(
        load32_acquire(array + ARRAY_N_DIMENSIONS), Words(load64(array + ARRAY_DIMENSIONS))
    )


@inline
def is_usable(table: EntryTable, x: int, out: int) -> bool:
    """Return whether these are plain contiguous arrays of one dtype object, with `out` writable."""
    array_type = table.array_type
    if load64(x + OBJECT_TYPE) != array_type or load64(out + OBJECT_TYPE) != array_type:
        return False
    if load64(out + ARRAY_DESCRIPTION) != load64(x + ARRAY_DESCRIPTION):
        return False
    if not load32_acquire(x + ARRAY_FLAGS) & C_CONTIGUOUS:
        return False
    needed = C_CONTIGUOUS | WRITEABLE
    return load32_acquire(out + ARRAY_FLAGS) & needed == needed


@inline
def is_idle(context: Context) -> bool:
    """Return whether a call can run now."""
    return context.state == State.IDLE and context.pending == 0


@inline
def run_within(context: Context, call: Call, size_bytes: int, timeout_ns: int) -> int:
    """Run the call under a deadline. After a failure, Python resets it when it has read it."""
    usual_ns = context.timeout_ns
    if timeout_ns != USUAL:
        set_deadline(context, timeout_ns)
    status = run(context, call, size_bytes)
    if timeout_ns != USUAL and (status == Status.OK or status == Status.SIGNAL):
        set_deadline(context, usual_ns)
    return status


@inline
def timeout_of(table: EntryTable, arguments: Words, n_arguments: int, place: int) -> int:
    """Return the deadline in the argument at `place`, which is optional."""
    if n_arguments <= place:
        return USUAL
    none, int_type = table.none, table.int_type
    return deadline_ns(arguments[place], none, int_type, table.float_type)
