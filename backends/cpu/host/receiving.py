"""Matching: a receive or a probe gets the first message that fits it, in the order sent.

A message goes to the first posted receive that it matches. A message without such a receive stays
in the mailbox, unless a receive waits for a later one: then it is held aside. A message that is
received without giving size and dtype is also held: it is received in two steps. Compiled code
allocates and frees the memory of held messages through the C library.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    ANY,
    ENVELOPE_BYTES,
    MANY_DIMENSIONS,
    POST_BYTES,
    SHAPE_BYTES,
    acknowledgement_of,
    append,
    copy,
    data_place,
    description_bytes_of,
    dimensions_of,
    extra_bytes,
    finish,
    give_back,
    mode_of,
    note_matched,
    record_bytes,
    remove,
    ring_bell,
    way_of,
    written_record,
)
from gpucoll.backends.cpu.host.sending import MOVED, OVER, STAYED, acknowledgement_word
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_loop, exchange64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.filling import empty
from gpucoll.transport.shared.flags import copy_from_process, give_up, is_aborted_since
from gpucoll.transport.shared.layout import Abort, Envelope, Way
from gpucoll.transport.shared.libc import free, malloc
from gpucoll.transport.shared.peer_memory import reach
from gpucoll.transport.shared.words import (
    Held,
    Kind,
    Mailbox,
    Mode,
    Progress,
    Transfer,
    TransferTable,
)

_FETCHED_BYTES = 1 << 20
"""How much one step fetches: another thread may need the table meanwhile."""
_MOST_RECORDS = 64
"""How many records of one rank one step takes."""


# --- held messages --------------------------------------------------------------------------------


@inline
def copy_shape(record: Envelope, shape: Words) -> None:
    """Write the shape of a message into a row or a held message: dimensions, then lengths."""
    dimensions = dimensions_of(record)
    shape[0] = dimensions
    shape[1] = record.place if way_of(record) == Way.POSTED else record.first_length
    if dimensions > 1 and dimensions < MANY_DIMENSIONS:
        for place in range(layout.MESSAGE_DIMENSIONS):
            shape[1 + place] = Words(record.address + ENVELOPE_BYTES)[place]


@inline
def message_extra(record: Envelope) -> int:
    """Return the size of shape and description that follow a message's envelope."""
    return extra_bytes(dimensions_of(record), description_bytes_of(record))


@inline
def message_record_bytes(record: Envelope) -> int:
    """Return the size of a message's first record."""
    extra = message_extra(record)
    if way_of(record) != Way.POSTED:
        return ENVELOPE_BYTES + extra
    return record_bytes(extra, min(record.size_bytes, layout.POST_BYTES))


@inline
def new_held(record: Envelope, sender: int) -> Held:
    """Return a new held message, without its data, for one in a mailbox; 0: no memory."""
    description_bytes = description_bytes_of(record)
    padded = (description_bytes + 7) & -8
    data_bytes = record.size_bytes if way_of(record) == Way.POSTED else 0
    held = Held(malloc(Held.n_bytes + padded + max(data_bytes, 1)))
    if not held:
        return held
    held.next = Held(0)
    held.sender = sender
    held.tag = record.tag
    held.size_bytes = record.size_bytes
    held.dtype = record.dtype
    held.way = way_of(record)
    held.place = record.place
    held.acknowledgement = acknowledgement_of(record)
    held.mode = mode_of(record)
    held.number = record.number
    held.cost = message_record_bytes(record)
    held.done_bytes = 0
    held.is_whole = 0
    held.description_bytes = description_bytes
    held.data = held.address + Held.n_bytes + padded
    held.owner = Transfer(0)
    copy_shape(record, Words(held.at.n_dimensions))
    source = Words(record.address + ENVELOPE_BYTES + SHAPE_BYTES)
    for place in range(padded >> 3):
        Words(held.address + Held.n_bytes)[place] = source[place]
    return held


# --- pending receives and probes ------------------------------------------------------------------


@inline
def want(table: TransferTable, peer: int, change: int) -> None:
    """Change the count of receives and probes for which a rank's mailbox may have a message."""
    table.n_wanted += change
    if peer == ANY:
        table.n_any += change
        return
    words = table.peers[peer]
    words.in_wanted += change


@inline
def _asks_for(row: Transfer, sender: int, tag: int, number: int, mode: int) -> bool:
    """Return whether a receive or probe matches a message."""
    if row.peer != ANY and row.peer != sender:
        return False
    if row.number != 0:
        return row.number == number
    if mode & Mode.FOLLOWS:
        return False
    return row.tag == ANY or row.tag == tag


