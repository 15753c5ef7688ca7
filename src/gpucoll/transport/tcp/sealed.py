"""Frames that come as they were sent, each once and in order, or not at all: a MAC and a counter.

A frame is its length (4 bytes, big-endian), the payload, and HMAC-SHA256 over the frame's number
(8 bytes), the length and the payload. Both ends count, so the number is not sent; a frame that was
altered, left out, repeated, put elsewhere or taken from another connection or direction (another
key) has a wrong MAC. The payload is not encrypted.

What no frame can show is that nothing follows the last one. So who ends a conversation says so in a
frame: a connection that closes without was cut off.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from gpucoll.errors import ArgumentError, AuthenticationError

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">QI")  # number and length, as the MAC covers them
TAG_BYTES: Final = hashlib.sha256().digest_size
LARGEST_PAYLOAD_BYTES: Final = (1 << 32) - 1
FRAME_BYTES: Final = _LENGTH.size + TAG_BYTES
"""What a frame has beside its payload."""


class _Tags:
    """The tags of the frames of one direction, one after the other."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def next(self, payload: bytes | bytearray | memoryview) -> bytes:
        tag = self._keyed.copy()
        tag.update(_HEAD.pack(self._number, len(payload)))
        tag.update(payload)
        self._number += 1
        return tag.digest()


class Seal:
    """Makes the frames of what this end sends.

    Parameters
    ----------
    key : bytes
        `Handshake.send_key`, for this direction of this connection alone.
    most_bytes : int
        The largest payload that the other end's `Opening` allows.
    """

    def __init__(self, key: bytes, most_bytes: int = LARGEST_PAYLOAD_BYTES) -> None:
        self._tags = _Tags(key)
        self._most_bytes = min(most_bytes, LARGEST_PAYLOAD_BYTES)

    def seal(self, payload: bytes | bytearray | memoryview) -> bytes:
        """Return the next frame: all frames are to be sent, in the order they were made.

        Raises
        ------
        ArgumentError
            The payload is larger than the other end takes; nothing was counted.
        """
        data = memoryview(payload).cast("B")
        if len(data) > self._most_bytes:
            raise ArgumentError(
                f"a message of {len(data)} bytes, where the connection takes {self._most_bytes}"
            )
        return b"".join((_LENGTH.pack(len(data)), data, self._tags.next(data)))


class Opening:
    """Opens the frames of what the other end sends.

    It keeps no more than the part of one frame that has come, of `most_bytes` and `FRAME_BYTES`.

    Parameters
    ----------
    key : bytes
        `Handshake.receive_key`.
    most_bytes : int
        The largest payload that is taken.
    """

    def __init__(self, key: bytes, most_bytes: int) -> None:
        self._tags = _Tags(key)
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._failure = ""

    @property
    def holds_part(self) -> bool:
        """Whether the beginning of a frame has come without its end."""
        return bool(self._held)

    def take(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take what has come, in pieces of any size; return the payloads that are complete.

        Raises
        ------
        AuthenticationError
            A frame is not as it was sent: close the connection. The text goes on after who sent it:
            "10.0.0.7:41234 sent ...". Every later call raises the same.
        """
        if self._failure:
            raise AuthenticationError(self._failure)
        self._held += data
        opened, at = [], 0
        with memoryview(self._held) as held:
            while (end := self._end_of_frame(held, at)) <= len(held):
                opened.append(self._open(held, at, end))
                at = end
        del self._held[:at]
        return opened

    def _end_of_frame(self, held: memoryview, at: int) -> int:
        """Return where the frame ends that begins at `at`; beyond all that is held if unknown."""
        if len(held) - at < _LENGTH.size:
            return len(held) + 1
        (n_bytes,) = _LENGTH.unpack_from(held, at)
        if n_bytes > self._most_bytes:
            raise self._fail(
                f"announced a frame of {n_bytes} bytes where {self._most_bytes} are the most"
            )
        return int(at + FRAME_BYTES + n_bytes)

    def _open(self, held: memoryview, at: int, end: int) -> bytes:
        payload = bytes(held[at + _LENGTH.size : end - TAG_BYTES])
        if not hmac.compare_digest(self._tags.next(payload), held[end - TAG_BYTES : end]):
            raise self._fail(
                "sent a frame that is not as a rank of the job has made it: altered, repeated or "
                "left out on the way, or not a rank's at all"
            )
        return payload

    def _fail(self, text: str) -> AuthenticationError:
        self._failure = text
        self._held = bytearray()
        return AuthenticationError(text)
