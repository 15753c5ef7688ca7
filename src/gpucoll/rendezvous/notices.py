"""The addresses at which a job's processes meet, and a launcher's notices of ended ranks."""

from __future__ import annotations

import json

from gpucoll.hashing import blake2b

__all__ = ["address", "notice", "notices_address"]


def address(token: str) -> bytes:
    """Return the abstract address at which the ranks with this token meet."""
    # Hashed: a name has at most 107 bytes, and different tokens must give different names.
    return b"\0gpucoll-" + blake2b(token.encode(), digest_size=32).hexdigest().encode()


def notices_address(token: str) -> bytes:
    """Return the abstract address at which a job's launcher reports which ranks have ended."""
    return address(f"{token}/ended")


def notice(rank: int, manner: str) -> bytes:
    """Return the notice of a rank that has ended; `manner` is the rest of a sentence."""
    return json.dumps([rank, manner]).encode() + b"\n"