@inline
def _first_posted(
    table: TransferTable, sender: int, tag: int, number: int, mode: int
) -> tuple[Transfer, Transfer]:
    """Return the first receive or probe that matches a message, and the row before it."""
    before, row = Transfer(0), Transfer(table.posted.first)
    while row:
        if _asks_for(row, sender, tag, number, mode):
            break
        before, row = row, row.next
    return row, before


@inline
def _first_held(table: TransferTable, row: Transfer) -> tuple[Held, Held]:
    """Return the first held message that matches a row, and the one before it."""
    before, held = Held(0), Held(table.held.first)
    while held:
        sender, number = held.sender, held.number
        if _asks_for(row, sender, held.tag, number, held.mode):
            break
        before, held = held, held.next
    return held, before


@inline
def _unpost(table: TransferTable, row: Transfer, before: Transfer) -> None:
    remove(table.posted, before.address, row.address, Transfer.next)
    want(table, row.peer, -1)


# --- fetching -------------------------------------------------------------------------------------


@inline
def acknowledge(table: TransferTable, sender: int, acknowledgement: int) -> None:
    """Tell the sender of a message that it was taken, if the sender waits for that."""
    if acknowledgement == 0:
        return
    context = table.context
    exchange64(acknowledgement_word(context, sender, acknowledgement), 1)
    ring_bell(context, sender)


@inline
def _ask_other_host(table: TransferTable, row: Transfer) -> int:
    """Request a message's data, which then arrives without further steps; return how it went."""
    if row.place != 0:
        row.place = 0
        return call_loop(table.fetch, table, row)
    return OVER if row.done_bytes == row.found_bytes else STAYED


@inline
def fetch_step(table: TransferTable, row: Transfer) -> int:
    """Copy a piece of a message from the sender's arena or process; return how it went."""
    context, sender, done = table.context, row.found_peer, row.done_bytes
    step = min(_FETCHED_BYTES, row.found_bytes - done)
    source, destination = row.place + done, row.memory + done
    if row.way == Way.IN_ARENA:
        arena = reach(context, sender, source + step)
        if arena == 0:
            return STAYED
        copy(context, destination, arena + source, step)
    elif sender == context.rank:
        copy(context, destination, source, step)
    elif row.way == Way.ON_ANOTHER_HOST:
        return _ask_other_host(table, row)
    else:
        pid = context.pids[sender]
        if copy_from_process(context, pid, destination, source, step) != step:
            context.sequence = table.calls.sequence
            give_up(context, Abort.UNREADABLE, sender)
    if is_aborted_since(context):
        return STAYED  # the data read may be invalid by then
    row.done_bytes = done + step
    if done + step < row.found_bytes:
        return MOVED
    acknowledge(table, sender, row.acknowledgement)
    return OVER


@inline
def _begin_to_fetch(
    table: TransferTable, row: Transfer, way: int, place: int, acknowledgement: int
) -> None:
    row.way = way
    row.place = place
    row.acknowledgement = acknowledgement
    row.done_bytes = 0
    row.state = Progress.UNDER_WAY
    if fetch_step(table, row) == OVER:
        finish(table, row, Progress.DONE)
    else:
        append(table.moving, row.address, Transfer.next)


# --- out of the mailbox ---------------------------------------------------------------------------


@inline
def _describe_record(row: Transfer, record: Envelope, sender: int) -> None:
    row.found_peer = sender
    row.found_tag = record.tag
    row.found_bytes = record.size_bytes
    row.found_dtype = record.dtype
    row.found_number = record.number
    copy_shape(record, Words(row.at.n_dimensions))


@inline
def _copy_description(row: Transfer, source: Words, size_bytes: int) -> None:
    """Copy a message's description of its dtype for a probe, which has room for the longest."""
    row.description_bytes = size_bytes
    for place in range((size_bytes + 7) >> 3):
        row.description[place] = source[place]


@inline
def _fits(row: Transfer) -> bool:
    return row.found_bytes <= row.size_bytes and row.found_dtype == row.dtype


@inline
def _take_first_part(table: TransferTable, record: Envelope, destination: int) -> int:
    """Copy the data in a message's first record; return its size."""
    context, size_bytes = table.context, record.size_bytes
    part_bytes = min(size_bytes, POST_BYTES)
    if part_bytes:
        place = data_place(record, message_extra(record), size_bytes)
        copy(context, destination, place, part_bytes)
    return part_bytes


