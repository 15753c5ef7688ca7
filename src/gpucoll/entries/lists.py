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
from gpucoll.blocks import Words
from gpucoll.entries.collectives import (
    EntryTable,
    capsule_pointer,
    count_elements,
    drop_reference,
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
from gpucoll.kernels.cpu.memory import load32_acquire, load64
from gpucoll.transport.shared.words import Call, Segment, Status

MOST_ARRAYS = 4096
SEEN_WORDS = 2 * 4 * MOST_ARRAYS
"""Words of the hash table of output addresses: {address, number + 1}, four times the arrays."""


@inline
def _place_of(seen: Words, n_places: int, address: int) -> int:
    """Return the index in the hash table where an address is, or would be."""
    place = ((address >> 4) * 0x9E3779B1 >> 12) & (n_places - 1)
    while seen[2 * place + 1] != 0 and seen[2 * place] != address:
        place = (place + 1) & (n_places - 1)
    return place


@inline
def _clear_seen(seen: Words, count: int) -> int:
    """Empty as much of the hash table as this list needs; return its number of places."""
    n_places = 16
    while n_places < 4 * count:
        n_places *= 2
    for place in range(n_places):
        seen[2 * place + 1] = 0
    return n_places


@inline
def _share_memory(rows: Segment, seen: Words, n_places: int, count: int) -> bool:
    """Return whether an output begins at the address of another array's output or input."""
    start = 0
    for number in range(count):
        row = rows[number]
        if row.end > start:
            address = row.output + start
            place = _place_of(seen, n_places, address)
            if seen[2 * place + 1] != 0:
                return True
            seen[2 * place] = address
            seen[2 * place + 1] = number + 1
        start = row.end
    start = 0
    for number in range(count):
        row = rows[number]
        place = _place_of(seen, n_places, row.input + start)
        found = seen[2 * place + 1]
        if found != 0 and found != number + 1:
            return True
        start = row.end
    return False


@inline
def sign_array(digest: int, n_dimensions: int, dimensions: Words) -> int:
    """Mix an array's shape into a digest."""
    digest = mix(digest, n_dimensions)
    for place in range(n_dimensions):
        digest = mix(digest, dimensions[place])
    return digest


@inline
def add_row(row: Segment, start: int, size_bytes: int, source: int, destination: int) -> int:
    """Fill in the row of one array; return the end of the whole, or -1 if Python must check."""
    if source != destination and abs(source - destination) < size_bytes:
        return -1
    row.end = start + size_bytes
    row.input = source - start
    row.output = destination - start
    return start + size_bytes


@inline
def count_of_list(table: EntryTable, xs: int) -> int:
    """Return the number of items in a list; -1 if this is not a list, or too long."""
    if load64(xs + OBJECT_TYPE) != table.list_type:
        return -1
    count = load64(xs + LIST_SIZE)
    return count if count <= MOST_ARRAYS else -1


@inline
def item_of(xs: int, number: int) -> int:
    """Return an item of a list, without a reference; 0 if the list has become shorter."""
    return Words(load64(xs + LIST_ITEMS))[number] if number < load64(xs + LIST_SIZE) else 0


@inline
def _add_arrays(table: EntryTable, call: Call, xs: int, outs: int, count: int) -> int:
    """Fill in the rows of NumPy arrays and the digest; return the total size, or -1."""
    digest, end = mix(call.base_digest, count), 0
    description = load64(item_of(xs, 0) + ARRAY_DESCRIPTION)
    for number in range(count):
        x, out = item_of(xs, number), item_of(outs, number)
        if not is_usable(table, x, out) or load64(x + ARRAY_DESCRIPTION) != description:
            return -1
        n_elements = count_elements(x)
        if count_elements(out) != n_elements:
            return -1
        row = table.segments[number]
        addresses = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
        end = add_row(row, end, n_elements * call.item_bytes, *addresses)
        if end < 0:
            return -1
        n_dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS)
        digest = sign_array(digest, n_dimensions, Words(load64(x + ARRAY_DIMENSIONS)))
    call.digest = digest
    return end


@inline
def _add_tensors(table: EntryTable, call: Call, xs: int, outs: int, count: int) -> int:
    """Fill in the rows of checked tensors and the digest; return the total size, or -1."""
    digest, end, key = mix(call.base_digest, count), 0, 0
    tensors, view = table.tensors, table.tensor_view
    for number in range(count):
        x, out = item_of(xs, number), item_of(outs, number)
        if not is_tensor(tensors, x) or not is_tensor(tensors, out):
            return -1
        n_elements, source = read_view(tensors, x, view), address_of(view)
        digest = sign_array(digest, number_of_dimensions(view), shape_of(view))
        if n_elements < 0 or (number > 0 and key_of_dtype(view) != key):
            return -1
        key = key_of_dtype(view)
        if x != out and (read_view(tensors, out, view) != n_elements or key_of_dtype(view) != key):
            return -1
        row = table.segments[number]
        end = add_row(row, end, n_elements * call.item_bytes, source, address_of(view))
        if end < 0:
            return -1
    call.digest = digest
    return end


