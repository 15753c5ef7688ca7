"""The memory of the connections that carry messages, and what Python does for them: sealing."""

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
    SERVED_WORDS,
    SLACK_BYTES,
    WIRE_WORDS,
    Frame,
    Wire,
    Wires,
    WireState,
)
from gpucoll.errors import AuthenticationError
from gpucoll.group.world.pairs import Pair
from gpucoll.transport.shared import ordering

_Words = npt.NDArray[np.int64]
_NO_FD = 0xFFFFFFFF
"""A ``struct pollfd`` that is skipped."""


def _memory(size_bytes: int) -> tuple[bytearray, int]:
    """Return new memory and its address: not NumPy's, which a forked child may share."""
    memory = bytearray(size_bytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Carrier(Protocol):
    """Carries a connection's bytes in place of its socket, which then only opens and closes it."""

    address: int
    """Of what the functions below know it by."""

    @property
    def failure(self) -> str:
        """Why nothing goes any more."""


class Carriers(Protocol):
    """Makes carriers: both ends of a connection have one, or none does."""

    @property
    def functions(self) -> tuple[int, int]:
        """Addresses of what carries away, and here: see `words.Wires`."""

    def to(self, rank: int) -> Carrier:
        """Return a new one, to a rank."""

    def close(self, limit_s: float) -> None:
        """End all, once nobody carries anything any more; in so many seconds."""


class MessageWire:
    """One connection.

    Parameters
    ----------
    pair : Pair
        The connection; belongs to this from here on.
    end : int
        Who is at the other end, as the table of messages counts.
    granted_bytes : int
        How much may be sent before the other end says that there is room for more.
    carrier : Carrier, optional
        What carries its bytes; default: the socket.
    """

    def __init__(
        self, pair: Pair, end: int, granted_bytes: int, carrier: Carrier | None = None
    ) -> None:
        self.rank = pair.rank
        self.end = pair.end
        self.carrier = carrier
        self._seal, self._opening = pair.seal, pair.opening
        self._words_memory, self.address = _memory(8 * WIRE_WORDS)
        self.words: _Words = np.frombuffer(self._words_memory, np.int64)
        words = self.words
        words[Wire.FD], words[Wire.END] = pair.end.fileno(), end
        words[Wire.CARRIER] = 0 if carrier is None else carrier.address
        words[Wire.GRANTED_BYTES] = words[Wire.TOLD_GRANTED] = granted_bytes
        self._buffers = {}
        for field, size_bytes in (
            (Wire.IN_BUFFER, BUFFER_BYTES),
            (Wire.OUT_BUFFER, BUFFER_BYTES),
            (Wire.OPEN_BUFFER, 0),
            (Wire.OPENED_BUFFER, 0),
            (Wire.SEAL_BUFFER, 0),
            (Wire.SEALED_BUFFER, 0),
        ):
            memory, words[field] = _memory(size_bytes or SEAL_BYTES)
            self._buffers[field] = memory
        if pair.has_connected:
            out = np.frombuffer(self._buffers[Wire.OUT_BUFFER], np.int64)
            out[0] = Frame.HELLO
            words[Wire.OUT_STOP] = HEADER_BYTES
            words[Wire.MAY_SEND] = 1

    @property
    def state(self) -> WireState:
        """How it is."""
        return WireState(int(self.words[Wire.STATE]))

    @property
    def has_said_bye(self) -> bool:
        """Whether all that this rank sends has gone."""
        is_empty = self.words[Wire.OUT_START] == self.words[Wire.OUT_STOP]
        return self.words[Wire.SAYS_BYE] == SAID_BYE and bool(is_empty)

    @property
    def brings_nothing(self) -> bool:
        """Whether its carrier has brought all, as far as is known, and not that it was all."""
        return bool(self.words[Wire.CARRIER_IS_EMPTY]) and not self.words[Wire.HAS_BYE]

    @property
    def is_blocked(self) -> bool:
        """Whether it takes no more for now."""
        return bool(self.words[Wire.IS_BLOCKED])

    @property
    def reason(self) -> str:
        """Why it has failed."""
        number = int(self.words[Wire.ERRNO])
        if number == CARRIER_FAILED and self.carrier is not None:
            return self.carrier.failure
        if number < 0:
            return "what came is nothing that a rank sends"
        return os.strerror(number) if number else "the other end is gone"

    @property
    def needs_room(self) -> bool:
        """Whether what came waits for memory."""
        return bool(self.words[Wire.NEEDS_ROOM])

    def note_room(self) -> None:
        """Say that there may be memory now."""
        ordering.store(self.address + 8 * Wire.NEEDS_ROOM, 0)

    def seal_and_open(self) -> bool:
        """Seal what is to be sealed, open what has come; return whether anything was done.

        Raises
        ------
        AuthenticationError
            What has come is not as it was sent.
        """
        is_sealed, is_opened = self._do_seal(), self._do_open()
        return is_sealed or is_opened

    def _do_seal(self) -> bool:
        # In this order: what was sealed is not seen once more while it goes.
        is_sealed = ordering.load(self.address + 8 * Wire.SEALED)
        n_bytes = ordering.load(self.address + 8 * Wire.SEAL)
        if not n_bytes or is_sealed:
            return False
        with memoryview(self._buffers[Wire.SEAL_BUFFER]) as plain:
            frame = self._seal.seal(plain[:n_bytes])
        self._buffers[Wire.SEALED_BUFFER][: len(frame)] = frame
        ordering.store(self.address + 8 * Wire.SEALED, len(frame))
        return True

    def _do_open(self) -> bool:
        is_opened = ordering.load(self.address + 8 * Wire.OPENED)
        n_bytes = ordering.load(self.address + 8 * Wire.OPEN)
        if not n_bytes or is_opened:
            return False
        with memoryview(self._buffers[Wire.OPEN_BUFFER]) as sealed:
            frames = self._opening.take(sealed[:n_bytes])
        if len(frames) != 1 or self._opening.holds_part or not _is_whole(frames[0]):
            raise AuthenticationError("sent something else than one whole frame")
        self._buffers[Wire.OPENED_BUFFER][: len(frames[0])] = frames[0]
        ordering.store(self.address + 8 * Wire.OPENED, len(frames[0]))
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether something is sealed or opened that compiled code has not taken yet."""
        return bool(self.words[Wire.SEALED] or self.words[Wire.OPENED])

    def close(self) -> None:
        """Close the socket."""
        self.end.close()


def _is_whole(frame: bytes) -> bool:
    """Return whether a frame is as long as it says."""
    if len(frame) < HEADER_BYTES:
        return False
    length = int.from_bytes(frame[:8], "little") >> 8
    return len(frame) == HEADER_BYTES + length


class WireTable:
    """All connections of one table of messages.

    Parameters
    ----------
    n_ends : int
        How many ranks there are.
    event_fd : int
        Wakes the thread of the connections; stays the caller's.
    """

    def __init__(self, n_ends: int, event_fd: int) -> None:
        self._memory, self.address = _memory(8 * (Wires.FIRST + n_ends))
        self.words: _Words = np.frombuffer(self._memory, np.int64)
        self._poll_memory, self.words[Wires.POLL_FDS] = _memory(8 * n_ends)
        self._served, self.words[Wires.SERVED] = _memory(8 * SERVED_WORDS * ACKNOWLEDGED)
        self.words[Wires.EVENT_FD] = event_fd
        self.words[Wires.ONE] = 1
        self.wires: list[MessageWire] = []

    def add(self, wire: MessageWire) -> None:
        """Add a connection: compiled code sees it from here on."""
        place = len(self.wires)
        self.wires.append(wire)
        fds = np.frombuffer(self._poll_memory, np.int64)
        fds[place] = _NO_FD if wire.carrier else wire.end.fileno() | (select.POLLIN << 32)
        self.words[Wires.FIRST + place] = wire.address
        ordering.store(self.address + 8 * Wires.COUNT, place + 1)

    def forget(self, wire: MessageWire) -> None:
        """Have `poll` skip a connection that is open no more: its descriptor will be another's."""
        fds = np.frombuffer(self._poll_memory, np.int64)
        fds[self.wires.index(wire)] = _NO_FD

    def take_need(self) -> bool:
        """Return whether there is something to do for Python, and note that it is done."""
        place = self.address + 8 * Wires.NEEDS_PYTHON
        if not ordering.load(place):  # or what is noted just now would be forgotten
            return False
        ordering.store(place, 0)
        return True


def first_grant(large_ring_bytes: int) -> int:
    """Return how much may be sent over a new connection."""
    return large_ring_bytes - SLACK_BYTES


def wake(event_fd: int) -> None:
    """Wake who waits for an eventfd."""
    if event_fd >= 0:
        try:
            os.eventfd_write(event_fd, 1)
        except OSError:  # awake already, or closed
            return


def shut(end: socket.socket) -> None:
    """Say that nothing more will be sent."""
    try:
        end.shutdown(socket.SHUT_WR)
    except OSError:
        return
