"""A fused all_reduce of a list of arrays as a CPython built-in.

Lists of exact NumPy arrays of one dtype are read without Python: looking at 500 arrays one by one
in Python would cost more than reducing them. ``PyListObject`` is {header, size, items}; where it is
not (`numpy_struct.matches`), and for all else, the call is left to Python.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_N_DIMENSIONS,
    LIST_ITEMS,
    LIST_SIZE,
    OBJECT_TYPE,
)
from gpucoll.entries.collectives import (
    TABLE_ARRAY_TYPE,
    TABLE_CONTEXT,
    TABLE_LIST_TYPE,
    TABLE_NONE,
    TABLE_SEEN,
    TABLE_SEGMENTS,
    capsule_pointer,
    count_elements,
    find_call,
    is_usable,
    mix,
    new_reference,
    run,
)
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import get, load32_acquire, load64, put
from gpucoll.transport.shared.steps import COUNT, DIGEST, DIMENSIONS, SIZE_BYTES
from gpucoll.transport.shared.words import Call, Context, State, Status

MOST_ARRAYS = 4096
SEEN_WORDS = 2 * 4 * MOST_ARRAYS
"""Of the hash table of output addresses: {address, number + 1} for up to four times as many."""

_STATE, _STATUS, _PENDING = int(Context.STATE), int(Context.STATUS), int(Context.PENDING)
_IDLE, _OK, _SIGNAL = int(State.IDLE), int(Status.OK), int(Status.SIGNAL)
_NOT_RUN, _ITEM_BYTES = int(Status.NOT_RUN), int(Call.ITEM_BYTES)
_BASE_DIGEST = int(Call.BASE_DIGEST)
_SEGMENTS, _N_SEGMENTS = int(Call.SEGMENTS), int(Call.N_SEGMENTS)
_ROW_WORDS = 3
_i64 = types.int64


@inline
def _place_of(seen, n_places, address):
    """Return where an address is, or would be, in the hash table."""
    place = ((address >> 4) * 0x9E3779B1 >> 12) & (n_places - 1)
    while get(seen, 2 * place + 1) != 0 and get(seen, 2 * place) != address:
        place = (place + 1) & (n_places - 1)
    return place


@inline
def _clear_seen(seen, count):
    """Empty as much of the hash table as this list needs; return its number of places."""
    n_places = 16
    while n_places < 4 * count:
        n_places *= 2
    for place in range(n_places):
        put(seen, 2 * place + 1, 0)
    return n_places


@inline
def _share_memory(seen, n_places, sources, outs, count):
    """Return whether an output begins where another array's output or input does."""
    for number in range(count):
        out = get(outs, number)
        if count_elements(out) > 0:
            address = load64(out + ARRAY_DATA)
            place = _place_of(seen, n_places, address)
            if get(seen, 2 * place + 1) != 0:
                return True
            put(seen, 2 * place, address)
            put(seen, 2 * place + 1, number + 1)
    for number in range(count):
        place = _place_of(seen, n_places, load64(get(sources, number) + ARRAY_DATA))
        found = get(seen, 2 * place + 1)
        if found != 0 and found != number + 1:
            return True
    return False


@inline
def _sign_array(digest, array):
    """Mix an array's shape into a digest."""
    dimensions = load64(array + ARRAY_DIMENSIONS)
    n_dimensions = load32_acquire(array + ARRAY_N_DIMENSIONS)
    digest = mix(digest, n_dimensions)
    for place in range(n_dimensions):
        digest = mix(digest, load64(dimensions + 8 * place))
    return digest


@inline
def _add_array(table, call, row, start, x, out):
    """Fill in the row of one array; return the end of the whole, or -1 where Python has to look."""
    if not is_usable(table, x, out) or count_elements(out) != count_elements(x):
        return -1
    size_bytes = count_elements(x) * get(call, _ITEM_BYTES)
    source, destination = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
    if source != destination and abs(source - destination) < size_bytes:
        return -1
    put(row, 0, start + size_bytes)
    put(row, 1, source - start)
    put(row, 2, destination - start)
    return start + size_bytes


@inline
def _prepare_list(table, xs, outs, operation):
    """Fill in the call block for these lists; return it, or 0 where Python has to look."""
    list_type = get(table, TABLE_LIST_TYPE)
    if load64(xs + OBJECT_TYPE) != list_type or load64(outs + OBJECT_TYPE) != list_type:
        return 0
    count = load64(xs + LIST_SIZE)
    if count < 1 or count > MOST_ARRAYS or load64(outs + LIST_SIZE) != count:
        return 0
    sources, results = load64(xs + LIST_ITEMS), load64(outs + LIST_ITEMS)
    first = get(sources, 0)
    if load64(first + OBJECT_TYPE) != get(table, TABLE_ARRAY_TYPE):
        return 0
    description, none = load64(first + ARRAY_DESCRIPTION), get(table, TABLE_NONE)
    call = find_call(table, description, operation, none)
    if call == 0:
        return 0
    digest, end = mix(get(call, _BASE_DIGEST), count), 0
    for number in range(count):
        x = get(sources, number)
        if load64(x + OBJECT_TYPE) != get(table, TABLE_ARRAY_TYPE):
            return 0
        if load64(x + ARRAY_DESCRIPTION) != description:
            return 0
        row = get(table, TABLE_SEGMENTS) + 8 * _ROW_WORDS * number
        end = _add_array(table, call, row, end, x, get(results, number))
        if end < 0:
            return 0
        digest = _sign_array(digest, x)
    seen = get(table, TABLE_SEEN)
    if _share_memory(seen, _clear_seen(seen, count), sources, results, count):
        return 0
    put(call, DIGEST, digest)
    put(call, SIZE_BYTES, end)
    put(call, COUNT, end // get(call, _ITEM_BYTES))
    put(call, DIMENSIONS, 1)
    put(call, DIMENSIONS + 1, count)  # errors show it: a list's shape is its number of arrays
    put(call, _SEGMENTS, get(table, TABLE_SEGMENTS))
    put(call, _N_SEGMENTS, count)
    return call


@compiled(_i64(_i64, _i64, _i64))
def list_entry(self, arguments, n_arguments):
    """Built-in of ``(xs, outs, op)``; returns `outs`, or None."""
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    put(context, _STATUS, _NOT_RUN)
    if n_arguments == 3 and get(context, _STATE) == _IDLE and get(context, _PENDING) == 0:
        outs = get(arguments, 1)
        call = _prepare_list(table, get(arguments, 0), outs, get(arguments, 2))
        if call != 0:
            status = run(context, call, get(call, SIZE_BYTES))
            if status == _OK:
                return new_reference(outs)
            if status == _SIGNAL:
                return 0
    return new_reference(get(table, TABLE_NONE))
