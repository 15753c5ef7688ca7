"""The connections that carry messages between hosts, attached to the table of messages.

The table belongs to one host (`gpucoll.backends.cpu.host.message_step`), and numbers the ranks of
other hosts after its own. Each rank of another host has mailboxes in this host's segment, too, and
the code here plays its part: it takes the records to that rank from one mailbox, and writes the
records from that rank into the other. Every step of the table does that. It never waits, and never
takes the interpreter.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.transfers import (
    ACKNOWLEDGEMENT,
    CONTEXT,
    FOUND_PEER,
    IS_DEAD,
    LEFT,
    MOVES,
    PENDING,
    WIRES,
    try_lock,
    unlock,
)
from gpucoll.backends.cpu.wires.receiving import receive_on
from gpucoll.backends.cpu.wires.sending import send_on
from gpucoll.backends.cpu.wires.state import (
    ASK_LAST,
    ASKS,
    CARRIER,
    END,
    FETCHES,
    HAS_BYE,
    own_rank,
    push,
    wake_thread,
    wire_to,
)
from gpucoll.backends.cpu.wires.words import Announced, Wires
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import (
    call_post,
    call_step,
    get,
    load32_ordered,
    load64_acquire,
    put,
)
from gpucoll.transport.shared.flags import is_aborted
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Context

_COUNT, _FIRST = int(Wires.COUNT), int(Wires.FIRST)
_HOST_STEP, _HOST_POST = int(Wires.HOST_STEP), int(Wires.HOST_POST)
_N_STEPS, _IS_LOOKING = int(Wires.N_STEPS), int(Wires.IS_LOOKING)
_POLL_FDS, _BELLS = int(Wires.POLL_FDS), int(Context.BELLS)
_SEALED_MESSAGE = int(Announced.SEALED)
_FEW = 2
_MOVED = 1
_QUIET_STEPS = 3
_NO_MOVES = -1

_i64, _i32 = types.int64, types.int32
_poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))


@inline
def _may_touch(table):
    """Return whether anything may still be touched."""
    return get(table, IS_DEAD) == 0 and not is_aborted(get(table, CONTEXT))


@inline
def _n_wires(wires):
    """Return the number of connections; later loads see everything that belongs to them."""
    return load64_acquire(wires + 8 * _COUNT)


@inline
def _receive(table, wires):
    """Receive over all connections; return over how many something came."""
    count, moved = _n_wires(wires), 0
    if count > _FEW:
        _poll(get(wires, _POLL_FDS), count, np.int32(0))
    for place in range(count):
        wire = get(wires, _FIRST + place)
        # pollfd is {int32 fd, int16 events, int16 revents}
        is_ready = count <= _FEW or get(get(wires, _POLL_FDS), place) >> 48 != 0
        if is_ready or get(wire, CARRIER) != 0:
            moved += receive_on(table, wire)
    return moved


@inline
def _send(table, wires):
    count, moved = _n_wires(wires), 0
    for place in range(count):
        moved += send_on(table, get(wires, _FIRST + place))
    return moved


@inline
def _note_left(table, wires):
    """Note which ranks send nothing more, in a step in which nothing moved.

    That is not done immediately: a rank's last messages must first have reached their receivers, in
    a step that another thread may have kept this one from making.
    """
    for place in range(_n_wires(wires)):
        wire = get(wires, _FIRST + place)
        n_quiet = get(wire, HAS_BYE)
        if 0 < n_quiet <= _QUIET_STEPS:
            put(wire, HAS_BYE, n_quiet + 1)
            if n_quiet == _QUIET_STEPS:
                put(get(table, LEFT), get(wire, END), 1)


@inline
def _send_locked(table, wires, moves):
    """Send what is ready, unless another thread is in the table: that thread sends it."""
    if not try_lock(table):
        return
    if _may_touch(table):
        if get(table, MOVES) == moves:
            _note_left(table, wires)
        moved = _send(table, wires)
        if moved:
            put(table, MOVES, get(table, MOVES) + moved)
    unlock(table)


@compiled_when_used()
def wires_step(table):
    """Advance messages and everything on connections by a step; return how many are pending."""
    wires = get(table, WIRES)
    if not try_lock(table):
        return load64_acquire(table + 8 * PENDING)
    put(wires, _N_STEPS, get(wires, _N_STEPS) + 1)
    moves = get(table, MOVES)
    if _may_touch(table):
        moved = _receive(table, wires)
        if moved:
            put(table, MOVES, get(table, MOVES) + moved)
    unlock(table)
    call_step(get(wires, _HOST_STEP), table)
    _send_locked(table, wires, moves)
    bell = get(get(table, CONTEXT), _BELLS) + own_rank(table) * LINE
    if load64_acquire(wires + 8 * _IS_LOOKING) == 0 and load32_ordered(bell + 4) > 0:
        wake_thread(wires)  # a sleeping rank does not see what arrives on a connection
    return load64_acquire(table + 8 * PENDING)


@compiled_when_used()
def wires_post(table, rows, count):
    """Start sends, receives and probes; send what is ready; return whether they were started."""
    wires = get(table, WIRES)
    is_begun = call_post(get(wires, _HOST_POST), table, rows, count)
    _send_locked(table, wires, _NO_MOVES)
    return is_begun


@compiled_when_used()
def wires_fetch(table, row):
    """Request the data of a message that a row gets; return that something moved.

    Called by a step of the table, which holds its lock.
    """
    wire = wire_to(table, get(row, FOUND_PEER))
    acknowledgement = get(row, ACKNOWLEDGEMENT)
    is_object = get(wire, FETCHES + acknowledgement) == _SEALED_MESSAGE
    put(wire, FETCHES + acknowledgement, row + (1 if is_object else 0))
    push(wire, ASKS, ASK_LAST, acknowledgement)
    return _MOVED
