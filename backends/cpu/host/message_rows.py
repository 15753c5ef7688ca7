"""Rows of pending messages for Python: their memory, requests and results, and waits for them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.protocol import MessageRequest
from gpucoll.collectives import Collective
from gpucoll.entries import collectives
from gpucoll.group.host.members import Members
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Envelope, SentNumber, Way
from gpucoll.transport.shared.words import (
    Call,
    Context,
    Held,
    Kind,
    Mailbox,
    Mode,
    Progress,
    Transfer,
    TransferTable,
)
from gpucoll.types import DTYPES, dtype_code

if TYPE_CHECKING:
    from gpucoll.backends.cpu.host.message_table import MessageTable

# Plain ints: indexing with a block's fields takes twice as long.
_WORDS, _SHOWN = Transfer.n_words, layout.MESSAGE_DIMENSIONS
_KIND, _PEER, _TAG = int(Transfer.kind), int(Transfer.peer), int(Transfer.tag)
_ADDRESS, _SIZE_BYTES, _DTYPE = (
    int(Transfer.memory),
    int(Transfer.size_bytes),
    int(Transfer.dtype),
)
_STATE, _MODE, _NUMBER = int(Transfer.state), int(Transfer.mode), int(Transfer.number)
_HELD, _DIMENSIONS = int(Transfer.held), int(Transfer.n_dimensions)
_DESCRIPTION, _DESCRIPTION_BYTES = int(Transfer.description), int(Transfer.description_bytes)
_TIMEOUT_NS, _DEADLINE_NS = int(Transfer.timeout_ns), int(Transfer.deadline_ns)
_FOUND_PEER, _FOUND_TAG = int(Transfer.found_peer), int(Transfer.found_tag)
_FOUND_BYTES, _FOUND_DTYPE = int(Transfer.found_bytes), int(Transfer.found_dtype)
_FOUND_NUMBER = int(Transfer.found_number)
_FOUND = struct.Struct(
    f"={8 * int(Transfer.state)}xq"
    f"{8 * (int(Transfer.found_peer) - int(Transfer.state) - 1)}x{6 + layout.MESSAGE_DIMENSIONS}q"
)
"""A row's state, and the words from `found_peer` to `dimensions`: a third of a row."""
_LENGTHS, _N_DTYPES = 7, len(DTYPES)
_KINDS = {int(kind): kind for kind in Kind}
_SEND, _PROBE, _TAKE = int(Kind.SEND), int(Kind.PROBE), int(Kind.TAKE)
_DONE, _MISFIT = int(Progress.DONE), int(Progress.MISFIT)
_GONE, _DROPPED = int(Progress.GONE), int(Progress.DROPPED)
_EXPIRED, _WITHDRAWS = int(Progress.EXPIRED), int(Mode.WITHDRAWS)


def _native_dtypes() -> dict[int, np.dtype[Any]]:
    """Return NumPy's own dtypes, by the number that is sent with a message."""
    kinds = {name: getattr(np, name + "_" * (name == "bool"), None) for name in DTYPES}
    return {dtype_code(name): np.dtype(kind) for name, kind in kinds.items() if kind is not None}


_NATIVE = _native_dtypes()


