"""One call over encrypting connections, as `SecureStreams` runs it.

The rules are those of the compiled loop (`gpucoll.transport.tcp.stream_loop`), with larger pieces.
Data that TLS has begun to encrypt must be offered again unchanged, so a piece counts as sent only
when all of it is sent. Received data whose place must not be overwritten before then waits in
scratch memory, which takes more than one piece.
"""

from __future__ import annotations

import ctypes
import errno
import select
import ssl
from collections.abc import Callable
from typing import Any

from gpucoll.kernels.cpu.addresses import REDUCE_ARGUMENTS
from gpucoll.transport.tcp.stream_loop import LEAST_PASSED_ON
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    SCRATCH_BYTES,
    Plan,
    Row,
    State,
    StreamStatus,
)

__all__ = ["CallEndedError", "SecureCall", "SecureLink"]

PIECE_BYTES = 128 << 10
"""How much is sent at once; less than scratch memory takes (see above)."""
_KERNEL_TYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * REDUCE_ARGUMENTS)


class CallEndedError(Exception):
    """The call has ended, but not successfully."""

    def __init__(self, status: StreamStatus, number: int = 0) -> None:
        super().__init__(status)
        self.status = status
        self.errno = number


class SecureLink:
    """One link in a call.

    Attributes
    ----------
    memory : memoryview
        The received header, followed by the scratch memory; `begin` and `end` are positions in it.
    offered : memoryview
        The data being sent, as it was first offered; `offered_bytes` of it belong to the row.
    wants : int
        The events to poll for.
    """

    def __init__(self, connection: Any, memory: memoryview) -> None:
        self.connection = connection
        self.memory = memory
        self.begin_call(-1, -1)

    def begin_call(self, send_row: int, receive_row: int) -> None:
        """Prepare for the first rows of a call."""
        self.send_row, self.receive_row = send_row, receive_row
        self.has_sent_header = False
        self.header_came, self.begin, self.end = 0, HEADER_BYTES, HEADER_BYTES
        self.offered, self.offered_bytes = memoryview(b""), 0
        self.wants = 0

    def attempt(self, function: Callable[[Any], int], data: memoryview, wanted: int) -> int:
        """Send or receive; return the number of bytes, or 0 if it would have to wait."""
        try:
            return function(data)
        except ssl.SSLWantReadError:
            self.wants |= select.POLLIN
        except ssl.SSLWantWriteError:
            self.wants |= select.POLLOUT
        except BlockingIOError:
            self.wants |= wanted
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise CallEndedError(StreamStatus.GONE) from None
        except ssl.SSLError:  # its errno is OpenSSL's
            raise CallEndedError(StreamStatus.GONE, errno.EPROTO) from None
        except OSError as error:
            raise CallEndedError(StreamStatus.GONE, error.errno or 0) from None
        return 0

    def send(self) -> int:
        """Send some of the offered data."""
        return self.attempt(self.connection.send, self.offered, select.POLLOUT)

    def receive(self, place: memoryview) -> int:
        """Receive into memory as much as has come; raise if the other end has closed."""
        came = 0
        while came < len(place):
            wants, self.wants = self.wants, 0
            got = self.attempt(self.connection.recv_into, place[came:], select.POLLIN)
            has_closed, self.wants = got == 0 and self.wants == 0, self.wants | wants
            if has_closed and came == 0:
                raise CallEndedError(StreamStatus.GONE)
            if got == 0:
                break
            came += got
        return came

    @property
    def address(self) -> int:
        """Address of the data that waits in scratch memory."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + self.begin


class SecureCall:
    """A running schedule, by the same rules as in `gpucoll.transport.tcp.stream_loop`."""

    def __init__(
        self, rows: list[list[int]], plan: list[list[int]], state: list[int], header: bytes
    ) -> None:
        self.rows, self.plan, self.state, self.header = rows, plan, state, header
        self.n_open = state[State.open]
        self.idle = 0
        size_bytes, self.work_address = state[State.work_bytes], state[State.work]
        # An empty buffer may have no address.
        memory = (ctypes.c_char * size_bytes).from_address(self.work_address) if size_bytes else b""
        self.work = memoryview(memory).cast("B")
        self.kernel = _KERNEL_TYPE(state[State.kernel]) if state[State.kernel] else None

    def _sendable(self, number: int) -> int:
        """Return up to which byte a row may be sent now; -1: it may not begin yet."""
        row, plan = self.rows[number], self.plan[number]
        if row[Row.gate] > self.state[State.ready]:
            return -1
        if (source := plan[Plan.source]) < 0:
            before = slice(row[Row.first], number)
            waits = any(
                not progress[Plan.receive_done] and other[Row.step] < row[Row.step]
                for other, progress in zip(self.rows[before], self.plan[before], strict=True)
            )
            return -1 if waits else row[Row.send_bytes]
        if self.plan[source][Plan.receive_done]:
            return row[Row.send_bytes]
        came = self.plan[source][Plan.received]
        return -1 if came - plan[Plan.sent] < LEAST_PASSED_ON else came

    def _writable(self, number: int) -> int:
        """Return how many more bytes a row may write."""
        row, plan = self.rows[number], self.plan[number]
        start = row[Row.receive_offset] + plan[Plan.received]
        end = row[Row.receive_offset] + row[Row.receive_bytes]
        if row[Row.gate] > self.state[State.ready]:
            return 0
        if not plan[Plan.may_wait]:
            return end - start
        for place in range(row[Row.first], row[Row.end]):
            other, progress = self.rows[place], self.plan[place]
            if other[Row.step] > row[Row.step]:
                break
            if not progress[Plan.send_done] and progress[Plan.source] < number:
                begin, size_bytes = other[Row.send_offset], other[Row.send_bytes]
                end = _before(start, end, begin + progress[Plan.sent], begin + size_bytes)
            if place < number and not progress[Plan.receive_done]:
                begin, size_bytes = other[Row.receive_offset], other[Row.receive_bytes]
                end = _before(start, end, begin + progress[Plan.received], begin + size_bytes)
        return end - start

    def first_open(self, done: int) -> int:
        """Return the first row whose send, or receive, is not complete."""
        numbers = range(len(self.rows))
        return next((number for number in numbers if not self.plan[number][done]), len(self.rows))

    def has_done(self, until: int) -> bool:
        """Return whether all rows below `until` have sent and received."""
        return min(self.first_open(Plan.send_done), self.first_open(Plan.receive_done)) >= until

    def send_some(self, link: SecureLink) -> bool:
        """Send what may be sent; return whether anything was sent."""
        number = link.send_row
        if number < 0 or (not link.offered and (ready := self._sendable(number)) < 0):
            return False
        row, plan = self.rows[number], self.plan[number]
        if not link.offered:
            start = row[Row.send_offset] + plan[Plan.sent]
            link.offered_bytes = min(ready - plan[Plan.sent], PIECE_BYTES)
            link.offered = self.work[start : start + link.offered_bytes]
            if not link.has_sent_header:
                link.offered = memoryview(self.header + bytes(link.offered))
                link.has_sent_header = True
        if link.offered:
            sent = link.send()
            link.offered = link.offered[sent:]
            if link.offered:
                return sent > 0
        plan[Plan.sent] += link.offered_bytes
        if plan[Plan.sent] == row[Row.send_bytes]:
            plan[Plan.send_done] = 1
            link.send_row = plan[Plan.next_send]
            self.n_open -= 1
        return True

    def receive_some(self, link: SecureLink) -> bool:
        """Receive, and put received data in its place; return whether anything was done."""
        number = link.receive_row
        if number < 0:
            return False
        moved = self._receive_header(link)
        if link.header_came < HEADER_BYTES:
            return moved
        moved = self._receive_bytes(link, number) or moved
        moved = self._place(link, number) or moved
        while moved and number >= 0:
            plan = self.plan[number]
            if plan[Plan.received] != self.rows[number][Row.receive_bytes]:
                break
            plan[Plan.receive_done] = 1
            number = link.receive_row = plan[Plan.next_receive]
            self.n_open -= 1
        return moved

    def _receive_header(self, link: SecureLink) -> bool:
        if link.header_came == HEADER_BYTES:
            return False
        came = link.receive(link.memory[link.header_came : HEADER_BYTES])
        link.header_came += came
        if link.header_came == HEADER_BYTES and link.memory[:HEADER_BYTES] != self.header:
            raise CallEndedError(StreamStatus.MISMATCH)
        return came > 0

    def _receive_bytes(self, link: SecureLink, number: int) -> bool:
        row, plan = self.rows[number], self.plan[number]
        waiting = link.end - link.begin
        rest = row[Row.receive_bytes] - plan[Plan.received] - waiting
        writable = self._writable(number)
        if rest <= 0:
            return False
        if not row[Row.reduces] and waiting == 0 and writable > 0:
            start = row[Row.receive_offset] + plan[Plan.received]
            came = link.receive(self.work[start : start + min(rest, writable, SCRATCH_BYTES)])
            plan[Plan.received] += came
            return came > 0
        if link.begin > HEADER_BYTES:
            link.memory[HEADER_BYTES : HEADER_BYTES + waiting] = link.memory[link.begin : link.end]
            link.begin, link.end = HEADER_BYTES, HEADER_BYTES + waiting
        room = min(rest, SCRATCH_BYTES - waiting)
        came = link.receive(link.memory[link.end : link.end + room])
        link.end += came
        return came > 0

    def _place(self, link: SecureLink, number: int) -> bool:
        """Reduce or copy data that waits in scratch memory, as far as allowed."""
        row, plan = self.rows[number], self.plan[number]
        size_bytes = min(link.end - link.begin, self._writable(number))
        item_bytes = self.state[State.item_bytes] if row[Row.reduces] else 1
        size_bytes -= size_bytes % item_bytes
        if size_bytes <= 0:
            return False
        start = row[Row.receive_offset] + plan[Plan.received]
        if row[Row.reduces]:
            self._reduce(row, self.work_address + start, link.address, size_bytes // item_bytes)
        else:
            theirs = link.memory[link.begin : link.begin + size_bytes]
            self.work[start : start + size_bytes] = theirs
        plan[Plan.received] += size_bytes
        link.begin += size_bytes
        return True

    def _reduce(self, row: list[int], place: int, theirs: int, n_items: int) -> None:
        assert self.kernel is not None
        operands = (theirs, place) if row[Row.theirs_first] else (place, theirs)
        table = (ctypes.c_int64 * 3)(place, *operands)
        address, count = ctypes.addressof(table), n_items * self.state[State.parts]
        self.kernel(address, 1, address + 8, 2, count, self.state[State.parameter], 0)


def _before(start: int, end: int, begin: int, stop: int) -> int:
    """Return up to where bytes from `start` to `end` may be written if begin..stop may not."""
    return end if start >= stop or end <= begin else max(start, begin)
