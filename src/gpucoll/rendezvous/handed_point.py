"""A meeting point that a communicator hands to some of its ranks: rank 0 is listening already."""

from __future__ import annotations

import socket

from gpucoll.rendezvous.addresses import split_address
from gpucoll.transport.tcp.credentials import Credentials


class HandedPoint:
    """The point at which some ranks of a communicator meet; a `meeting_points.MeetingPoint`.

    Parameters
    ----------
    address : str
        Rank 0's address, as ``host:port``.
    credentials : Credentials
        The communicator's credentials.
    listener : socket, optional
        Rank 0's listening socket, on rank 0; it belongs to the code that takes it.
    """

    trouble = ""

    def __init__(
        self, address: str, credentials: Credentials, listener: socket.socket | None = None
    ) -> None:
        self.text = f"tcp://{address}"
        self.listener = listener
        self._address = address
        self.credentials = credentials

    def numbered(self, number: int) -> HandedPoint:
        """Return this: each meeting has a port of its own."""
        return self

    def listen_at(self) -> tuple[str, int]:
        """Return where rank 0 listens."""
        return split_address(self._address)

    def publish(self, address: str) -> None:
        """Do nothing: all ranks have the address already."""

    def find(self) -> str:
        """Return the address."""
        return self._address

    def withdraw(self) -> None:
        """Do nothing: nothing was published."""

    def leads_to(self) -> str:
        """Return rank 0's host."""
        return split_address(self._address)[0]

    def secret(self) -> bytes:
        """Return the communicator's secret."""
        return self.credentials.secret