class Rows:
    """The memory of some rows. It is not NumPy's, which a forked child may share."""

    __slots__ = ("_memory", "words")

    def __init__(self, count: int) -> None:
        self._memory = bytearray(8 * _WORDS * count)
        self.words = memoryview(self._memory).cast("q")

    @classmethod
    def of(cls, memory: bytearray) -> Rows:
        """Return the row that a compiled entry has made."""
        rows = cls.__new__(cls)
        rows._memory = memory
        rows.words = memoryview(memory)[: 8 * _WORDS].cast("q")
        return rows

    @property
    def address(self) -> int:
        """The address of the rows."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def request(self) -> MessageRequest:
        """Return what the first row asked for, as a request without its buffer."""
        words = self.words
        request = MessageRequest(_KINDS[words[_KIND]], words[_PEER], words[_TAG])
        if request.kind == _PROBE:
            request.description = self._memory[8 * _WORDS :]
        return request

    def origin(self) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of the message that the first row found."""
        words = self.words
        return words[_FOUND_PEER], words[_FOUND_TAG], words[_FOUND_BYTES]

    def new_bytes(self, code: int) -> npt.NDArray[Any] | None:
        """Return memory for the reserved message as bytes; None: its dtype's number differs."""
        words = self.words
        if words[_STATE] != _DONE or words[_FOUND_DTYPE] != code:
            return None
        return np.empty(words[_FOUND_BYTES], np.uint8)

    def state(self, place: int = 0) -> int:
        """Return how far a row is. Its other words may be read only after locking the table."""
        return self.words[place * _WORDS + _STATE]

    def are_over(self, count: int) -> bool:
        """Return whether the first `count` rows are over."""
        words = self.words
        if count == 1:
            return words[_STATE] >= _DONE
        return all(words[place * _WORDS + _STATE] >= _DONE for place in range(count))

    def fill(
        self,
        requests: Sequence[MessageRequest],
        timeout_ns: int,
        deadline_ns: int,
        withdraws: bool = False,
    ) -> list[Any]:
        """Describe requests; return objects that must be kept alive until the requests are over.

        With `withdraws` the deadline is the call's own: it ends only requests that no message
        matched.
        """
        kept: list[Any] = []
        for place, request in enumerate(requests):
            start = place * _WORDS
            words = self.words[start : start + _WORDS] if place else self.words
            words[_KIND], words[_PEER], words[_TAG] = request.kind, request.peer, request.tag
            words[_STATE] = words[_DESCRIPTION_BYTES] = 0
            words[_MODE], words[_NUMBER] = request.mode, request.place
            words[_HELD] = request.held
            if withdraws and not (request.kind == _SEND or request.place or request.held):
                words[_MODE] = _WITHDRAWS
            words[_TIMEOUT_NS], words[_DEADLINE_NS] = timeout_ns, deadline_ns
            if request.buffer is not None:
                _fill_buffer(words, request)
            if request.kind == _PROBE:
                room = bytearray(layout.MOST_DESCRIPTION_BYTES)
                words[_DESCRIPTION] = ctypes.addressof(ctypes.c_char.from_buffer(room))
                request.description = room
            elif request.description is not None:
                padded = bytes(
                    request.description.ljust(-(-len(request.description) // 8) * 8, b"\0")
                )
                words[_DESCRIPTION] = address_of(padded)
                words[_DESCRIPTION_BYTES] = len(request.description)
                kept.append(padded)
        return kept

    def settle(self, place: int, request: MessageRequest, error: Exception | None) -> None:
        """Write the outcome of a row that is over into its request."""
        start = place * _WORDS
        words = self.words[start : start + _WORDS] if place else self.words
        state = words[_STATE]
        request.is_misfit, request.is_gone = state == _MISFIT, state == _GONE
        request.expired_ns = words[_TIMEOUT_NS] if state == _EXPIRED else 0
        if state == _DROPPED:
            request.error = error
        if request.kind == _SEND or state not in (_DONE, _MISFIT):
            return
        request.found_peer, request.found_tag = words[_FOUND_PEER], words[_FOUND_TAG]
        request.found_bytes, request.found_dtype = words[_FOUND_BYTES], words[_FOUND_DTYPE]
        request.found_place = words[_FOUND_NUMBER]
        n_dimensions = words[_DIMENSIONS]
        request.found_number, request.found_shape = None, None
        if n_dimensions < 0:
            request.found_shape, request.found_number = (), SentNumber(n_dimensions)
        elif n_dimensions <= _SHOWN:
            first = _DIMENSIONS + 1
            request.found_shape = tuple(words[first : first + n_dimensions])
        if request.kind == _PROBE and request.description is not None:
            request.found_description = bytes(request.description[: words[_DESCRIPTION_BYTES]])
        if request.kind == _TAKE:
            request.held = words[_HELD]
            request.found_description = held_description(request.held)


def plain_array(memory: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
    """Return the message that a row has found: see `MessageTable.plain_array`."""
    words = _FOUND.unpack_from(memory)
    state, peer, tag, size_bytes, code, place, n_dimensions = words[:_LENGTHS]
    if state != _DONE or code >= _N_DTYPES or not 0 <= n_dimensions <= _SHOWN:
        return None
    return peer, tag, code, words[_LENGTHS : _LENGTHS + n_dimensions], size_bytes, place


def new_array(memory: bytearray) -> npt.NDArray[Any] | None:
    """Return an array for the message that a row has reserved; None: it needs more."""
    words = _FOUND.unpack_from(memory)
    state, _, _, _, code, _, n_dimensions = words[:_LENGTHS]
    dtype = _NATIVE.get(code)
    if state != _DONE or dtype is None or not 0 <= n_dimensions <= _SHOWN:
        return None
    return np.empty(words[_LENGTHS : _LENGTHS + n_dimensions], dtype)


def _fill_buffer(words: memoryview, request: MessageRequest) -> None:
    buffer = request.buffer
    assert buffer is not None
    shape = buffer.shape
    words[_ADDRESS], words[_SIZE_BYTES] = buffer.address, buffer.size_bytes
    words[_DTYPE] = dtype_code(buffer.dtype)
    words[_DIMENSIONS] = len(shape)
    for place, length in enumerate(shape[:_SHOWN]):
        words[_DIMENSIONS + 1 + place] = length
    if request.number is not None:
        is_numpy = not issubclass(request.number, bool | int | float | complex) or (
            request.number.__module__ == "numpy"
        )
        words[_DIMENSIONS] = SentNumber.NUMPY if is_numpy else SentNumber.PYTHON


def address_of(data: bytes) -> int:
    """Return the address of bytes, which must be kept alive."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return address


def held_words(held: int) -> Any:
    """Return the fields of a held message."""
    return (ctypes.c_int64 * Held.n_words).from_address(held)


def held_description(held: int) -> bytes:
    """Return a held message's description of its dtype; empty for most messages."""
    size_bytes = held_words(held)[Held.description_bytes]
    return ctypes.string_at(held + Held.n_bytes, size_bytes) if size_bytes else b""


# --- rows that were started -----------------------------------------------------------------------


class PendingTransfers:
    """Requests that were started together: `gpucoll.backends.protocol.Transfers`."""

    __slots__ = ("_kept", "_rows", "_table", "requests")

    def __init__(
        self, table: MessageTable, rows: Rows, requests: list[MessageRequest], kept: Any
    ) -> None:
        self._table = table
        self._rows = rows
        self._kept = kept
        self.requests = requests

    def is_over(self) -> bool:
        """Return whether all of them are over, without trying to make progress."""
        return self._rows.are_over(len(self.requests))

    def look(self) -> bool:
        """Take all pending messages a step further; return whether these requests are over."""
        return self.is_over() or self._table.wait(self._rows, len(self.requests), 0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all of them are over, or `timeout_s` has passed; return whether they are."""
        return self.is_over() or self._table.wait(self._rows, len(self.requests), timeout_s)

    def settle(self) -> None:
        """Write the outcome into the requests; they must be over."""
        error = self._table.room_error
        for place, request in enumerate(self.requests):
            self._rows.settle(place, request, error)
        self._kept = None
        self._table.under_way.discard(self)

    def withdraw(self) -> bool:
        """Withdraw the only request; return False if it is over or another rank may see it."""
        if len(self.requests) != 1 or not self._table.withdraw(self._rows):
            return False
        self._kept = None
        self._table.under_way.discard(self)
        return True


_ROWS, _N_ROWS = int(Call.transfers), int(Call.n_transfers)
_IS_STARTED, _LEAVES = int(Call.is_started), int(Call.leaves)
_UNTIL_NS = int(Call.until_ns)
_Words = npt.NDArray[np.int64]


class Waiter:
    """A private context and call block for one thread that waits for messages."""

    def __init__(self, table: _Words, context: _Words) -> None:
        context[Context.transfers] = table.ctypes.data
        context[Context.slice_ns] = 0
        self.context = context
        self.block = CallBlock(Collective.SEND, message_loop.address)
        self.words = self.block.words
        self.shown = memoryview(self.words.data)
        """The same words; reading one of them takes a tenth of the time."""
        self.states = memoryview(context.data)
        self.words[Call.context] = context.ctypes.data
        self.words[Call.largest_bytes] = layout.NEVER  # other threads run meanwhile
        code = collectives.prepared_call.address
        self.run: Callable[[], int] = builtin(code, METH_NOARGS, capsule(self.words.ctypes.data))

    def set_rows(
        self, rows: Rows, count: int, *, is_started: bool, leaves: bool, until_ns: int = 0
    ) -> None:
        """Set what to wait for, whether it was started, and whether a signal ends only the wait."""
        words = self.shown
        words[_ROWS], words[_N_ROWS] = rows.address, count
        words[_IS_STARTED], words[_LEAVES] = is_started, leaves
        words[_UNTIL_NS] = until_ns


# --- messages left in mailboxes at the end, for the report of a rank that closes ------------------


def unreceived(members: Members, table: _Words, peers: _Words) -> list[tuple[int, int]]:
    """Return sender and tag of the messages that arrived and were not received."""
    found, held = [], int(table[TransferTable.held])
    while held:
        words = held_words(held)
        if not words[Held.mode] & Mode.FOLLOWS:
            found.append((words[Held.sender], words[Held.tag]))
        held = words[Held.next]
    for sender in range(members.layout.ends):
        found += [(sender, tag) for tag in _lying(members, sender, peers[sender])]
    return found


def undelivered(
    members: Members, peers: _Words, has_closed: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """Return receiver and number of the messages that wait at ranks which have closed."""
    found = []
    for peer in range(members.layout.ends):
        area = int(peers[peer, Mailbox.out_area])
        if not area or peer == members.rank or not has_closed(peer):
            continue
        matched = members.load(area - members.at(0) + layout.MAILBOX_MATCHED_COUNT)
        if left := int(peers[peer, Mailbox.out_number]) - matched:
            found.append((peer, left))
    return found


def _lying(members: Members, sender: int, words: _Words) -> Iterator[int]:
    """Return the tags of a rank's messages that are still in the mailbox."""
    place = members.layout
    pair = members.rank * members.layout.ends + sender
    if not members.load(place.opened + 8 * pair):
        return
    mailbox = place.mailboxes + pair * place.mailbox_stride
    starts = (mailbox + layout.MAILBOX_SMALL, mailbox + layout.MAILBOX_LARGE)
    sizes = (layout.MAILBOX_LARGE - layout.MAILBOX_SMALL, place.large_ring_bytes)
    which, offset, other = (
        int(words[field]) for field in (Mailbox.in_ring, Mailbox.in_offset, Mailbox.in_other)
    )
    while members.load(starts[which] + offset):
        record = starts[which] + offset
        packed = members.load(record + 8 * Envelope.packed)
        way = packed & 0xFF
        if way == Way.TO_START:
            offset = 0
            continue
        if way == Way.TO_OTHER:
            after = (offset + layout.ENVELOPE_BYTES) % sizes[which]
            which, offset, other = 1 - which, other, after
            continue
        if way != Way.PART and not (packed >> 8) & Mode.FOLLOWS:
            yield members.load(record + 8 * Envelope.tag)
        size_bytes = members.load(record + 8 * Envelope.size_bytes)
        offset = (offset + _record_bytes(packed, size_bytes)) % sizes[which]


def _record_bytes(packed: int, size_bytes: int) -> int:
    """Return the size of a record."""
    way, dimensions = packed & 0xFF, ((packed >> 16) & 0xFF) - 16
    description_bytes = packed >> 40
    extra = 0
    if way != Way.PART and (dimensions > 1 or description_bytes):
        extra = layout.SHAPE_BYTES + layout.round_up(description_bytes, 64)
    data = 0
    if way in (Way.POSTED, Way.PART):
        data = min(size_bytes, layout.POST_BYTES)
    if not extra and data <= layout.SMALLEST_BYTES:
        return layout.ENVELOPE_BYTES
    return layout.ENVELOPE_BYTES + extra + layout.round_up(data, 64)
