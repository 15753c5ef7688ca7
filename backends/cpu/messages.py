"""Point-to-point within a host: a table of sends, receives and probes, all making progress.

One loop serves a single blocking call, a group and what is asynchronous. Sends to one rank go in
the table's order; a message goes to the first receive of the table that asks for its sender and
tag. One that nobody asks for, but stands before others, is given to Python to be kept aside.
"""

from __future__ import annotations

from numba import types

from gpucoll.backends.cpu.mailboxes import (
    E_DTYPE,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    E_WAY,
    EAGER_BYTES,
    IN_ARENA,
    IN_PROCESS,
    POST_BYTES,
    POSTED,
    advance_head,
    advance_tail,
    copy,
    copy_posted,
    data_of,
    head_of,
    incoming,
    is_full,
    is_written,
    outgoing,
    post_at,
    read_shape,
    tail_of,
    write_shape,
)
from gpucoll.backends.cpu.single_copy import SLICE_BYTES, can_read, read_from
from gpucoll.control.calls import (
    LINE,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    STATUS_LINES,
    WORLD_SIZE,
    arena_of,
    arena_offset,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import exchange64, get, load64, load64_acquire, pause, put
from gpucoll.transport import layout
from gpucoll.transport.flags import (
    FIRST_SPINS,
    begin_to_sleep,
    end_sleep,
    event_pending,
    give_up,
    is_aborted,
    look_around,
    release_interpreter,
    sleep_until_rung,
    start_clock,
    yield_once,
)
from gpucoll.transport.layout import (
    Abort,
    Call,
    Context,
    Kind,
    Path,
    Progress,
    Status,
    Transfer,
)

ROW_BYTES = 8 * layout.TRANSFER_WORDS
KIND, PEER, TAG = int(Transfer.KIND), int(Transfer.PEER), int(Transfer.TAG)
ADDRESS, SIZE_BYTES, DTYPE = (
    int(Transfer.ADDRESS),
    int(Transfer.SIZE_BYTES),
    int(Transfer.DTYPE),
)
STATE, DONE_BYTES, POST = int(Transfer.STATE), int(Transfer.DONE_BYTES), int(Transfer.POST)
FOUND_PEER, FOUND_TAG = int(Transfer.FOUND_PEER), int(Transfer.FOUND_TAG)
SEND, RECV, PROBE = int(Kind.SEND), int(Kind.RECV), int(Kind.PROBE)
WAITING, UNDER_WAY = int(Progress.WAITING), int(Progress.UNDER_WAY)
DONE, MISFIT = int(Progress.DONE), int(Progress.MISFIT)
ANY = -1
KEPT_ASIDE = 1
"""In the word POST of a receive: nobody has asked for it."""
_TRANSFERS, _N_TRANSFERS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_TAKES_MORE = int(Call.TAKES_MORE)
_BELLS, _DOING = int(Context.BELLS), layout.BELL_DOING
_UNMATCHED, _MORE = int(Context.UNMATCHED), int(Context.MORE)
_SPINS, _YIELDS = int(Context.SPINS), int(Context.YIELDS)
_PATIENCE = 3
"""A message of 256 KiB is copied in 10 us, which is more than `Context.YIELDS` cover."""
_STATUS_CLOSED = layout.STATUS_CLOSED
_SINGLE_COPY_MAX_BYTES = int(Context.SINGLE_COPY_MAX_BYTES)
_EVENT_LINE, _EVENT_WORD = int(Context.EVENT_LINE), layout.EVENT_WORD
_ANSWER_EVEN, _ANSWER_ODD = layout.STATUS_ACKNOWLEDGED
_SEQUENCE, _CHUNK = int(Context.SEQUENCE), int(Context.CHUNK)
LAST_SENDER = int(Context.MESSAGE_ROWS) + FOUND_PEER
"""Whose message came last, in the context's own row: ANY_SOURCE looks at the next rank first."""
_EVENT, _LOST = int(Status.EVENT), int(Status.LOST)
_ASIDE, _STATUS_MORE = int(Status.ASIDE), int(Status.MORE)
_ABORT_LOST, _MESSAGE = int(Abort.LOST), int(Path.MESSAGE)
_ABORT_DEADLINE = int(Abort.MESSAGE_DEADLINE)


@inline
def _row(table, place):
    return table + place * ROW_BYTES


# --- sending ------------------------------------------------------------------------------------


@inline
def _may_start(table, place):
    """Return whether no earlier send to the same rank is unfinished: messages keep their order."""
    peer = get(_row(table, place), PEER)
    for before in range(place):
        row = _row(table, before)
        if get(row, KIND) == SEND and get(row, PEER) == peer and get(row, STATE) != DONE:
            return False
    return True


@inline
def _fill_post(context, row, post):
    """Put the next part of a message behind the envelope's place of a post."""
    done = get(row, DONE_BYTES)
    part_bytes = min(get(context, POST_BYTES), get(row, SIZE_BYTES) - done)
    place = data_of(post, get(row, SIZE_BYTES))
    copy_posted(context, place, get(row, ADDRESS) + done, part_bytes)
    put(row, DONE_BYTES, done + part_bytes)


@inline
def _is_fetched(context, row, is_alone):
    """Return whether the receiver reads the data straight from this process.

    Where each rank has a CPU, two processes stream what is very large faster than one copies it,
    if that is all they have to do: with messages both ways each copies one.
    """
    receiver, most_bytes = get(row, PEER), get(context, _SINGLE_COPY_MAX_BYTES)
    if receiver == get(context, RANK) or not can_read(context, receiver):
        return False
    return not is_alone or most_bytes == 0 or get(row, SIZE_BYTES) <= 2 * most_bytes


@inline
def _write_envelope(context, row, post, is_alone):
    """Write the envelope, and the data or where it is; return the way."""
    size_bytes = get(row, SIZE_BYTES)
    put(post, E_SIZE_BYTES, size_bytes)
    put(post, E_TAG, get(row, TAG))
    put(post, E_DTYPE, get(row, DTYPE))
    write_shape(post, row)
    way = POSTED
    if size_bytes > get(context, EAGER_BYTES):
        offset = arena_offset(context, get(row, ADDRESS), size_bytes)
        if offset != NOT_SHARED:
            way = IN_ARENA
            put(post, E_PLACE, offset)
        elif _is_fetched(context, row, is_alone):
            way = IN_PROCESS
            put(post, E_PLACE, get(row, ADDRESS))
    if way == POSTED:
        _fill_post(context, row, post)
    put(post, E_WAY, way)
    return way


@inline
def _send(context, table, count, place):
    """Take a send one step further; return whether it moved."""
    row = _row(table, place)
    mailbox = outgoing(context, get(row, PEER))
    if get(row, STATE) == UNDER_WAY and get(row, POST) >= 0:  # the receiver fetches it
        if tail_of(mailbox) <= get(row, POST):
            return False
        put(row, STATE, DONE)
        return True
    if get(row, STATE) == WAITING and not _may_start(table, place):
        return False
    if is_full(mailbox):
        return False
    head = head_of(mailbox)
    post = post_at(context, mailbox, head)
    if get(row, STATE) == WAITING:
        put(row, STATE, UNDER_WAY)
        way = _write_envelope(context, row, post, count == 1)
        put(row, POST, -1 if way == POSTED else head)
    else:
        _fill_post(context, row, post)
    advance_head(context, mailbox, get(row, PEER), get(row, SIZE_BYTES))
    if get(row, POST) < 0 and get(row, DONE_BYTES) >= get(row, SIZE_BYTES):
        put(row, STATE, DONE)
    return True


# --- receiving ----------------------------------------------------------------------------------


@inline
def _is_being_taken(table, count, sender):
    """Return whether a receive is in the middle of a message of this sender.

    One that is taken aside counts until Python knows of it: later receives may ask for it.
    """
    for place in range(count):
        row = _row(table, place)
        if get(row, KIND) == RECV and get(row, FOUND_PEER) == sender:
            state, is_aside = get(row, STATE), get(row, POST) == KEPT_ASIDE
            if state == UNDER_WAY or (is_aside and state == DONE):
                return True
    return False


@inline
def _asks_for(row, sender, tag):
    wants_sender = get(row, PEER) == ANY or get(row, PEER) == sender
    return wants_sender and (get(row, TAG) == ANY or get(row, TAG) == tag)


@inline
def _is_first(table, place, sender, tag):
    """Return whether no earlier operation asks for this message, which may have come just now."""
    for before in range(place):
        row = _row(table, before)
        if get(row, KIND) != SEND and get(row, STATE) == WAITING and _asks_for(row, sender, tag):
            return False
    return True


@inline
def _take_part(context, row, mailbox, number):
    """Copy a post's data to its place, and give the post back."""
    done = get(row, DONE_BYTES)
    part_bytes = min(get(context, POST_BYTES), get(row, SIZE_BYTES) - done)
    place = data_of(post_at(context, mailbox, number), get(row, SIZE_BYTES))
    copy(context, get(row, ADDRESS) + done, place, part_bytes)
    put(row, DONE_BYTES, done + part_bytes)
    # First the state: `Courier.look` must not take the next post for the beginning of a message.
    put(row, STATE, DONE if done + part_bytes >= get(row, SIZE_BYTES) else UNDER_WAY)
    advance_tail(context, mailbox, get(row, FOUND_PEER))


@inline
def _fetch(context, row, mailbox, post):
    """Copy a message from the sender's arena or process; return a status."""
    sender, size_bytes, status = get(row, FOUND_PEER), get(row, SIZE_BYTES), OK
    place = get(post, E_PLACE)
    if get(post, E_WAY) == IN_ARENA:
        copy(context, get(row, ADDRESS), arena_of(context, sender) + place, size_bytes)
    else:
        done = 0
        while done < size_bytes and status != _LOST and not is_aborted(context):
            step = min(SLICE_BYTES, size_bytes - done)  # a mismatch ends no message: see `_answer`
            status = read_from(context, sender, get(row, ADDRESS) + done, place + done, step)
            done += step
    if status != _LOST:
        status = _EVENT if is_aborted(context) else OK  # what was read may be anything by then
    if status == OK:
        advance_tail(context, mailbox, sender)
        put(row, STATE, DONE)
    return status


@inline
def _match(context, row, sender, mailbox, number):
    """Give the message at the head of a mailbox to a receive or probe; return a status."""
    post = post_at(context, mailbox, number)
    put(row, FOUND_PEER, sender)
    put(row, FOUND_TAG, get(post, E_TAG))
    fits = get(row, SIZE_BYTES) == get(post, E_SIZE_BYTES) and get(row, DTYPE) == get(post, E_DTYPE)
    if get(row, KIND) == PROBE or not fits:
        put(row, STATE, DONE if get(row, KIND) == PROBE else MISFIT)
        put(row, SIZE_BYTES, get(post, E_SIZE_BYTES))
        put(row, DTYPE, get(post, E_DTYPE))
        read_shape(row, post)
        return OK
    put(context, LAST_SENDER, sender)
    if get(post, E_WAY) != POSTED:
        return _fetch(context, row, mailbox, post)
    _take_part(context, row, mailbox, number)
    return OK


@inline
def _receive(context, table, count, place):
    """Take a receive or probe one step further; return 1 if it moved, 0 if not, -status."""
    row = _row(table, place)
    if get(row, STATE) == UNDER_WAY:
        mailbox = incoming(context, get(row, FOUND_PEER))
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number):
            return 0
        _take_part(context, row, mailbox, number)
        return 1
    first = get(row, PEER)
    n_senders = 1 if first != ANY else get(context, WORLD_SIZE)
    for step in range(n_senders):
        sender = first if first != ANY else (get(context, LAST_SENDER) + 1 + step) % n_senders
        mailbox = incoming(context, sender)
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number) or _is_being_taken(table, count, sender):
            continue
        tag = get(post_at(context, mailbox, number), E_TAG)
        if _asks_for(row, sender, tag) and _is_first(table, place, sender, tag):
            status = _match(context, row, sender, mailbox, number)
            return 1 if status == OK else -status
    return 0


