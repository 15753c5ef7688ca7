"""Frames that arrive as they were sent, once and in order, or not at all: a MAC and a counter.

A frame is its length (4 bytes, big-endian), the payload, and HMAC-SHA256 over the frame's number (8
bytes), the length and the payload. Both ends count, so the number is not sent. A frame that was
altered, left out, repeated, moved, or taken from another connection or direction (which has another
key) has a wrong MAC. The payload is not encrypted.

No frame can show that it is the last one. So an end that finishes announces that in a frame: a
connection that closes without such a frame was cut off.
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
"""Size of a frame without its payload."""


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
    """Makes the frames that this end sends.

    Parameters
    ----------
    key : bytes
        `Handshake.send_key`, for this direction of this connection only.
    most_bytes : int
        The largest payload that the other end's `Opening` allows.
    """

    def __init__(self, key: bytes, most_bytes: int = LARGEST_PAYLOAD_BYTES) -> None:
        self._tags = _Tags(key)
        self._most_bytes = min(most_bytes, LARGEST_PAYLOAD_BYTES)

    def seal(self, payload: bytes | bytearray | memoryview) -> bytes:
        """Return the next frame. All frames must be sent, in the order in which they were made.

        Raises
        ------
        ArgumentError
            The payload is larger than the other end allows; the frame was not counted.
        """
        data = memoryview(payload).cast("B")
        if len(data) > self._most_bytes:
            raise ArgumentError(
                f"a message of {len(data)} bytes, but the connection's limit is {self._most_bytes}"
            )
        return b"".join((_LENGTH.pack(len(data)), data, self._tags.next(data)))


class Opening:
    """Opens the frames that the other end sends.

    It stores at most the received part of one frame: up to `most_bytes` and `FRAME_BYTES`.

    Parameters
    ----------
    key : bytes
        `Handshake.receive_key`.
    most_bytes : int
        The largest payload that is accepted.
    """

    def __init__(self, key: bytes, most_bytes: int) -> None:
        self._tags = _Tags(key)
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._failure = ""

    @property
    def holds_part(self) -> bool:
        """Whether a frame has come in part."""
        return bool(self._held)

    def take(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take received bytes, in pieces of any size; return the payloads that are complete.

        Raises
        ------
        AuthenticationError
            A frame is not as it was sent: close the connection. The text follows the other end's
            name: "10.0.0.7:41234 sent ...". Every later call raises the same error.
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
        """Return the end of the frame that begins at `at`; if unknown, beyond all held bytes."""
        if len(held) - at < _LENGTH.size:
            return len(held) + 1
        (n_bytes,) = _LENGTH.unpack_from(held, at)
        if n_bytes > self._most_bytes:
            raise self._fail(
                f"announced a frame of {n_bytes} bytes, but the limit is {self._most_bytes}"
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
