"""The addresses at which a job's processes meet, and notices between them and their launcher."""

from __future__ import annotations

import contextlib
import json
import os
import socket

from gpucoll import config
from gpucoll.hashing import blake2b

__all__ = ["address", "joined_place", "notice", "notices_address", "tell_joined"]

_JOINED = b"joined "


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


def tell_joined() -> None:
    """Tell the launcher that started this process again that it has joined the job.

    Does nothing in other processes. A launcher that cannot be reached does not learn of it.
    """
    if config.JOIN not in os.environ:
        return
    token, place = os.environ.get(config.JOB, ""), os.environ.get(config.LOCAL_RANK, "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(notices_address(token))
        connection.sendall(_JOINED + place.encode())


def joined_place(told: bytes) -> int | None:
    """Return the local rank in what `tell_joined` sends; None if it is anything else."""
    place = told.removeprefix(_JOINED)
    return int(place) if place != told and place.isdigit() and len(place) < 10 else None
