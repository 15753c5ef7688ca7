"""Where newcomers of one host call (`gpucoll.rendezvous.door`): at the newest of several sockets.

A rank 0 that is stopped keeps its socket, and nobody can take that away from it. So the rank 0 that
follows after `shrink` listens at another one, of a higher number, and newcomers call there.
"""

from __future__ import annotations

import socket
from typing import Final

from gpucoll.rendezvous.frames import Connection
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.notices import address
from gpucoll.rendezvous.unix import UnixEndpoint

_MOST: Final = 4096
"""Numbers begin again after so many: a communicator that has changed that often."""


class UnixDoor:
    """The sockets of one place.

    Parameters
    ----------
    token : str
        The word by which newcomers find the place.
    title : str
        What the socket is for, for messages.
    number : int
        On rank 0: the number of its socket, higher than that of any rank 0 before.
    """

    def __init__(self, token: str, title: str, number: int = 0) -> None:
        self._token, self._title, self._number = token, title, number % _MOST
        self._numbers: dict[str, int] = {}
        """By name of a socket, as the kernel lists it."""

    def _endpoint(self, number: int) -> UnixEndpoint:
        return UnixEndpoint(Job(0, 1, self._token_of(number), self._title))

    def _token_of(self, number: int) -> str:
        return f"{self._token}#{number}"

    def newest(self) -> int:
        """Return the highest number at which a rank 0 listens; -1: none does."""
        if not self._numbers:
            for number in range(_MOST):
                name = address(self._token_of(number)).decode().replace("\0", "@")
                self._numbers[name] = number
        with open("/proc/net/unix") as file:
            names = [line.rpartition(" ")[2].rstrip("\n") for line in file]
        return max((self._numbers[name] for name in names if name in self._numbers), default=-1)

    def listen(self, who: str) -> socket.socket:
        """Return rank 0's listening socket."""
        return self._endpoint(self._number).listen(who)

    def accept(self, end: socket.socket, n_fds: int) -> Connection:
        """Return the connection of a process, which must be this user's."""
        return self._endpoint(self._number).accept(end, n_fds)

    def connect(self, most_bytes: int, most_fds: int) -> Connection | None:
        """Return a connection to the newest rank 0; None: there is none."""
        number = self.newest()
        return None if number < 0 else self._endpoint(number).connect(most_bytes, most_fds)

    def trouble(self) -> str:
        """Return nothing: the only trouble can be that there is no socket yet."""
        return ""

    def close(self) -> None:
        """Do nothing: sockets belong to the code that received them."""