@inline
def _unwanted_sender(context, table, count):
    """Return a rank whose next message nobody asks for, while somebody waits for it; or -1."""
    for sender in range(get(context, WORLD_SIZE)):
        mailbox = incoming(context, sender)
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number) or _is_being_taken(table, count, sender):
            continue
        tag = get(post_at(context, mailbox, number), E_TAG)
        is_waited_for = is_wanted = False
        for place in range(count):
            row = _row(table, place)
            if get(row, KIND) != SEND and get(row, STATE) == WAITING:
                if get(row, PEER) == ANY or get(row, PEER) == sender:
                    is_waited_for = True
                if _asks_for(row, sender, tag):
                    is_wanted = True
        if is_waited_for and not is_wanted:
            return sender
    return -1


# --- the loop -----------------------------------------------------------------------------------


@inline
def _step(context, table, count):
    """Take every operation one step further, sends first: others wait for them.

    Return how many moved, or a negative status; and how many are not done.
    """
    moved = unfinished = 0
    for place in range(count):
        row = _row(table, place)
        if get(row, KIND) == SEND and get(row, STATE) < DONE:
            moved += _send(context, table, count, place)
            unfinished += get(row, STATE) < DONE
    for place in range(count):
        row = _row(table, place)
        if get(row, KIND) != SEND and get(row, STATE) < DONE:
            step = _receive(context, table, count, place)
            if step < 0:
                return step, 1
            moved += step
            unfinished += get(row, STATE) < DONE
    return moved, unfinished


