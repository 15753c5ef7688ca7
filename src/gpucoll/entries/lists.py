"""A fused all_reduce of a list of arrays as a built-in of CPython.

It reads lists of exact NumPy arrays, or of PyTorch tensors on the host, of one dtype without
Python: checking 500 arrays one by one in Python would cost more than reducing them.
``PyListObject`` is {header, size, items}. If it is not (`numpy_struct.matches`), and for all other
arguments, the call is left to Python.
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
    TABLE_TENSORS,
    TABLE_VIEW,
    capsule_pointer,
    count_elements,
    find_call,
    is_idle,
    is_usable,
    mix,
    new_reference,
    run_within,
    timeout_of,
)
from gpucoll.entries.tensors import (
    address_of,
    counts_versions,
    drop_reference,
    has_memory,
    is_plain,
    is_tensor,
    key_of_dtype,
    may_be_written,
    note_written,
    number_of_dimensions,
    read_view,
    shape_of,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import get, load32_acquire, load64, put
from gpucoll.transport.shared.steps import COUNT, DIGEST, DIMENSIONS, SIZE_BYTES
from gpucoll.transport.shared.words import Call, Context, Status

MOST_ARRAYS = 4096
SEEN_WORDS = 2 * 4 * MOST_ARRAYS
"""Words of the hash table of output addresses: {address, number + 1}, four times the arrays."""

_STATUS = int(Context.STATUS)
_OK, _SIGNAL = int(Status.OK), int(Status.SIGNAL)
_NOT_RUN, _ITEM_BYTES = int(Status.NOT_RUN), int(Call.ITEM_BYTES)
_BASE_DIGEST = int(Call.BASE_DIGEST)
_SEGMENTS, _N_SEGMENTS = int(Call.SEGMENTS), int(Call.N_SEGMENTS)
_ROW_WORDS = 3
_END, _INPUT, _OUTPUT = 0, 1, 2  # the last two are addresses minus the array's offset in the whole


@inline
def _place_of(seen, n_places, address):
    """Return the index in the hash table where an address is, or would be."""
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
def _share_memory(rows, seen, n_places, count):
    """Return whether an output begins at the address of another array's output or input."""
    start = 0
    for number in range(count):
        row = rows + 8 * _ROW_WORDS * number
        if get(row, _END) > start:
            address = get(row, _OUTPUT) + start
            place = _place_of(seen, n_places, address)
            if get(seen, 2 * place + 1) != 0:
                return True
            put(seen, 2 * place, address)
            put(seen, 2 * place + 1, number + 1)
        start = get(row, _END)
    start = 0
    for number in range(count):
        row = rows + 8 * _ROW_WORDS * number
        place = _place_of(seen, n_places, get(row, _INPUT) + start)
        found = get(seen, 2 * place + 1)
        if found != 0 and found != number + 1:
            return True
        start = get(row, _END)
    return False


@inline
def _sign_array(digest, n_dimensions, dimensions):
    """Mix an array's shape into a digest."""
    digest = mix(digest, n_dimensions)
    for place in range(n_dimensions):
        digest = mix(digest, load64(dimensions + 8 * place))
    return digest


@inline
def _add_row(row, start, size_bytes, source, destination):
    """Fill in the row of one array; return the end of the whole, or -1 if Python must check."""
    if source != destination and abs(source - destination) < size_bytes:
        return -1
    put(row, _END, start + size_bytes)
    put(row, _INPUT, source - start)
    put(row, _OUTPUT, destination - start)
    return start + size_bytes


@inline
def count_of_list(table, xs):
    """Return the number of items in a list; -1 if this is not a list, or too long."""
    if load64(xs + OBJECT_TYPE) != get(table, TABLE_LIST_TYPE):
        return -1
    count = load64(xs + LIST_SIZE)
    return count if count <= MOST_ARRAYS else -1


@inline
def item_of(xs, number):
    """Return an item of a list, without a reference; 0 if the list has become shorter."""
    return get(load64(xs + LIST_ITEMS), number) if number < load64(xs + LIST_SIZE) else 0


@inline
def _add_arrays(table, call, xs, outs, count):
    """Fill in the rows of NumPy arrays and the digest; return the total size, or -1."""
    digest, end = mix(get(call, _BASE_DIGEST), count), 0
    description = load64(item_of(xs, 0) + ARRAY_DESCRIPTION)
    for number in range(count):
        x, out = item_of(xs, number), item_of(outs, number)
        if not is_usable(table, x, out) or load64(x + ARRAY_DESCRIPTION) != description:
            return -1
        n_elements = count_elements(x)
        if count_elements(out) != n_elements:
            return -1
        row = get(table, TABLE_SEGMENTS) + 8 * _ROW_WORDS * number
        addresses = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
        end = _add_row(row, end, n_elements * get(call, _ITEM_BYTES), *addresses)
        if end < 0:
            return -1
        n_dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS)
        digest = _sign_array(digest, n_dimensions, load64(x + ARRAY_DIMENSIONS))
    put(call, DIGEST, digest)
    return end


@inline
def _add_tensors(table, call, xs, outs, count):
    """Fill in the rows of checked tensors and the digest; return the total size, or -1."""
    digest, end, key = mix(get(call, _BASE_DIGEST), count), 0, 0
    tensors, view = get(table, TABLE_TENSORS), table + 8 * TABLE_VIEW
    for number in range(count):
        x, out = item_of(xs, number), item_of(outs, number)
        if not is_tensor(tensors, x) or not is_tensor(tensors, out):
            return -1
        n_elements, source = read_view(tensors, x, view), address_of(view)
        digest = _sign_array(digest, number_of_dimensions(view), shape_of(view))
        if n_elements < 0 or (number > 0 and key_of_dtype(view) != key):
            return -1
        key = key_of_dtype(view)
        if x != out and (read_view(tensors, out, view) != n_elements or key_of_dtype(view) != key):
            return -1
        row = get(table, TABLE_SEGMENTS) + 8 * _ROW_WORDS * number
        end = _add_row(row, end, n_elements * get(call, _ITEM_BYTES), source, address_of(view))
        if end < 0:
            return -1
    put(call, DIGEST, digest)
    return end


