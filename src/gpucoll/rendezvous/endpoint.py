"""The protocol of an endpoint: where rank 0 of a meeting listens, and how others reach it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

from gpucoll.errors import AuthenticationError

if TYPE_CHECKING:
    from gpucoll.rendezvous.frames import Message


class TurnedAwayError(AuthenticationError):
    """Rank 0 closed the connection before it had identified this rank, perhaps for lack of room."""


class PeerConnection(Protocol):
    """One end of a connection that carries messages; none of its methods waits.

    `frames.Connection` is its implementation over a Unix socket.
    """

    peer: str
    """The other end, for messages: "process 1234", "10.0.0.7:40122"; empty: unknown."""

    @property
    def is_known(self) -> bool:
        """Whether the other end has been authenticated."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""

    @property
    def is_sending(self) -> bool:
        """Whether there is unsent data."""

    @property
    def events(self) -> int:
        """The events to poll for while it `is_sending`."""

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send an encoded message, or as much of it as the other end takes now."""

    def flush(self) -> None:
        """Send what the other end takes now; OSError: the other end is gone."""

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message once it is complete, and its descriptors.

        Raises
        ------
        OSError
            The other end is gone.
        BadMessageError
            The other end violated the protocol.
        AuthenticationError
            The other end may not take part.
        """

    def close(self) -> None:
        """Close the socket, and received descriptors that no caller has taken."""


class Endpoint(Protocol):
    """Where rank 0 listens, and how the others reach it."""

    def listen(self, who: str) -> socket.socket:
        """Return rank 0's listening socket; RendezvousError: it cannot be made."""

    def accept(self, end: socket.socket, n_fds: int) -> PeerConnection:
        """Return a connection over an accepted socket; AuthenticationError: it is not allowed."""

    def connect(self, most_bytes: int, most_fds: int) -> PeerConnection | None:
        """Return a connection to rank 0; None: there is none yet. It waits for a moment at most."""

    def trouble(self) -> str:
        """Return why the last attempts to connect failed, as a sentence after a space."""

    def close(self) -> None:
        """Release everything except the results of `listen`, `accept` and `connect`."""
