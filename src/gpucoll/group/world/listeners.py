"""The sockets on which a rank listens while its group is being formed."""

from __future__ import annotations

import socket

from gpucoll.group.world import lanes
from gpucoll.rendezvous.tcp import listen_at


class Listeners:
    """A rank's listening sockets. Code that needs one beyond the meeting takes a duplicate.

    Parameters
    ----------
    address : str
        Address of the interface that links the hosts.
    who : str
        This rank, for messages.

    Attributes
    ----------
    first : socket
        For links, small calls and the first lane of large arrays.
    further : list of socket
        For the other lanes.
    messages : socket
        For ranks that send messages to this one.
    """

    def __init__(self, address: str, who: str) -> None:
        what = f"{who} cannot listen for other hosts"
        self.further: list[socket.socket] = []
        self.first = listen_at(address, 0, what)
        self._open = [self.first]
        try:
            self.messages = listen_at(address, 0, what)
            self._open.append(self.messages)
            self.further = lanes.further_listeners(self.first, who)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets; duplicates go on listening."""
        for each in (*self._open, *self.further):
            each.close()
