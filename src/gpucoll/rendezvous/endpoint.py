"""Where rank 0 of a meeting listens, and how the others get there: a Unix socket, or TCP."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from gpucoll.errors import AuthenticationError


class TurnedAwayError(AuthenticationError):
    """Rank 0 closed the connection before this rank was known there: it may have had no room."""


class PeerConnection(Protocol):
    """One end of a connection that carries messages; nothing here waits.

    `frames.Connection` is the one over a Unix socket.
    """

    peer: str
    """Who is at the other end, for messages: "process 1234", "10.0.0.7:40122"; empty: unknown."""

    @property
    def is_known(self) -> bool:
        """Whether the other end has shown who it is."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""

    @property
    def is_sending(self) -> bool:
        """Whether something is still to be sent."""

    @property
    def events(self) -> int:
        """What to poll for while it `is_sending`."""

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send an encoded message, or as much of it as the other end takes now."""

    def flush(self) -> None:
        """Send what the other end takes now; OSError: it is gone."""

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message once it is complete, and its descriptors.

        Raises
        ------
        OSError
            The other end is gone.
        BadMessageError
            It did not keep to the protocol.
        AuthenticationError
            It may not take part.
        """

    def close(self) -> None:
        """Close the socket, and descriptors that nobody has taken."""


class Endpoint(Protocol):
    """Where rank 0 listens, and how the others get there."""

    def listen(self, who: str) -> socket.socket:
        """Return rank 0's listening socket; RendezvousError: it cannot be had."""

    def accept(self, end: socket.socket, n_fds: int) -> PeerConnection:
        """Return a connection that was accepted; AuthenticationError: it may not be."""

    def connect(self, most_bytes: int, most_fds: int) -> PeerConnection | None:
        """Return a connection to rank 0; None: not yet. Waits for a moment at most."""

    def trouble(self) -> str:
        """Say what the last tries to connect met, as a sentence with a space before it."""

    def close(self) -> None:
        """Let go of everything but of what `listen`, `accept` and `connect` have returned."""
