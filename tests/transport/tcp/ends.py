"""Both ends of a connection without one: who says what to whom is the test's."""

from __future__ import annotations

from typing import Any

from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.handshake import Handshake, Role, encode_purpose
from gpucoll.transport.tcp.sealed import Opening, Seal

SECRET = b"0123456789abcdef"
PURPOSE = encode_purpose("a job", 0, "meeting")


def connecting(secret: bytes = SECRET, purpose: bytes = PURPOSE) -> Handshake:
    return Handshake(secret, Role.CONNECTS, purpose)


def accepting(secret: bytes = SECRET, purpose: bytes = PURPOSE) -> Handshake:
    return Handshake(secret, Role.ACCEPTS, purpose)


def ends() -> tuple[Handshake, Handshake]:
    return connecting(), accepting()


def exchange(one: Any, other: Any, n_bytes: int = 1 << 20) -> list[bytes]:
    """Let two ends talk, `n_bytes` at a time, until both are silent; return what each has sent."""
    sent = {one: bytearray(one.start()), other: bytearray(other.start())}
    said = {end: bytes(data) for end, data in sent.items()}
    while any(sent.values()):
        for giver, taker in ((one, other), (other, one)):
            piece = bytes(sent[giver][:n_bytes])
            del sent[giver][:n_bytes]
            if piece:
                answer = taker.take(piece)
                sent[taker] += answer
                said[taker] += answer
    return [said[one], said[other]]


def refusal(end: Any, data: bytes) -> str:
    """Return why an end refuses some bytes; it refuses all others afterwards."""
    for given in (data, b"", b"more"):
        try:
            end.take(given)
        except AuthenticationError as error:
            text = str(error)
        else:
            raise AssertionError("not refused")
    return text


def sealed_pair(most_bytes: int = 1 << 20) -> tuple[Seal, Opening]:
    one, other = ends()
    exchange(one, other)
    return Seal(one.send_key), Opening(other.receive_key, most_bytes)