@inline
def _leave_mailbox(table: TransferTable, words: Mailbox, sender: int, record: Envelope) -> None:
    """Return the place of a message's first record to the sender."""
    words.in_number = record.number
    give_back(table.context, words, sender, message_record_bytes(record))


@inline
def _await_parts(
    table: TransferTable, words: Mailbox, sender: int, target: int, is_held: int
) -> None:
    """Note the row or held message that gets a rank's next records, and that it waits for them."""
    words.in_target = target
    words.in_target_is_held = is_held
    want(table, sender, 1)


@inline
def _hold(
    table: TransferTable, words: Mailbox, sender: int, record: Envelope, owner: Transfer
) -> Held:
    """Take a message aside, for a receive or for a later one; return it, or 0."""
    held = new_held(record, sender)
    if not held:
        return held
    held.owner = owner
    if not owner:
        append(table.held, held.address, Held.next)
    done = record.size_bytes
    if held.way == Way.POSTED:
        done = _take_first_part(table, record, held.data)
    held.done_bytes = done
    is_whole = 1 if done == held.size_bytes else 0
    held.is_whole = is_whole
    _leave_mailbox(table, words, sender, record)
    if is_whole == 0:
        _await_parts(table, words, sender, held.address, 1)
    return held


@inline
def _take_into_row(
    table: TransferTable, words: Mailbox, sender: int, record: Envelope, row: Transfer
) -> None:
    """Begin to receive a message that fits; its row is not in any list."""
    way, acknowledgement = way_of(record), acknowledgement_of(record)
    note_matched(words, message_record_bytes(record))
    if way != Way.POSTED:
        place = record.place
        _leave_mailbox(table, words, sender, record)
        _begin_to_fetch(table, row, way, place, acknowledgement)
        return
    done = _take_first_part(table, record, row.memory)
    row.done_bytes = done
    _leave_mailbox(table, words, sender, record)
    acknowledge(table, sender, acknowledgement)
    if done == row.found_bytes:
        finish(table, row, Progress.DONE)
    else:
        row.state = Progress.UNDER_WAY
        _await_parts(table, words, sender, row.address, 0)


@inline
def _give_record(
    table: TransferTable,
    words: Mailbox,
    sender: int,
    record: Envelope,
    row: Transfer,
    before: Transfer,
) -> bool:
    """Give the first message of a mailbox to a row; return False if there was no memory."""
    _describe_record(row, record, sender)
    if row.kind == Kind.PROBE:
        _unpost(table, row, before)
        description = Words(record.address + ENVELOPE_BYTES + SHAPE_BYTES)
        _copy_description(row, description, description_bytes_of(record))
        finish(table, row, Progress.DONE)
        return True
    if row.kind == Kind.RECV and not _fits(row):
        _unpost(table, row, before)
        finish(table, row, Progress.MISFIT)
        return True
    table.last_sender = sender
    if row.kind == Kind.RECV:
        _unpost(table, row, before)
        _take_into_row(table, words, sender, record, row)
        return True
    cost, way, acknowledgement = message_record_bytes(record), way_of(record), 0
    if way == Way.POSTED:
        acknowledgement = acknowledgement_of(record)
    held = _hold(table, words, sender, record, row)
    if not held:
        return False
    _unpost(table, row, before)
    note_matched(words, cost)
    acknowledge(table, sender, acknowledgement)
    row.held = held
    if held.is_whole:
        finish(table, row, Progress.DONE)
    else:
        row.state = Progress.UNDER_WAY
    return True


@inline
def _take_part(table: TransferTable, words: Mailbox, sender: int, record: Envelope) -> None:
    """Take one more part of the message under way."""
    target, is_held = words.in_target, words.in_target_is_held
    part_bytes, context = record.size_bytes, table.context
    done_field = Held.done_bytes if is_held else Transfer.done_bytes
    start = Held(target).data if is_held else Transfer(target).memory
    size_bytes = Held(target).size_bytes if is_held else Transfer(target).found_bytes
    done = Words(target)[done_field]
    place = data_place(record, 0, part_bytes)
    empty(context, context.copy_plain, start + done, place, part_bytes, size_bytes)
    Words(target)[done_field] = done + part_bytes
    give_back(context, words, sender, record_bytes(0, part_bytes))
    if done + part_bytes < size_bytes:
        return
    words.in_target = 0
    want(table, sender, -1)
    if not is_held:
        finish(table, Transfer(target), Progress.DONE)
        return
    Held(target).is_whole = 1
    owner = Held(target).owner
    if owner:
        finish(table, owner, Progress.DONE)
        return
    row, before = _first_posted(
        table, sender, Held(target).tag, Held(target).number, Held(target).mode
    )
    if row:
        _unpost(table, row, before)
        _, ahead = _first_held(table, row)
        _give_held(table, row, Held(target), ahead)


