"""Options of the sockets between hosts."""

from __future__ import annotations

import contextlib
import socket

from gpucoll import config

__all__ = ["tune_socket"]

_CONGESTION_CONTROL = b"cubic"
_PROBES = 4
_LONGEST_INTERVAL_S = 32767
"""What the kernel takes between two probes (MAX_TCP_KEEPIDLE and MAX_TCP_KEEPINTVL)."""


def tune_socket(connection: socket.socket, user_timeout_s: float | None = None) -> None:
    """Set what bulk connections need. Before ``connect``, or ``listen``: accepted ones inherit it.

    Small messages go at once. The congestion control is cubic where that can be had: where bbr is
    the default, fast links take 1.6 times as long (four hosts without a limit, 64 MiB: 145 ms
    for 91, 2026-11-22). A link that is cut ends the connection after `user_timeout_s`, whether
    something was to be sent or not. Buffers are left to the kernel, which sizes them as needed.

    Parameters
    ----------
    connection : socket
        A TCP socket, over IPv4 or IPv6.
    user_timeout_s : float, optional
        How long the other host may be silent. Default: ``GPUCOLL_LINK_TIMEOUT_S``, or 5.
    """
    user_timeout_s = config.link_timeout_s() if user_timeout_s is None else user_timeout_s
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # the kernel does not have it, or this user may not
        connection.setsockopt(tcp, socket.TCP_CONGESTION, _CONGESTION_CONTROL)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, max(1, round(user_timeout_s * 1000)))
    interval_s = min(max(1, int(user_timeout_s / (_PROBES + 1))), _LONGEST_INTERVAL_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, _PROBES)
