"""Messages with file descriptors over a Unix socket: lengths, JSON, then the descriptors."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from gpucoll.errors import AuthenticationError

_LENGTH = struct.Struct("<II")  # bytes of JSON, count of descriptors
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
DESCRIPTORS_AT_ONCE = 200  # the kernel takes 253 (SCM_MAX_FD)
MAX_MESSAGE_BYTES = 1 << 20


def check_peer(connection: socket.socket) -> None:
    """Raise `AuthenticationError` unless the other end is a process of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise AuthenticationError(
            f"process {process} of user {user} is at the job's socket, but this rank runs as user "
            f"{os.geteuid()}: all ranks of a host must belong to one user"
        )


def send(connection: socket.socket, content: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send a message with descriptors."""
    fds = fds or []
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data), len(fds)) + data)
    for start in range(0, len(fds), DESCRIPTORS_AT_ONCE):
        part = fds[start : start + DESCRIPTORS_AT_ONCE]
        socket.send_fds(connection, [b"f"], part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message with its descriptors, which then belong to the caller.

    Raises
    ------
    ConnectionError
        The other end is gone, or did not keep to the protocol.
    """
    length, n_fds = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes is too long to be one of gpucoll's")
    content = json.loads(_exactly(connection, length))
    fds: list[int] = []
    try:
        while len(fds) < n_fds:
            data, got, flags, _ = socket.recv_fds(connection, 1, DESCRIPTORS_AT_ONCE)
            fds.extend(got)
            if not data or flags & socket.MSG_CTRUNC:
                raise ConnectionError(
                    "file descriptors were lost on the way: is the limit of open files "
                    "(ulimit -n) too low?"
                )
    except BaseException:
        close_all(fds)
        raise
    return content, fds


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end is gone")
        data += part
    return data


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