@inline
def receive_from(table: TransferTable, sender: int) -> int:
    """Take a rank's records as far as receives need them; return how many were taken."""
    words = table.peers[sender]
    for count in range(_MOST_RECORDS):
        record = written_record(table, words, sender)
        if not record:
            return count
        if words.in_target != 0:
            _take_part(table, words, sender, record)
            continue
        row, before = _first_posted(table, sender, record.tag, record.number, mode_of(record))
        if row:
            if not _give_record(table, words, sender, record, row, before):
                return count
            continue
        if words.in_wanted == 0 and table.n_any == 0:
            return count
        if not _hold(table, words, sender, record, Transfer(0)):
            return count
    return _MOST_RECORDS


# --- out of held messages -------------------------------------------------------------------------


@inline
def _describe_held(row: Transfer, held: Held) -> None:
    row.found_peer = held.sender
    row.found_tag = held.tag
    row.found_bytes = held.size_bytes
    row.found_dtype = held.dtype
    row.found_number = held.number
    for place in range(9):
        Words(row.at.n_dimensions)[place] = Words(held.at.n_dimensions)[place]


@inline
def _claim(table: TransferTable, held: Held, before: Held) -> None:
    """Take a held message out of the list, unless it has an owner already."""
    if held.owner:
        return
    sender = held.sender
    remove(table.held, before.address, held.address, Held.next)
    if held.cost != 0:  # it has not been taken and put back before
        note_matched(table.peers[sender], held.cost)
    if held.way == Way.POSTED:
        acknowledge(table, sender, held.acknowledgement)


@inline
def _give_held(table: TransferTable, row: Transfer, held: Held, before: Held) -> None:
    """Give a held message to a row in no list; the message is whole, or the row is a probe."""
    _describe_held(row, held)
    if row.kind == Kind.PROBE:
        description = Words(held.address + Held.n_bytes)
        _copy_description(row, description, held.description_bytes)
        finish(table, row, Progress.DONE)
        return
    if row.kind == Kind.TAKE:
        _claim(table, held, before)
        held.owner = row
        row.held = held
        finish(table, row, Progress.DONE)
        return
    if not _fits(row):
        finish(table, row, Progress.MISFIT)
        return
    _claim(table, held, before)
    way, place, acknowledgement = (held.way, held.place, held.acknowledgement)
    if way == Way.POSTED:
        copy(table.context, row.memory, held.data, held.size_bytes)
    free(held)
    if way == Way.POSTED:
        finish(table, row, Progress.DONE)
    else:
        _begin_to_fetch(table, row, way, place, acknowledgement)


@inline
def receive_all(table: TransferTable) -> int:
    """Check every mailbox that a receive or probe needs; return how many records were taken."""
    first = Transfer(table.posted.first)
    if table.n_wanted == 1 and first and first.peer != ANY:
        return receive_from(table, first.peer)
    world_size, last, moved = table.context.world_size, table.last_sender, 0
    for step in range(1, world_size + 1):
        sender = last + step
        if sender >= world_size:
            sender -= world_size
        if table.n_any != 0 or table.peers[sender].in_wanted != 0:
            moved += receive_from(table, sender)
    return moved


@inline
def post_receive(table: TransferTable, row: Transfer) -> None:
    """Start a receive or probe, after all that were posted before."""
    if row.held:
        held = row.held
        row.held = Held(0)
        _give_held(table, row, held, Held(0))
        return
    held, before = _first_held(table, row)
    if held and (held.is_whole or row.kind == Kind.PROBE):
        _give_held(table, row, held, before)
        return
    number, peer = row.number, row.peer
    if not held and number != 0 and number <= table.peers[peer].in_number:
        finish(table, row, Progress.GONE)
        return
    append(table.posted, row.address, Transfer.next)
    want(table, peer, 1)
    if not held:
        receive_all(table)
