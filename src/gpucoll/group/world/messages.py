"""The messages between leaders over their links, as bytes.

A message consists of its kind, the length of its facts, the facts as JSON, and further plain bytes.
Each message arrives whole and unchanged (`gpucoll.transport.tcp.sealed`); nothing is unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

_HEAD: Final = struct.Struct("<BI")
_LENGTH: Final = struct.Struct("<Q")


class Kind(enum.IntEnum):
    """The kinds of messages."""

    PART = 1  # part of an exchange: for its receiver alone
    FAILED = 2  # the communicator is broken
    CLOSED = 3  # a rank has closed it
    WHERE = 4  # a question: where are your ranks?
    HERE = 5  # the answer
    LEAVING = 6  # the link ends here, as it should
    # Of observers (`gpucoll.group.world.observers`).
    LOOK = 7  # a question: what does `gpucoll why` print on your host?
    SEEN = 8  # the answer
    # Of calls on GPU arrays (`gpucoll.group.world.enqueued`).
    CALLS = 20  # what a host's ranks have called: each host receives it once
    ASK_CALL = 21  # a question: what have your ranks called, and where are they?
    TELL_CALL = 22  # the answer
    # All kinds but PART, LEAVING and CALLS are forwarded to hosts that have not received them.


class Message(NamedTuple):
    """One message."""

    kind: Kind
    facts: dict[str, Any]
    data: bytes = b""

    def encode(self) -> bytes:
        """Return the message as bytes to send."""
        facts = json.dumps(self.facts).encode()
        return b"".join((_HEAD.pack(self.kind, len(facts)), facts, self.data))

    @staticmethod
    def decode(encoded: bytes) -> Message:
        """Return the message in these bytes; ValueError: they are not one of this version."""
        try:
            kind, length = _HEAD.unpack_from(encoded)
            end = _HEAD.size + length
            facts = json.loads(encoded[_HEAD.size : end])
            if not isinstance(facts, dict):
                raise ValueError("facts that are none")
            return Message(Kind(kind), facts, encoded[end:])
        except (struct.error, RecursionError) as error:
            raise ValueError(str(error)) from None


def pack(parts: Sequence[bytes]) -> bytes:
    """Join several pieces of bytes into one."""
    lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
    return b"".join((_LENGTH.pack(len(parts)), lengths, *parts))


def unpack(data: bytes) -> list[bytes]:
    """Return the pieces that `pack` has joined."""
    (count,) = _LENGTH.unpack_from(data)
    lengths = [_LENGTH.unpack_from(data, 8 + 8 * place)[0] for place in range(count)]
    parts, at = [], 8 + 8 * count
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    return parts
