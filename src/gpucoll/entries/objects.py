"""The first round of an object collective as a built-in: from a pickle to a pickle.

In the first round every rank gets a row of each rank: a head that describes its object, and as much
of it as fits (`gpucoll.calls.objects`). This built-in gives and takes objects that fit.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.entries.collectives import capsule_pointer, is_idle, new_integer, new_reference, run
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.words import Call, Context, Status

_i64 = types.int64
_bytes_address = types.ExternalFunction("PyBytes_AsString", _i64(_i64))
_bytes_size = types.ExternalFunction("PyBytes_Size", _i64(_i64))
_new_bytes = types.ExternalFunction("PyBytes_FromStringAndSize", _i64(_i64, _i64))

SIZE_BYTES = 8


class Row(Block):
    """What a rank sends in the first round: numbers that describe its object, and its beginning."""

    n_parts: int
    tail_bytes: int
    n_large: int
    has_failed: int  # whether the object could not be pickled; the tail is then the error's text
    tag: Field[Words] = words(4)  # see `gpucoll.calls.object_tags`; zeros on one host
    # The tail of an object of one part: its size, and the pickle.
    part_bytes: int


class ObjectTable(Block):
    """What the built-in of one collective and root has in its capsule."""

    context: Field[Context]
    call: Field[Call]  # exchanges the rows
    none: int
    mine: Field[Row]  # this rank's row
    sent: Field[Row]  # the root's row, after the exchange
    row_bytes: int


@inline
def _most_bytes(table: ObjectTable) -> int:
    """Return how long a pickle is that fits into the first round, at most."""
    return table.row_bytes - Row.n_bytes


@inline
def _pickle_of(row: Row) -> int:
    """Return the address of the pickle in a row."""
    return row.address + Row.n_bytes


@inline
def _fits(table: ObjectTable, row: Row) -> bool:
    """Return whether a row has a whole object of one part."""
    if row.n_parts != 1 or row.n_large != 0 or row.has_failed != 0:
        return False
    return SIZE_BYTES <= row.tail_bytes <= _most_bytes(table) + SIZE_BYTES


@compiled
def object_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(pickle,)`` on the root and of ``(None,)`` elsewhere: makes the first round.

    Returns the root's pickle; the root's whole row, which is longer than any pickle in it, if there
    is more to come or the root has failed; or a `Status` if the round was not made.
    """
    table, given = ObjectTable(capsule_pointer(self, 0)), arguments[0]
    context, row, sends = table.context, table.mine, given != table.none
    if n_arguments != 1 or not is_idle(context):
        return new_integer(Status.NOT_RUN)
    row.n_parts = row.tail_bytes = 0
    if sends:
        address = _bytes_address(given)
        if address == 0:
            return 0
        size_bytes = _bytes_size(given)
        if size_bytes > _most_bytes(table):
            return new_integer(Status.NOT_RUN)
        row.n_parts = 1
        row.tail_bytes = SIZE_BYTES + size_bytes
        row.part_bytes = size_bytes
        call_copy(context.copy_plain, _pickle_of(row), address, size_bytes, 0)
    status = run(context, table.call, table.row_bytes)
    if status == Status.SIGNAL:
        return 0
    if status != Status.OK:
        return new_integer(status)
    if sends:
        return new_reference(given)
    sent = table.sent
    if _fits(table, sent):
        return _new_bytes(_pickle_of(sent), sent.tail_bytes - SIZE_BYTES)
    return _new_bytes(sent.address, table.row_bytes)
