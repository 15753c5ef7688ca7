"""The exception that took a rank out of a communicator, stored where the others can read it."""

from __future__ import annotations

import ctypes

from gpucoll.group.host.members import Members
from gpucoll.transport.shared.layout import REASON_BYTES

__all__ = ["read", "shown", "write"]

_CUT = "..."


def shown(error: BaseException) -> str:
    """Return an exception's class and the first line of its text, as a traceback ends."""
    try:
        lines = str(error).splitlines()
    except Exception:  # its __str__ fails
        lines = []
    name = type(error).__qualname__
    return f"{name}: {lines[0].strip()}" if lines and lines[0].strip() else name


def write(members: Members, error: BaseException) -> None:
    """Store why this rank leaves; the word that announces that it has left is stored later."""
    text = shown(error).replace("\0", " ").encode(errors="backslashreplace")
    if len(text) >= REASON_BYTES:
        room = REASON_BYTES - 1 - len(_CUT)
        text = text[:room].decode(errors="ignore").encode() + _CUT.encode()
    with members.held():
        ctypes.memmove(_address(members, members.rank), text + b"\0", len(text) + 1)


def read(members: Members, rank: int) -> str:
    """Return the exception that another rank has stored; empty: no exception made it leave."""
    with members.held():
        text = ctypes.string_at(_address(members, rank), REASON_BYTES)
    return text.partition(b"\0")[0].decode(errors="replace")


def _address(members: Members, rank: int) -> int:
    return members.at(members.layout.reasons + rank * REASON_BYTES)
