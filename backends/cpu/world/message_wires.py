"""The memory of the connections that carry messages, and Python's part in them: sealing."""

from __future__ import annotations

import ctypes
import os
import select
import socket
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.wires.words import (
    ACKNOWLEDGED,
    BUFFER_BYTES,
    CARRIER_FAILED,
    HEADER_BYTES,
    SAID_BYE,
    SEAL_BYTES,
    SLACK_BYTES,
    Frame,
    Served,
    Wire,
    Wires,
    WireState,
)
from gpucoll.errors import AuthenticationError
from gpucoll.group.world.pairs import Pair
from gpucoll.transport.shared import ordering

_Words = npt.NDArray[np.int64]
_NO_FD = 0xFFFFFFFF
"""A ``struct pollfd`` that `poll` skips."""


def _memory(size_bytes: int) -> tuple[bytearray, int]:
    """Return new memory and its address. A forked child might share memory of NumPy."""
    memory = bytearray(size_bytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Carrier(Protocol):
    """Carries a connection's bytes in place of its socket, which then only opens and closes it."""

    address: int
    """The address by which the functions of `Carriers` know it."""

    @property
    def failure(self) -> str:
        """Why it can carry nothing any more."""


class Carriers(Protocol):
    """Makes carriers: either both ends of a connection have one, or neither."""

    @property
    def functions(self) -> tuple[int, int]:
        """Addresses of the functions that send and receive: see `words.Wires`."""

    def to(self, rank: int) -> Carrier:
        """Return a new carrier to a rank."""

    def close(self, limit_s: float) -> None:
        """End all carriers, which nothing uses any more, within `limit_s`."""


class MessageWire:
    """One connection.

    Parameters
    ----------
    pair : Pair
        The connection; this object owns it from here on.
    end : int
        The other end, by the table's number.
    granted_bytes : int
        How much may be sent before the other end reports that it has room for more.
    carrier : Carrier, optional
        Carries the bytes; default: the socket.
    """

    def __init__(
        self, pair: Pair, end: int, granted_bytes: int, carrier: Carrier | None = None
    ) -> None:
        self.rank = pair.rank
        self.end = pair.end
        self.carrier = carrier
        self._seal, self._opening = pair.seal, pair.opening
        self._words_memory, self.address = _memory(Wire.n_bytes)
        self.words: _Words = np.frombuffer(self._words_memory, np.int64)
        words = self.words
        words[Wire.fd], words[Wire.end] = pair.end.fileno(), end
        words[Wire.carrier] = 0 if carrier is None else carrier.address
        words[Wire.granted_bytes] = words[Wire.told_granted] = granted_bytes
        self._buffers = {}
        for field, size_bytes in (
            (Wire.in_buffer, BUFFER_BYTES),
            (Wire.out_buffer, BUFFER_BYTES),
            (Wire.open_buffer, 0),
            (Wire.opened_buffer, 0),
            (Wire.seal_buffer, 0),
            (Wire.sealed_buffer, 0),
        ):
            memory, words[field] = _memory(size_bytes or SEAL_BYTES)
            self._buffers[field] = memory
        if pair.has_connected:
            out = np.frombuffer(self._buffers[Wire.out_buffer], np.int64)
            out[0] = Frame.HELLO
            words[Wire.out_stop] = HEADER_BYTES
            words[Wire.may_send] = 1

    @property
    def state(self) -> WireState:
        """The state of the connection."""
        return WireState(int(self.words[Wire.state]))

    @property
    def has_said_bye(self) -> bool:
        """Whether everything that this rank sends has been handed over."""
        is_empty = self.words[Wire.out_start] == self.words[Wire.out_stop]
        return self.words[Wire.says_bye] == SAID_BYE and bool(is_empty)

    @property
    def brings_nothing(self) -> bool:
        """Whether the carrier has brought everything so far, without the final BYE."""
        return bool(self.words[Wire.carrier_is_empty]) and not self.words[Wire.has_bye]

    @property
    def is_blocked(self) -> bool:
        """Whether it accepts no more bytes for now."""
        return bool(self.words[Wire.is_blocked])

    @property
    def reason(self) -> str:
        """Why it has failed."""
        number = int(self.words[Wire.errno])
        if number == CARRIER_FAILED and self.carrier is not None:
            return self.carrier.failure
        if number < 0:
            return "received data that no rank sends"
        return os.strerror(number) if number else "the other end is gone"

    @property
    def needs_room(self) -> bool:
        """Whether received data waits for memory."""
        return bool(self.words[Wire.needs_room])

    def note_room(self) -> None:
        """Note that memory may be available now."""
        ordering.store(self.address + 8 * Wire.needs_room, 0)

    def seal_and_open(self) -> bool:
        """Seal what must be sealed, and open what arrived; return whether anything was done.

        Raises
        ------
        AuthenticationError
            What arrived is not what was sent.
        """
        is_sealed, is_opened = self._do_seal(), self._do_open()
        return is_sealed or is_opened

    def _do_seal(self) -> bool:
        # In this order: what was just sealed is not sealed again while it is sent.
        is_sealed = ordering.load(self.address + 8 * Wire.sealed)
        n_bytes = ordering.load(self.address + 8 * Wire.seal)
        if not n_bytes or is_sealed:
            return False
        with memoryview(self._buffers[Wire.seal_buffer]) as plain:
            frame = self._seal.seal(plain[:n_bytes])
        self._buffers[Wire.sealed_buffer][: len(frame)] = frame
        ordering.store(self.address + 8 * Wire.sealed, len(frame))
        return True

    def _do_open(self) -> bool:
        is_opened = ordering.load(self.address + 8 * Wire.opened)
        n_bytes = ordering.load(self.address + 8 * Wire.open)
        if not n_bytes or is_opened:
            return False
        with memoryview(self._buffers[Wire.open_buffer]) as sealed:
            frames = self._opening.take(sealed[:n_bytes])
        if len(frames) != 1 or self._opening.holds_part or not _is_whole(frames[0]):
            raise AuthenticationError("sent something else than one whole frame")
        self._buffers[Wire.opened_buffer][: len(frames[0])] = frames[0]
        ordering.store(self.address + 8 * Wire.opened, len(frames[0]))
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether compiled code has not yet taken something that was sealed or opened."""
        return bool(self.words[Wire.sealed] or self.words[Wire.opened])

    def close(self) -> None:
        """Close the socket."""
        self.end.close()


def _is_whole(frame: bytes) -> bool:
    """Return whether a frame is as long as its header states."""
    if len(frame) < HEADER_BYTES:
        return False
    length = int.from_bytes(frame[:8], "little") >> 8
    return len(frame) == HEADER_BYTES + length


class WireTable:
    """All connections of one table of messages.

    Parameters
    ----------
    n_ends : int
        The number of ranks.
    event_fd : int
        Wakes the thread of the connections; the caller owns it.
    """

    def __init__(self, n_ends: int, event_fd: int) -> None:
        self._memory, self.address = _memory(8 * (Wires.connections + n_ends))
        self.words: _Words = np.frombuffer(self._memory, np.int64)
        self._poll_memory, self.words[Wires.poll_fds] = _memory(8 * n_ends)
        self._served, self.words[Wires.served] = _memory(Served.n_bytes * ACKNOWLEDGED)
        self.words[Wires.event_fd] = event_fd
        self.words[Wires.one] = 1
        self.wires: list[MessageWire] = []

    def add(self, wire: MessageWire) -> None:
        """Add a connection; compiled code sees it from here on."""
        place = len(self.wires)
        self.wires.append(wire)
        fds = np.frombuffer(self._poll_memory, np.int64)
        fds[place] = _NO_FD if wire.carrier else wire.end.fileno() | (select.POLLIN << 32)
        self.words[Wires.connections + place] = wire.address
        ordering.store(self.address + 8 * Wires.count, place + 1)

    def forget(self, wire: MessageWire) -> None:
        """Make `poll` skip a connection that is not open: its descriptor may be reused."""
        fds = np.frombuffer(self._poll_memory, np.int64)
        fds[self.wires.index(wire)] = _NO_FD

    def take_need(self) -> bool:
        """Return whether Python has something to do, and reset that note."""
        place = self.address + 8 * Wires.needs_python
        if not ordering.load(place):  # else a note made just now would be lost
            return False
        ordering.store(place, 0)
        return True


def first_grant(large_ring_bytes: int) -> int:
    """Return how much may be sent over a new connection at first."""
    return large_ring_bytes - SLACK_BYTES


def wake(event_fd: int) -> None:
    """Wake the thread that waits for an eventfd."""
    if event_fd >= 0:
        try:
            os.eventfd_write(event_fd, 1)
        except OSError:  # awake already, or closed
            return


def shut(end: socket.socket) -> None:
    """Tell the other end that nothing more will be sent."""
    try:
        end.shutdown(socket.SHUT_WR)
    except OSError:
        return
