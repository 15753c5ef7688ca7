"""Addresses at which the processes of a job meet, and how a launcher says that a rank has ended."""

from __future__ import annotations

import json

from gpucoll.hashing import blake2b

__all__ = ["address", "notice", "notices_address"]


def address(token: str) -> bytes:
    """Return the abstract address at which the ranks meet that have this token."""
    # Hashed, because a name has at most 107 bytes and tokens that differ must not meet.
    return b"\0gpucoll-" + blake2b(token.encode(), digest_size=32).hexdigest().encode()


def notices_address(token: str) -> bytes:
    """Return the abstract address at which the launcher of a job tells which ranks have ended."""
    return address(f"{token}/ended")


def notice(rank: int, manner: str) -> bytes:
    """Return what is sent of a rank that has ended; `manner` is the rest of a sentence."""
    return json.dumps([rank, manner]).encode() + b"\n"
