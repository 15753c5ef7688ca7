"""How two ranks find out that only one of them has certificates."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from gpucoll import config

EVERYWHERE: Final = (
    f"set {config.TLS_CERT}, {config.TLS_KEY} and {config.TLS_CA} on every rank of the job, or on "
    "none"
)
SPOKE_PLAINLY: Final = (
    f"speaks without TLS, but this rank has certificates: {EVERYWHERE}. Here they are set"
)
_NONE_HERE: Final = f"but this rank has no certificates: {EVERYWHERE}. Here none of them is set"
_GREETING: Final = b"\x16"
"""First byte of a record that begins TLS. A peer may send it alone, and it is conclusive."""
_ALERT: Final = bytes.fromhex("15 03 03 00 02 02 46")
"""A TLS record with the alert "protocol version"."""
_MOST_BYTES: Final = 1 << 14


def is_tls_greeting(data: bytes) -> bool:
    """Return whether these bytes are how a connecting end begins TLS."""
    return data[: len(_GREETING)] == _GREETING


def spoke_tls(data: bytes) -> str:
    """Return why an end without TLS refuses these first bytes; empty: they are not TLS."""
    if is_tls_greeting(data):
        return f"speaks TLS, {_NONE_HERE}"
    if data[:1] == _ALERT[:1]:
        return f"answers in TLS, {_NONE_HERE}"
    return ""


def send_alert(end: socket.socket) -> None:
    """Send a TLS alert that the two ends do not match; ends with and without TLS understand it."""
    with contextlib.suppress(OSError):
        end.send(_ALERT, socket.MSG_NOSIGNAL)
        end.recv(_MOST_BYTES)  # unread data would make close send a reset, which may overtake it
