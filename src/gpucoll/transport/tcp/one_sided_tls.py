"""Two ranks of which one has certificates and the other none: how each of them finds out."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from gpucoll import config

__all__ = ["EVERYWHERE", "SPOKE_PLAINLY", "is_tls_greeting", "send_alert", "spoke_tls"]

EVERYWHERE: Final = (
    f"set {config.TLS_CERT}, {config.TLS_KEY} and {config.TLS_CA} on every rank of the job, or on "
    "none"
)
SPOKE_PLAINLY: Final = (
    f"speaks without TLS, but this rank has certificates: {EVERYWHERE}. Here they are set"
)
_NONE_HERE: Final = f"but this rank has no certificates: {EVERYWHERE}. Here none of them is set"
_GREETING: Final = b"\x16"
"""First byte of a record that begins TLS; one that somebody sends alone decides it, too."""
_ALERT: Final = bytes.fromhex("15 03 03 00 02 02 46")
"""A record of TLS that says: not in this version of the protocol."""
_MOST_BYTES: Final = 1 << 14


def is_tls_greeting(data: bytes) -> bool:
    """Return whether this is how a connecting end begins with TLS."""
    return data[: len(_GREETING)] == _GREETING


def spoke_tls(data: bytes) -> str:
    """Return why an end without TLS refuses these first bytes; empty: they are no TLS."""
    if is_tls_greeting(data):
        return f"speaks TLS, {_NONE_HERE}"
    if data[:1] == _ALERT[:1]:
        return f"answers in TLS, {_NONE_HERE}"
    return ""


def send_alert(end: socket.socket) -> None:
    """Tell the other end that this one does not speak as it does; either kind understands that."""
    with contextlib.suppress(OSError):
        end.send(_ALERT, socket.MSG_NOSIGNAL)
        end.recv(_MOST_BYTES)  # what is left would make closing a reset, which may overtake it
