"""Rows of pending messages for Python: their memory, the requests in them, and the results."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.backends.protocol import MessageRequest
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import SentNumber
from gpucoll.transport.shared.words import Held, Kind, Mode, Progress, Transfer
from gpucoll.types import DTYPES, dtype_code

# Plain ints: indexing with a block's fields takes twice as long.
_WORDS, _SHOWN = Transfer.n_words, layout.MESSAGE_DIMENSIONS
_ROW = struct.Struct(f"={_WORDS}q")
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

    def new_array(self) -> npt.NDArray[Any] | None:
        """Return an array for the message that the first row reserved; None: it needs more."""
        words = self.words
        n_dimensions, dtype = words[_DIMENSIONS], _NATIVE.get(words[_FOUND_DTYPE])
        if words[_STATE] != _DONE or dtype is None or not 0 <= n_dimensions <= _SHOWN:
            return None
        return np.empty(words[_DIMENSIONS + 1 : _DIMENSIONS + 1 + n_dimensions].tolist(), dtype)

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
    words = _ROW.unpack_from(memory)
    code, n_dimensions = words[_FOUND_DTYPE], words[_DIMENSIONS]
    if words[_STATE] != _DONE or code >= len(DTYPES) or not 0 <= n_dimensions <= _SHOWN:
        return None
    shape = words[_DIMENSIONS + 1 : _DIMENSIONS + 1 + n_dimensions]
    place, size_bytes = words[_FOUND_NUMBER], words[_FOUND_BYTES]
    return words[_FOUND_PEER], words[_FOUND_TAG], code, shape, size_bytes, place


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