@inline
def _has_started(table, count):
    """Return whether an operation is under way: then nothing but an abort may end it."""
    n_started = 0
    for place in range(count):
        n_started += get(_row(table, place), STATE) == UNDER_WAY
    return n_started > 0


@inline
def _closed_peer(context, table, count):
    """Return a rank that has closed while an operation still needs it, or -1."""
    world_size, me = get(context, WORLD_SIZE), get(context, RANK)
    for place in range(count):
        row = _row(table, place)
        if get(row, STATE) >= DONE:
            continue
        peer, n_open, closed = get(row, PEER), 0, -1
        for rank in range(world_size):
            if peer == ANY or peer == rank:
                line = get(context, STATUS_LINES) + rank * LINE
                if load64_acquire(line + _STATUS_CLOSED) == 0 and rank != me:
                    n_open += 1
                elif rank != me:
                    closed = rank
        if n_open == 0 and closed >= 0:
            return closed
    return -1


@inline
def _note(context, table, count):
    """Say in the segment what this rank waits for: read when it gives up."""
    doing = get(context, _BELLS) + get(context, RANK) * LINE + _DOING
    first = 0
    while first < count - 1 and get(_row(table, first), STATE) >= DONE:
        first += 1
    row = _row(table, first)
    put(doing, 0, get(row, KIND))
    put(doing, 1, get(row, PEER))
    put(doing, 2, get(row, TAG))
    put(doing, 3, get(row, SIZE_BYTES))
    put(doing, 4, get(row, DTYPE))


