"""The collectives as built-ins of CPython that read NumPy arrays and PyTorch tensors themselves."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_N_DIMENSIONS,
)
from gpucoll.entries.collectives import (
    TABLE_CONTEXT,
    TABLE_NONE,
    TABLE_TENSORS,
    TABLE_VIEW,
    capsule_pointer,
    count_elements,
    count_of,
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
    drop_reference,
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
from gpucoll.kernels.cpu.memory import get, load32_acquire, load64, put
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS
from gpucoll.transport.shared.steps import (
    COLLECTIVE,
    COUNT,
    DESTINATION,
    DIGEST,
    DIMENSIONS,
    LARGEST_BYTES,
    RANK,
    ROOT,
    SIZE_BYTES,
    SOURCE,
)
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.types import Collective

_STATUS = int(Context.STATUS)
_OK, _SIGNAL, _NOT_RUN = int(Status.OK), int(Status.SIGNAL), int(Status.NOT_RUN)
_ITEM_BYTES, _BLOCK_BYTES = int(Call.ITEM_BYTES), int(Call.BLOCK_BYTES)
_BASE_DIGEST, _SIGNS_COUNT = int(Call.BASE_DIGEST), int(Call.SIGNS_COUNT)
_SOURCE_PARTS, _DESTINATION_PARTS = int(Call.SOURCE_PARTS), int(Call.DESTINATION_PARTS)
_LARGEST_PARTS, _IN_PLACE_BLOCK = int(Call.LARGEST_PARTS), int(Call.IN_PLACE_BLOCK)
_REDUCE, _GATHER = int(Collective.REDUCE), int(Collective.GATHER)


@inline
def _sign(call, n_dimensions, dimensions, count):
    """Write what the ranks must agree on, an array's shape or a block's count, into the call."""
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
def _divides(n_dimensions, dimensions, parts):
    """Return whether the first dimension divides into equal blocks."""
    if parts == 1:
        return True
    return n_dimensions > 0 and load64(dimensions) % parts == 0


@inline
def _fill(call, n_dimensions, dimensions, source, destination, out_count):
    """Fill in the call block for an input of this shape; return it, or 0 if Python must check.

    `out_count` is -1 if the output is the input itself.
    """
    source_parts, destination_parts = get(call, _SOURCE_PARTS), get(call, _DESTINATION_PARTS)
    count = count_of(n_dimensions, dimensions)
    size_bytes = count * get(call, _ITEM_BYTES)
    block_bytes = size_bytes // source_parts
    if not _divides(n_dimensions, dimensions, source_parts):
        return 0
    if out_count < 0 and source_parts != destination_parts:
        out_count = count
    if out_count >= 0:
        if out_count * source_parts != count * destination_parts:
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
    _sign(call, n_dimensions, dimensions, count // source_parts)
    return call


@inline
def fill(call, x, out):
    """Fill in a call block for these arrays; return it, or 0 if Python must check."""
    n_dimensions, dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS), load64(x + ARRAY_DIMENSIONS)
    out_count = -1 if x == out else count_elements(out)
    source, destination = load64(x + ARRAY_DATA), load64(out + ARRAY_DATA)
    return _fill(call, n_dimensions, dimensions, source, destination, out_count)


@inline
def _prepare(table, x, out, operation, root):
    """Find and fill in the call block for these arrays; return it, or 0 if Python must check."""
    if not is_usable(table, x, out):
        return 0
    call = find_call(table, load64(x + ARRAY_DESCRIPTION), operation, root)
    return 0 if call == 0 else fill(call, x, out)


@inline
def _only_reads(context, call):
    """Return whether this rank gets no result: `out` is then x, which stays unchanged."""
    collective = get(call, COLLECTIVE)
    is_to_root = collective == _REDUCE or collective == _GATHER
    return is_to_root and get(call, ROOT) != get(context, RANK)


@inline
def _may_use(table, call, x, out, key, is_new):
    """Return whether the flags of tensors with this key allow a call. Other threads may run."""
    tensors = get(table, TABLE_TENSORS)
    if not is_plain(tensors, x, key):
        return False
    if is_new:
        return True
    if x != out and not is_plain(tensors, out, key):
        return False
    return _only_reads(get(table, TABLE_CONTEXT), call) or may_be_written(tensors, out)


@inline
def _new_result(table, arguments):
    """Return a new reference to a new tensor for a result of x's shape, or 0. Others may run."""
    tensors, view, x = get(table, TABLE_TENSORS), table + 8 * TABLE_VIEW, get(arguments, 0)
    if read_view(tensors, x, view) < 0:
        return 0
    call = find_call(table, key_of_dtype(view), get(arguments, 2), get(arguments, 3))
    if call == 0 or get(call, _SOURCE_PARTS) != get(call, _DESTINATION_PARTS):
        return 0
    return new_like(tensors, x)


