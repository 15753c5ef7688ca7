"""The connections that carry messages between hosts, attached to the table of messages.

The table belongs to one host (`gpucoll.backends.cpu.host.message_step`), and numbers the ranks of
other hosts after its own. Each rank of another host has mailboxes in this host's segment, too, and
the code here plays its part: it takes the records to that rank from one mailbox, and writes the
records from that rank into the other. Every step of the table does that. It never waits, and never
takes the interpreter.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.mailboxes import try_lock, unlock
from gpucoll.backends.cpu.wires.receiving import receive_on
from gpucoll.backends.cpu.wires.sending import send_on
from gpucoll.backends.cpu.wires.words import (
    Announced,
    Wire,
    Wires,
    own_rank,
    put_at,
    wake_thread,
    wire_to,
)
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_post, call_step, load32_ordered, load64_acquire
from gpucoll.transport.shared.flags import is_aborted
from gpucoll.transport.shared.libc import poll
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Transfer, TransferTable

_FEW = 2
_MOVED = 1
_QUIET_STEPS = 3
_NO_MOVES = -1


@inline
def _may_touch(table: TransferTable) -> bool:
    """Return whether anything may still be touched."""
    return table.is_dead == 0 and not is_aborted(table.context)


@inline
def _n_wires(wires: Wires) -> int:
    """Return the number of connections; later loads see everything that belongs to them."""
    return load64_acquire(wires.at.count)


@inline
def _has_come(wire: Wire) -> bool:
    """Return whether something is here already: its socket does not tell of it again."""
    return wire.in_stop > wire.in_start or load64_acquire(wire.at.opened) != 0


@inline
def _receive(table: TransferTable, wires: Wires) -> int:
    """Receive over all connections; return over how many something came."""
    count, moved = _n_wires(wires), 0
    if count > _FEW:
        poll(wires.poll_fds, count, np.int32(0))
    for place in range(count):
        wire = Wire(wires.connections[place])
        # pollfd is {int32 fd, int16 events, int16 revents}
        is_ready = count <= _FEW or Words(wires.poll_fds)[place] >> 48 != 0
        if is_ready or _has_come(wire) or wire.carrier != 0:
            moved += receive_on(table, wire)
    return moved


@inline
def _send(table: TransferTable, wires: Wires) -> int:
    count, moved = _n_wires(wires), 0
    for place in range(count):
        moved += send_on(table, Wire(wires.connections[place]))
    return moved


@inline
def _note_left(table: TransferTable, wires: Wires) -> None:
    """Note which ranks send nothing more, in a step in which nothing moved.

    That is not done immediately: a rank's last messages must first have reached their receivers, in
    a step that another thread may have kept this one from making.
    """
    for place in range(_n_wires(wires)):
        wire = Wire(wires.connections[place])
        n_quiet = wire.has_bye
        if 0 < n_quiet <= _QUIET_STEPS:
            wire.has_bye = n_quiet + 1
            if n_quiet == _QUIET_STEPS:
                table.left[wire.end] = 1


@inline
def _send_locked(table: TransferTable, wires: Wires, moves: int) -> None:
    """Send what is ready, unless another thread is in the table: that thread sends it."""
    if not try_lock(table):
        return
    if _may_touch(table):
        if table.moves == moves:
            _note_left(table, wires)
        moved = _send(table, wires)
        if moved:
            table.moves += moved
    unlock(table)


@compiled_when_used()
def wires_step(table: TransferTable) -> int:
    """Advance messages and everything on connections by a step; return how many are pending."""
    wires = Wires(table.wires)
    if not try_lock(table):
        return load64_acquire(table.at.pending)
    wires.n_steps += 1
    moves = table.moves
    if _may_touch(table):
        moved = _receive(table, wires)
        if moved:
            table.moves += moved
    unlock(table)
    call_step(wires.host_step, table)
    _send_locked(table, wires, moves)
    bell = table.context.bells + own_rank(table) * LINE
    if load64_acquire(wires.at.is_looking) == 0 and load32_ordered(bell + 4) > 0:
        wake_thread(wires)  # a sleeping rank does not see what arrives on a connection
    return load64_acquire(table.at.pending)


@compiled_when_used()
def wires_post(table: TransferTable, rows: int, count: int) -> int:
    """Start sends, receives and probes; send what is ready; return whether they were started."""
    wires = Wires(table.wires)
    is_begun = call_post(wires.host_post, table, rows, count)
    _send_locked(table, wires, _NO_MOVES)
    return is_begun


@compiled_when_used()
def wires_fetch(table: TransferTable, row: Transfer) -> int:
    """Request the data of a message that a row gets; return that something moved.

    Called by a step of the table, which holds its lock.
    """
    wire = wire_to(table, row.found_peer)
    acknowledgement = row.acknowledgement
    is_object = wire.fetches[acknowledgement] == Announced.SEALED
    wire.fetches[acknowledgement] = row.address + (1 if is_object else 0)
    put_at(wire.asks, wire.ask_last, acknowledgement)
    wire.ask_last += 1
    return _MOVED
