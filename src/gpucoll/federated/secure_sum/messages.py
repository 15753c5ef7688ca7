"""The messages of a secure sum: a header, sets of clients, and records of fixed size.

A message is bytes. The header names the kind, the client (sender or receiver; the other side is the
server), the settings' tag and the length of the body. `docs/federated.md` has the bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from gpucoll.errors import SecureSumError

if TYPE_CHECKING:
    from gpucoll.federated.secure_sum.protocol import SecureSum

Bytes: TypeAlias = "bytes | bytearray | memoryview"

_HEADER = struct.Struct("<4sBBH16sQ")  # magic, version, kind, client, tag, bytes of the body
_MAGIC, _VERSION = b"gcSS", 1


class Kind(IntEnum):
    """What a message is; odd numbers go to the server, even ones come from it."""

    ADVERTISED = 1
    KEYS = 2
    SHARES = 3
    RELAYED = 4
    MASKED = 5
    SURVIVORS = 6
    CONFIRMED = 7
    CONFIRMATIONS = 8
    UNMASKED = 9


def pack(settings: SecureSum, kind: Kind, client: int, *body: Bytes) -> bytes:
    """Return a message."""
    size = sum(memoryview(part).nbytes for part in body)
    header = _HEADER.pack(_MAGIC, _VERSION, kind, client, settings.tag, size)
    return b"".join([header, *body])


def unpack(settings: SecureSum, kind: Kind, message: Bytes) -> tuple[int, memoryview]:
    """Return a message's client and body; SecureSumError if it is anything but a whole message."""
    what = f"a message of kind {kind.name}"
    if not isinstance(message, bytes | bytearray | memoryview):
        raise SecureSumError(f"{what} must be bytes; got {type(message).__name__}")
    try:
        view = memoryview(message).cast("B")
    except (TypeError, ValueError) as error:  # of a view with gaps
        raise SecureSumError(f"{what} must be contiguous bytes: {error}") from None
    if len(view) < _HEADER.size:
        raise SecureSumError(f"{what} is cut off: {len(view)} of at least {_HEADER.size} bytes")
    magic, version, found, client, tag, size = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise SecureSumError(f"{what} is expected, and the bytes are no message of a secure sum")
    if version != _VERSION:
        raise SecureSumError(f"{what} has version {version}; this gpucoll knows {_VERSION}")
    if tag != settings.tag:
        raise SecureSumError(
            f"{what} belongs to a secure sum with other settings or another round_id than this one"
        )
    if found != kind:
        name = Kind(found).name if found in Kind.__members__.values() else str(found)
        raise SecureSumError(
            f"{what} is expected now, and this is one of kind {name}: it was repeated, comes too "
            "late, or was delivered to the wrong side"
        )
    if client >= settings.clients:
        raise SecureSumError(f"{what} names client {client} of {settings.clients}")
    if len(view) - _HEADER.size != size:
        raise SecureSumError(
            f"{what} of client {client} is cut off or too long: its header tells {size} bytes of "
            f"content, and there are {len(view) - _HEADER.size}"
        )
    return client, view[_HEADER.size :].toreadonly()


def pack_set(clients: Collection[int], n_clients: int) -> bytes:
    """Return a set of clients as a bit for each client."""
    bits = sum(1 << client for client in clients)
    return bits.to_bytes((n_clients + 7) // 8, "little")


def take_set(body: memoryview, n_clients: int) -> tuple[frozenset[int], memoryview]:
    """Return the set of clients at the begin of a body, and the rest of the body."""
    size = (n_clients + 7) // 8
    bits = int.from_bytes(body[:size], "little")
    if len(body) < size or bits >> n_clients:
        raise SecureSumError(
            f"a message has no set of at most {n_clients} clients where one must be"
        )
    return frozenset(client for client in range(n_clients) if bits >> client & 1), body[size:]


def pack_records(records: Mapping[int, bytes]) -> bytes:
    """Return records of clients, in the order of the clients."""
    return b"".join(records[client] for client in sorted(records))


def take_records(body: memoryview, clients: Collection[int], size: int) -> dict[int, bytes]:
    """Return each client's record of so many bytes, of a body that consists of them."""
    if len(body) != len(clients) * size:
        raise SecureSumError(
            f"a message has {len(body)} bytes of records; {len(clients)} clients with {size} bytes "
            "each were expected"
        )
    order: Sequence[int] = sorted(clients)
    return {c: bytes(body[n * size : (n + 1) * size]) for n, c in enumerate(order)}