@inline
def _answer(context):
    """Answer a mismatch while operations are under way, so that no rank waits for this one.

    The other end of a message may have to recover before it can go on. The event stays pending:
    this rank raises it at its next call.
    """
    event = load64(get(context, _EVENT_LINE) + _EVENT_WORD)
    line = get(context, STATUS_LINES) + get(context, RANK) * LINE
    place = line + (_ANSWER_ODD if event & 1 else _ANSWER_EVEN)
    if load64(place) != event:
        put(place, 1, get(context, _SEQUENCE))
        put(place, 2, get(context, _CHUNK))
        exchange64(place, event)


@inline
def _wait_for_bell(context, table, count, takes_more):
    """Sleep until a mailbox changes or a slice of time is over.

    Return how many operations moved, or a negative status.
    """
    bell = get(context, _BELLS) + get(context, RANK) * LINE
    release_interpreter(context)
    start_clock(context)
    seen = begin_to_sleep(bell)
    moved, _ = _step(context, table, count)
    is_needed = _unwanted_sender(context, table, count) >= 0
    is_needed = is_needed or (takes_more and get(context, _MORE) != 0)
    if moved == 0 and not is_needed:
        sleep_until_rung(context, bell, seen)
    end_sleep(bell)
    if moved != 0 or is_needed:
        return moved
    if event_pending(context):
        if is_aborted(context) or not _has_started(table, count):
            return -_EVENT
        _answer(context)
    _note(context, table, count)
    status = look_around(context, _ABORT_DEADLINE)
    if status != OK:
        return -status
    closed = _closed_peer(context, table, count)
    if closed >= 0:
        moved, _ = _step(context, table, count)  # what it sent before it closed is still there
        if moved == 0 and _unwanted_sender(context, table, count) < 0:
            give_up(context, _ABORT_LOST, closed)
            return -_LOST
    return moved


@compiled(types.int64(types.int64, types.int64))
def message_loop(context, call):
    """Run the call's table of operations until all are done; return a status.

    The deadline counts from `Context.START_NS`, or from when it first sleeps if that is 0: a caller
    may go on with a table.
    """
    table, count = get(call, _TRANSFERS), get(call, _N_TRANSFERS)
    if event_pending(context) and (is_aborted(context) or not _has_started(table, count)):
        return _EVENT
    put(context, PATH, _MESSAGE)
    takes_more = get(call, _TAKES_MORE) != 0
    turns = 0
    while True:
        moved, unfinished = _step(context, table, count)
        if moved < 0:
            return -moved
        if unfinished == 0:
            return OK
        if takes_more and (unfinished < count or get(context, _MORE) != 0):
            return _STATUS_MORE  # Python reports what is done, and takes up what was added
        if moved > 0:
            turns = 0
            continue
        turns += 1
        if turns == 1:
            sender = _unwanted_sender(context, table, count)
            if sender >= 0:
                put(context, _UNMATCHED, sender)
                _note(context, table, count)
                status = look_around(context, _ABORT_DEADLINE)  # they may come without end
                return _ASIDE if status == OK else status
        if turns >= min(FIRST_SPINS, get(context, _SPINS)):
            release_interpreter(context)
        if turns <= get(context, _SPINS):
            pause()
        elif turns <= get(context, _SPINS) + _PATIENCE * get(context, _YIELDS):
            yield_once()
        else:
            moved = _wait_for_bell(context, table, count, takes_more)
            if moved < 0:
                return -moved
            turns = 0
