"""Messages with file descriptors over a Unix socket: lengths, JSON, then the descriptors.

Nothing here waits, so a rank can serve several connections, and no other end can hold it up.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections import deque
from typing import Any, TypeAlias

from gpucoll.errors import AuthenticationError

Message: TypeAlias = dict[str, Any]
"""A JSON object: the rank that reads a value checks it."""
_LENGTH = struct.Struct("<II")  # bytes of JSON, count of descriptors
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_UNKNOWN = 65534
"""The kernel's number for users that are unknown in this user namespace (overflowuid)."""
_KNOWS_ALL = ["0", "0", "4294967295"]
"""The user map of a namespace that has a number for every user."""
DESCRIPTORS_AT_ONCE = 200  # the kernel takes 253 (SCM_MAX_FD)
INTRODUCTION_BYTES = 64 << 10
"""Limit of an introduction: it has room for the CPUs of the largest machines."""


class BadMessageError(ValueError):
    """The other end violates the protocol; the text completes "process 123 ..."."""


class LostDescriptorsError(BadMessageError):
    """Descriptors came for which this process has no room."""


def peer_process(connection: socket.socket) -> int:
    """Return the process at the other end; 0: this PID namespace does not show it.

    Raises
    ------
    AuthenticationError
        The process belongs, or may belong, to another user.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise AuthenticationError(
            f"process {process} of user {user} is at the job's socket, but this rank runs as user "
            f"{os.geteuid()}: all ranks of a host must belong to one user"
        )
    if not is_known(process, user):
        raise AuthenticationError(
            f"process {process} is at the job's socket, and its user is unknown: this rank runs as "
            f"user {user}, the number that its user namespace gives to all users that it does not "
            "know. Run the ranks as another user"
        )
    return int(process)


def is_known(process: int, user: int) -> bool:
    """Return whether a number of the kernel's stands for one user, and not for all unknown ones."""
    return user != _UNKNOWN or _is_of_this_namespace(process)


def _is_of_this_namespace(process: int) -> bool:
    """Return whether a process is of this user namespace, or this namespace knows all users."""
    here = _user_namespace("self")
    return here.split() == _KNOWS_ALL or _user_namespace(process) == here


def _user_namespace(process: int | str) -> str:
    """Return what identifies a process's user namespace: the map of the users that it knows."""
    try:
        with open(f"/proc/{process}/uid_map") as file:
            return file.read()
    except OSError:
        return f"that of process {process}"


def encode(content: Message, n_fds: int = 0) -> bytes:
    """Return a message as it is sent, without its descriptors."""
    data = json.dumps(content).encode()
    return _LENGTH.pack(len(data), n_fds) + data


def decode(data: bytes) -> Message:
    """Return the content of a message's JSON."""

    def refuse(text: str) -> None:
        raise BadMessageError(f"sent {text} as a number")

    try:
        content = json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise BadMessageError("sent JSON that is nested too deeply") from None
    except BadMessageError:
        raise
    except ValueError:
        raise BadMessageError("sent something that is no JSON") from None
    if not isinstance(content, dict):
        raise BadMessageError("sent JSON that is no message")
    return content


def decode_whole(message: bytes) -> Message:
    """Return the content of a whole encoded message, which has no descriptors."""
    if len(message) < _LENGTH.size or _LENGTH.unpack_from(message) != (
        len(message) - _LENGTH.size,
        0,
    ):
        raise BadMessageError("sent lengths that are not those of its message")
    return decode(message[_LENGTH.size :])


class Connection:
    """One end of a connection, with its unsent data and the received part of the next message.

    Parameters
    ----------
    end : socket
        The socket; belongs to the connection from here on.
    most_bytes, most_fds : int
        How much JSON, and how many descriptors, a message from the other end may have.
    peer : str
        The other end, for messages.
    """

    def __init__(self, end: socket.socket, most_bytes: int, most_fds: int, peer: str = "") -> None:
        end.setblocking(False)
        self.peer = peer
        self._end = end
        self._most = most_bytes, most_fds
        self._sending: deque[tuple[memoryview, list[int]]] = deque()
        self._lengths: tuple[int, int] | None = None
        self._data = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._end.fileno()

    is_known = True
    """Whether the other end has been authenticated: always, by the kernel."""

    @property
    def is_sending(self) -> bool:
        """Whether there is unsent data."""
        return bool(self._sending)

    @property
    def events(self) -> int:
        """The events to poll for while it `is_sending`."""
        return select.POLLOUT

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send an encoded message, or as much of it as the other end takes now.

        The caller keeps the descriptors, and leaves them open while the connection `is_sending`.
        """
        fds = fds or []
        self._sending.append((memoryview(message), []))
        for start in range(0, len(fds), DESCRIPTORS_AT_ONCE):
            self._sending.append((memoryview(b"f"), fds[start : start + DESCRIPTORS_AT_ONCE]))
        self.flush()

    def flush(self) -> None:
        """Send the unsent data that the other end takes now; OSError: the other end is gone."""
        while self._sending:
            data, fds = self._sending[0]
            try:
                if fds:
                    sent = socket.send_fds(self._end, [data], fds, socket.MSG_NOSIGNAL)
                else:
                    sent = self._end.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # too many are in flight to other ranks
                    return
                raise
            if sent < len(data):
                self._sending[0] = data[sent:], fds
            else:
                self._sending.popleft()

    def receive(self) -> tuple[Message, list[int]] | None:
        """Read what has come; return the next message and its descriptors once it is complete.

        The descriptors then belong to the caller.

        Raises
        ------
        OSError
            The other end is gone.
        BadMessageError
            The other end violated the protocol.
        """
        while not self._is_complete():
            if not self._take():
                return None
        content, fds = decode(bytes(self._data)), self._fds
        self._lengths, self._fds = None, []
        self._data.clear()
        return content, fds

    def _is_complete(self) -> bool:
        return self._lengths == (len(self._data), len(self._fds))

    def _take(self) -> bool:
        """Read some of the next message; return whether anything had come."""
        try:
            if self._lengths is None:
                self._add(self._end.recv(_LENGTH.size - len(self._data)))
                if len(self._data) == _LENGTH.size:
                    self._begin(*_LENGTH.unpack(self._data))
            elif len(self._data) < self._lengths[0]:
                self._add(self._end.recv(self._lengths[0] - len(self._data)))
            else:
                self._take_fds(self._lengths[1] - len(self._fds))
        except BlockingIOError:
            return False
        return True

    def _add(self, part: bytes) -> None:
        if not part:
            raise ConnectionError("the other end is gone")
        self._data += part

    def _begin(self, n_bytes: int, n_fds: int) -> None:
        for number, most, what in zip(
            (n_bytes, n_fds), self._most, ("bytes", "descriptors"), strict=True
        ):
            if number > most:
                raise BadMessageError(f"announced {number} {what}, but the limit is {most}")
        self._lengths = n_bytes, n_fds
        self._data.clear()

    def _take_fds(self, missing: int) -> None:
        data, got, flags, _ = socket.recv_fds(self._end, 1, min(missing, DESCRIPTORS_AT_ONCE))
        self._fds += got
        if flags & socket.MSG_CTRUNC:
            raise LostDescriptorsError(
                "sent file descriptors that were lost on the way: is the limit of open files "
                "(ulimit -n) too low?"
            )
        if not data:
            raise ConnectionError("the other end is gone")
        if not got:
            raise BadMessageError("sent no file descriptors where it had announced them")

    def close(self) -> None:
        """Close the socket, and received descriptors that no caller has taken."""
        self._end.close()
        close_all(self._fds)
        self._fds = []


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