@inline
def _prepare_tensors(table, arguments, out, is_new):
    """Fill in the call block for these tensors; return it, or 0 if Python must check."""
    tensors, view, x = get(table, TABLE_TENSORS), table + 8 * TABLE_VIEW, get(arguments, 0)
    count = read_view(tensors, x, view)
    if count < 0 or not has_memory(tensors, x, view, count):
        return 0
    key, source = key_of_dtype(view), address_of(view)
    n_dimensions, dimensions = number_of_dimensions(view), shape_of(view)
    destination, out_count = source, -1
    if x != out:
        out_count = read_view(tensors, out, view) if is_tensor(tensors, out) else -1
        if out_count < 0 or not has_memory(tensors, out, view, out_count):
            return 0
        if key_of_dtype(view) != key:
            return 0
        destination = address_of(view)
    call = find_call(table, key, get(arguments, 2), get(arguments, 3))
    if call == 0 or not _may_use(table, call, x, out, key, is_new):
        return 0
    if not is_idle(get(table, TABLE_CONTEXT)):
        return 0
    call = find_call(table, key, get(arguments, 2), get(arguments, 3))  # the table may have changed
    if call == 0:
        return 0
    return _fill(call, n_dimensions, dimensions, source, destination, out_count)


@inline
def _run_on_tensors(table, arguments, timeout_ns):
    """Run a call on tensors; return a new reference to `out`, None to leave it to Python, or 0."""
    none, context = get(table, TABLE_NONE), get(table, TABLE_CONTEXT)
    tensors, out, call = get(table, TABLE_TENSORS), get(arguments, 1), 0
    is_new = out == none
    out = _new_result(table, arguments) if is_new else new_reference(out)
    if out != 0:
        call = _prepare_tensors(table, arguments, out, is_new)
    if call == 0:
        if out != 0:
            drop_reference(out)
        put(context, _STATUS, _NOT_RUN)
        return new_reference(none)
    status = run_within(context, call, largest_bytes(call), timeout_ns)
    if status == _OK:
        is_seen = not is_new and not _only_reads(context, call) and counts_versions(tensors, out)
        if not is_seen or note_one_written(tensors, out):
            return out
        drop_reference(out)
        return 0
    drop_reference(out)
    return 0 if status == _SIGNAL else new_reference(none)


@compiled
def collective_entry(self, arguments, n_arguments):
    """Built-in of ``(x, out, op, root, timeout_s)``; `self` is a capsule of the table."""
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    put(context, _STATUS, _NOT_RUN)
    timeout_ns = timeout_of(table, arguments, n_arguments, 4)
    if n_arguments >= 4 and timeout_ns >= 0 and is_idle(context):
        x, out = get(arguments, 0), get(arguments, 1)
        if is_tensor(get(table, TABLE_TENSORS), x):
            return _run_on_tensors(table, arguments, timeout_ns)
        call = _prepare(table, x, out, get(arguments, 2), get(arguments, 3))
        if call != 0:
            status = run_within(context, call, largest_bytes(call), timeout_ns)
            if status == _OK:
                return new_reference(out)
            if status == _SIGNAL:
                return 0
    return new_reference(get(table, TABLE_NONE))