@inline
def _look_at_tensor(table, x, key):
    """Return whether the memory and flags of a tensor in a list allow the call."""
    tensors, view = get(table, TABLE_TENSORS), table + 8 * TABLE_VIEW
    if not is_tensor(tensors, x):
        return False
    count = read_view(tensors, x, view)
    return count >= 0 and has_memory(tensors, x, view, count) and is_plain(tensors, x, key)


@inline
def _look_at_pair(table, x, out, key):
    """Return 1 if a tensor may be written and autograd be told, 2 if not told, 0 if neither."""
    if x == 0 or out == 0:
        return 0
    x, out = new_reference(x), new_reference(out)  # another thread may empty the list meanwhile
    tensors, found = get(table, TABLE_TENSORS), 0
    is_usable_pair = _look_at_tensor(table, x, key) and (
        x == out or _look_at_tensor(table, out, key)
    )
    if is_usable_pair and may_be_written(tensors, out):
        found = 1 if counts_versions(tensors, out) else 2
    drop_reference(x)
    drop_reference(out)
    return found


@inline
def _look_at_tensors(table, xs, outs, count, key):
    """Check all tensors; return the value of `_look_at_pair` if all have the same, otherwise 0."""
    found = 0
    for number in range(count):
        seen = _look_at_pair(table, item_of(xs, number), item_of(outs, number), key)
        if seen == 0 or (number > 0 and seen != found):
            return 0
        found = seen
    return found


@inline
def _describe(table, call, size_bytes, count):
    """Describe the whole list in the call block; return it, or 0 if Python must check."""
    rows, seen = get(table, TABLE_SEGMENTS), get(table, TABLE_SEEN)
    if size_bytes < 0 or _share_memory(rows, seen, _clear_seen(seen, count), count):
        return 0
    put(call, SIZE_BYTES, size_bytes)
    put(call, COUNT, size_bytes // get(call, _ITEM_BYTES))
    put(call, DIMENSIONS, 1)
    put(call, DIMENSIONS + 1, count)  # errors show a list's number of arrays as its shape
    put(call, _SEGMENTS, rows)
    put(call, _N_SEGMENTS, count)
    return call


@inline
def _finish(table, call, outs, timeout_ns, is_counted):
    """Run the call; return a new reference to `outs`, None to leave it to Python, or 0."""
    context = get(table, TABLE_CONTEXT)
    status = run_within(context, call, get(call, SIZE_BYTES), timeout_ns)
    if status == _SIGNAL:
        return 0
    if status != _OK:
        return new_reference(get(table, TABLE_NONE))
    if is_counted and not note_written(get(table, TABLE_TENSORS), outs):
        return 0
    return new_reference(outs)


@inline
def _run_on_tensors(table, xs, outs, operation, timeout_ns):
    """Run a call on lists of tensors; return like `_finish`."""
    context, none = get(table, TABLE_CONTEXT), get(table, TABLE_NONE)
    count, view = load64(xs + LIST_SIZE), table + 8 * TABLE_VIEW
    found = key = 0
    if read_view(get(table, TABLE_TENSORS), item_of(xs, 0), view) >= 0:
        key = key_of_dtype(view)
        if find_call(table, key, operation, none) != 0:
            found = _look_at_tensors(table, xs, outs, count, key)
    put(context, _STATUS, _NOT_RUN)
    if found == 0 or not is_idle(context):
        return new_reference(none)
    call = find_call(table, key, operation, none)  # the table may have changed
    if call == 0 or load64(xs + LIST_SIZE) != count or load64(outs + LIST_SIZE) != count:
        return new_reference(none)
    size_bytes = _add_tensors(table, call, xs, outs, count)
    if _describe(table, call, size_bytes, count) == 0:
        return new_reference(none)
    return _finish(table, call, outs, timeout_ns, found == 1)


@inline
def _run_on_lists(table, xs, outs, operation, timeout_ns):
    """Run a call on lists; return like `_finish`."""
    none, count = get(table, TABLE_NONE), count_of_list(table, xs)
    if count < 1 or count_of_list(table, outs) != count:
        return new_reference(none)
    first = item_of(xs, 0)
    if is_tensor(get(table, TABLE_TENSORS), first):
        return _run_on_tensors(table, xs, outs, operation, timeout_ns)
    if load64(first + OBJECT_TYPE) != get(table, TABLE_ARRAY_TYPE):
        return new_reference(none)
    call = find_call(table, load64(first + ARRAY_DESCRIPTION), operation, none)
    if call == 0:
        return new_reference(none)
    size_bytes = _add_arrays(table, call, xs, outs, count)
    if _describe(table, call, size_bytes, count) == 0:
        return new_reference(none)
    return _finish(table, call, outs, timeout_ns, False)


@compiled
def list_entry(self, arguments, n_arguments):
    """Built-in of ``(xs, outs, op, timeout_s)``; returns `outs`, or None."""
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    put(context, _STATUS, _NOT_RUN)
    timeout_ns = timeout_of(table, arguments, n_arguments, 3)
    if n_arguments >= 3 and timeout_ns >= 0 and is_idle(context):
        xs, outs = get(arguments, 0), get(arguments, 1)
        return _run_on_lists(table, xs, outs, get(arguments, 2), timeout_ns)
    return new_reference(get(table, TABLE_NONE))