@inline
def _look_at_tensor(table: EntryTable, x: int, key: int) -> bool:
    """Return whether the memory and flags of a tensor in a list allow the call."""
    tensors, view = table.tensors, table.tensor_view
    if not is_tensor(tensors, x):
        return False
    count = read_view(tensors, x, view)
    return count >= 0 and has_memory(tensors, x, view, count) and is_plain(tensors, x, key)


@inline
def _look_at_pair(table: EntryTable, x: int, out: int, key: int) -> int:
    """Return 1 if a tensor may be written and autograd be told, 2 if not told, 0 if neither."""
    if x == 0 or out == 0:
        return 0
    x, out = new_reference(x), new_reference(out)  # another thread may empty the list meanwhile
    tensors, found = table.tensors, 0
    is_usable_pair = _look_at_tensor(table, x, key) and (
        x == out or _look_at_tensor(table, out, key)
    )
    if is_usable_pair and may_be_written(tensors, out):
        found = 1 if counts_versions(tensors, out) else 2
    drop_reference(x)
    drop_reference(out)
    return found


@inline
def _look_at_tensors(table: EntryTable, xs: int, outs: int, count: int, key: int) -> int:
    """Check all tensors; return the value of `_look_at_pair` if all have the same, otherwise 0."""
    found = 0
    for number in range(count):
        seen = _look_at_pair(table, item_of(xs, number), item_of(outs, number), key)
        if seen == 0 or (number > 0 and seen != found):
            return 0
        found = seen
    return found


@inline
def describe(table: EntryTable, call: Call, size_bytes: int, count: int) -> Call:
    """Describe the whole list in the call block; return it, or 0 if Python must check."""
    rows, seen = table.segments, table.seen
    if size_bytes < 0 or _share_memory(rows, seen, _clear_seen(seen, count), count):
        return Call(0)
    call.size_bytes = size_bytes
    call.count = size_bytes // call.item_bytes
    call.n_dimensions = 1
    call.dimensions[0] = count  # errors show a list's number of arrays as its shape
    call.segments = rows
    call.n_segments = count
    return call


@inline
def _finish(table: EntryTable, call: Call, outs: int, timeout_ns: int, is_counted: int) -> int:
    """Run the call; return a new reference to `outs`, None to leave it to Python, or 0."""
    context = table.context
    status = run_within(context, call, call.size_bytes, timeout_ns)
    if status == Status.SIGNAL:
        return 0
    if status != Status.OK:
        return new_reference(table.none)
    if is_counted and not note_written(table.tensors, outs):
        return 0
    return new_reference(outs)


@inline
def _run_on_tensors(table: EntryTable, xs: int, outs: int, operation: int, timeout_ns: int) -> int:
    """Run a call on lists of tensors; return like `_finish`."""
    context, none = table.context, table.none
    count, view = load64(xs + LIST_SIZE), table.tensor_view
    found = key = 0
    if read_view(table.tensors, item_of(xs, 0), view) >= 0:
        key = key_of_dtype(view)
        if find_call(table, key, operation, none):
            found = _look_at_tensors(table, xs, outs, count, key)
    context.status = Status.NOT_RUN
    if found == 0 or not is_idle(context):
        return new_reference(none)
    call = find_call(table, key, operation, none)  # the table may have changed
    if not call or load64(xs + LIST_SIZE) != count or load64(outs + LIST_SIZE) != count:
        return new_reference(none)
    size_bytes = _add_tensors(table, call, xs, outs, count)
    if not describe(table, call, size_bytes, count):
        return new_reference(none)
    return _finish(table, call, outs, timeout_ns, found == 1)


@inline
def _run_on_lists(table: EntryTable, xs: int, outs: int, operation: int, timeout_ns: int) -> int:
    """Run a call on lists; return like `_finish`."""
    none, count = table.none, count_of_list(table, xs)
    if count < 1 or count_of_list(table, outs) != count:
        return new_reference(none)
    first = item_of(xs, 0)
    if is_tensor(table.tensors, first):
        return _run_on_tensors(table, xs, outs, operation, timeout_ns)
    if load64(first + OBJECT_TYPE) != table.array_type:
        return new_reference(none)
    call = find_call(table, load64(first + ARRAY_DESCRIPTION), operation, none)
    if not call:
        return new_reference(none)
    size_bytes = _add_arrays(table, call, xs, outs, count)
    if not describe(table, call, size_bytes, count):
        return new_reference(none)
    return _finish(table, call, outs, timeout_ns, False)


@compiled
def list_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(xs, outs, op, timeout_s)``; returns `outs`, or None."""
    table = EntryTable(capsule_pointer(self, 0))
    context = table.context
    context.status = Status.NOT_RUN
    timeout_ns = timeout_of(table, arguments, n_arguments, 3)
    if n_arguments >= 3 and timeout_ns >= 0 and is_idle(context):
        xs, outs = arguments[0], arguments[1]
        return _run_on_lists(table, xs, outs, arguments[2], timeout_ns)
    return new_reference(table.none)
