"""The collectives as built-ins of CPython that read NumPy arrays and PyTorch tensors themselves."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_N_DIMENSIONS,
)
from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.entries.collectives import (
    EntryTable,
    capsule_pointer,
    count_elements,
    count_of,
    drop_reference,
    find_call,
    is_idle,
    is_usable,
    largest_bytes,
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
    new_like,
    note_one_written,
    number_of_dimensions,
    read_view,
    shape_of,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import load32_acquire, load64
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS
from gpucoll.transport.shared.words import Call, Context, Status


@inline
def _sign(call: Call, n_dimensions: int, dimensions: Words, count: int) -> None:
    """Write what the ranks must agree on, an array's shape or a block's count, into the call."""
    if call.signs_count:
        call.n_dimensions = 1
        call.dimensions[0] = count
        call.digest = mix(mix(call.base_digest, 1), count)
        return
    digest = mix(call.base_digest, n_dimensions)
    call.n_dimensions = n_dimensions
    for place in range(n_dimensions):
        length = dimensions[place]
        digest = mix(digest, length)
        if place < SHOWN_DIMENSIONS:
            call.dimensions[place] = length
    call.digest = digest


@inline
def _divides(n_dimensions: int, dimensions: Words, parts: int) -> bool:
    """Return whether the first dimension divides into equal blocks."""
    if parts == 1:
        return True
    return n_dimensions > 0 and dimensions[0] % parts == 0


@inline
def fill_call(
    call: Call, n_dimensions: int, dimensions: Words, source: int, destination: int, out_count: int
) -> Call:
    """Fill in the call block for an input of this shape; return it, or 0 if Python must check.

    `out_count` is -1 if the output is the input itself.
    """
    source_parts, destination_parts = call.source_parts, call.destination_parts
    count = count_of(n_dimensions, dimensions)
    size_bytes = count * call.item_bytes
    block_bytes = size_bytes // source_parts
    if not _divides(n_dimensions, dimensions, source_parts):
        return Call(0)
    if out_count < 0 and source_parts != destination_parts:
        out_count = count
    if out_count >= 0:
        if out_count * source_parts != count * destination_parts:
            return Call(0)
        ahead, behind = source - destination, destination - source
        if (
            ahead != call.in_place_block * block_bytes
            and ahead < block_bytes * destination_parts
            and behind < size_bytes
        ):
            return Call(0)
    call.count = count
    call.size_bytes = size_bytes
    call.block_bytes = block_bytes
    call.largest_bytes = block_bytes * call.largest_parts
    call.source = source
    call.destination = destination
    _sign(call, n_dimensions, dimensions, count // source_parts)
    return call


@inline
def fill(call: Call, x: int, out: int) -> Call:
    """Fill in a call block for these arrays; return it, or 0 if Python must check."""
    n_dimensions, dimensions = (
        load32_acquire(x + ARRAY_N_DIMENSIONS),
        Words(load64(x + ARRAY_DIMENSIONS)),
    )
    out_count = -1 if x == out else count_elements(out)
    source, destination = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
    return fill_call(call, n_dimensions, dimensions, source, destination, out_count)


@inline
def _prepare(table: EntryTable, x: int, out: int, operation: int, root: int) -> Call:
    """Find and fill in the call block for these arrays; return it, or 0 if Python must check."""
    if not is_usable(table, x, out):
        return Call(0)
    call = find_call(table, load64(x + ARRAY_DESCRIPTION), operation, root)
    return Call(0) if not call else fill(call, x, out)


@inline
def _only_reads(context: Context, call: Call) -> bool:
    """Return whether this rank gets no result: `out` is then x, which stays unchanged."""
    return call.flow == Flow.TO_ROOT and call.root != context.rank


@inline
def _may_use(table: EntryTable, call: Call, x: int, out: int, key: int, is_new: int) -> bool:
    """Return whether the flags of tensors with this key allow a call. Other threads may run."""
    tensors = table.tensors
    if not is_plain(tensors, x, key):
        return False
    if is_new:
        return True
    if x != out and not is_plain(tensors, out, key):
        return False
    return _only_reads(table.context, call) or may_be_written(tensors, out)


@inline
def _new_result(table: EntryTable, arguments: Words) -> int:
    """Return a new reference to a new tensor for a result of x's shape, or 0. Others may run."""
    tensors, view, x = (table.tensors, table.tensor_view, arguments[0])
    if read_view(tensors, x, view) < 0:
        return 0
    call = find_call(table, key_of_dtype(view), arguments[2], arguments[3])
    if not call or call.source_parts != call.destination_parts:
        return 0
    return new_like(tensors, x)


@inline
def _prepare_tensors(table: EntryTable, arguments: Words, out: int, is_new: int) -> Call:
    """Fill in the call block for these tensors; return it, or 0 if Python must check."""
    tensors, view, x = (table.tensors, table.tensor_view, arguments[0])
    count = read_view(tensors, x, view)
    if count < 0 or not has_memory(tensors, x, view, count):
        return Call(0)
    key, source = key_of_dtype(view), address_of(view)
    n_dimensions, dimensions = number_of_dimensions(view), shape_of(view)
    destination, out_count = source, -1
    if x != out:
        out_count = read_view(tensors, out, view) if is_tensor(tensors, out) else -1
        if out_count < 0 or not has_memory(tensors, out, view, out_count):
            return Call(0)
        if key_of_dtype(view) != key:
            return Call(0)
        destination = address_of(view)
    call = find_call(table, key, arguments[2], arguments[3])
    if not call or not _may_use(table, call, x, out, key, is_new):
        return Call(0)
    if not is_idle(table.context):
        return Call(0)
    call = find_call(table, key, arguments[2], arguments[3])  # the table may have changed
    if not call:
        return Call(0)
    return fill_call(call, n_dimensions, dimensions, source, destination, out_count)


@inline
def _run_on_tensors(table: EntryTable, arguments: Words, timeout_ns: int) -> int:
    """Run a call on tensors; return a new reference to `out`, None to leave it to Python, or 0."""
    none, context = table.none, table.context
    tensors, out, call = table.tensors, arguments[1], Call(0)
    is_new = out == none
    out = _new_result(table, arguments) if is_new else new_reference(out)
    if out != 0:
        call = _prepare_tensors(table, arguments, out, is_new)
    if not call:
        if out != 0:
            drop_reference(out)
        context.status = Status.NOT_RUN
        return new_reference(none)
    status = run_within(context, call, largest_bytes(call), timeout_ns)
    if status == Status.OK:
        is_seen = not is_new and not _only_reads(context, call) and counts_versions(tensors, out)
        if not is_seen or note_one_written(tensors, out):
            return out
        drop_reference(out)
        return 0
    drop_reference(out)
    return 0 if status == Status.SIGNAL else new_reference(none)


@compiled
def collective_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, out, op, root, timeout_s)``; `self` is a capsule of the table."""
    table = EntryTable(capsule_pointer(self, 0))
    context = table.context
    context.status = Status.NOT_RUN
    timeout_ns = timeout_of(table, arguments, n_arguments, 4)
    if n_arguments >= 4 and timeout_ns >= 0 and is_idle(context):
        x, out = arguments[0], arguments[1]
        if is_tensor(table.tensors, x):
            return _run_on_tensors(table, arguments, timeout_ns)
        call = _prepare(table, x, out, arguments[2], arguments[3])
        if call:
            status = run_within(context, call, largest_bytes(call), timeout_ns)
            if status == Status.OK:
                return new_reference(out)
            if status == Status.SIGNAL:
                return 0
    return new_reference(table.none)
