"""How the ranks of several hosts learn where rank 0 listens.

=================  ===========================================================================
``tcp://h:p``      every rank knows beforehand that rank 0 listens at port p of host h
``file://path``    rank 0 listens at any port and writes the address to a file that all can read
a store            rank 0 sets a key of a store that all share: torch's, or any with set and get
torchrun           a key of the store by which torchrun's agents met
=================  ===========================================================================

The last three are one: a `SharedPoint` reads and writes a store by `set`, `get` and `delete`, and
a file is a store of one key. These classes only provide an address. Other modules handle how the
ranks meet there, and how they prove that they belong to the job.
"""

from __future__ import annotations

import copy
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpucoll import config
from gpucoll.errors import RendezvousError
from gpucoll.rendezvous.addresses import join_address, split_address
from gpucoll.topology.interfaces import chosen_addresses, is_local, reachable_addresses

if TYPE_CHECKING:
    from gpucoll.transport.tcp.credentials import Credentials

__all__ = ["HandedPoint", "MeetingPoint", "SharedPoint", "TcpPoint"]

_RESOLVE_AGAIN_S = 0.5
_MAY_NOT_RESOLVE_S = 20.0
"""How long a name may fail to resolve: the DNS may learn a container's name only once it runs."""


class MeetingPoint:
    """A way to learn rank 0's TCP address.

    Rank 0 calls `listen_at`, listens, calls `publish`, and calls `withdraw` when the meeting is
    over, however it ended. The others call `find` until they are connected to a rank that proves to
    be rank 0. An address that refuses them may have been left behind by a killed job, so they call
    `find` again.

    The base class does what suits an address that all ranks know beforehand.
    """

    text: str
    """The meeting point, for messages: ``tcp://10.0.0.1:29500``, ``file:///shared/x``."""
    trouble = ""
    """Why the last `find` returned None, as a sentence without its full stop.

    Empty if rank 0 has not come yet, and nothing else is wrong.
    """

    def numbered(self, number: int) -> MeetingPoint:
        """Return the point for another meeting of the same job and name."""
        return self

    def listen_at(self) -> tuple[str, int] | None:
        """Return where rank 0 must listen; None: at any port of the interface that it chooses."""
        return None

    def publish(self, address: str) -> None:
        """Publish where rank 0 listens, as ``host:port``."""

    def find(self) -> str | None:
        """Return rank 0's address as ``host:port``, with a numeric host; None: not known yet.

        It does not wait for rank 0. It may be called again and again; if a name has several
        addresses, it returns one after the other.
        """
        raise NotImplementedError

    def withdraw(self) -> None:
        """Remove what rank 0 has published, because the meeting is over. It raises nothing."""

    def leads_to(self) -> str | None:
        """Return a host; the interface that leads to it is the default. None: there is none."""
        raise NotImplementedError

    def secret(self) -> bytes | None:
        """Return a secret that only this job's ranks can know; None: the point provides none.

        On rank 0 it is called before `publish`, on the others after a `find` that returned an
        address.
        """
        return None


class HandedPoint(MeetingPoint):
    """A point that a communicator hands to some of its ranks: rank 0 is listening already.

    Parameters
    ----------
    address : str
        Rank 0's address, as ``host:port``.
    credentials : Credentials
        The communicator's credentials.
    listener : socket, optional
        Rank 0's listening socket, on rank 0; it belongs to the code that takes it.
    """

    def __init__(
        self, address: str, credentials: Credentials, listener: socket.socket | None = None
    ) -> None:
        self.text = f"tcp://{address}"
        self.credentials, self.listener = credentials, listener
        self._address = address

    def find(self) -> str:
        """Return the address."""
        return self._address

    def leads_to(self) -> str:
        """Return rank 0's host."""
        return split_address(self._address)[0]

    def secret(self) -> bytes:
        """Return the communicator's secret."""
        return self.credentials.secret


@dataclass
class TcpPoint(MeetingPoint):
    """``tcp://host:port``: rank 0's own address, which all ranks know beforehand.

    Parameters
    ----------
    host : str
        The name, or an IPv4 or IPv6 address, of rank 0's host.
    port : int
        A port that is free on that host.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        self.text = f"tcp://{join_address(self.host, self.port)}"
        self._addresses: list[str] = []
        self._resolved_at = -_RESOLVE_AGAIN_S
        self._unknown_since: float | None = None
        self._n_asked = 0

    def listen_at(self) -> tuple[str, int]:
        """Return the local address at which to listen, and the port.

        Raises
        ------
        RendezvousError
            The name does not resolve, or resolves to no address of this host.
        """
        try:
            found = reachable_addresses(self.host)
        except OSError as error:
            raise self._unresolved(error) from None
        if local := [address for address in found if is_local(address)]:
            return local[0], self.port
        if chosen := chosen_addresses():  # a router forwards the port to this host
            return chosen[0], self.port
        raise RendezvousError(
            f"rank 0 cannot listen at {self.text}: {', '.join(found)} is not an address of the "
            f"host that rank 0 runs on ({socket.gethostname()}). Name rank 0's host there on every "
            f"rank or, if a router forwards that address to it, set {config.INTERFACES} to the "
            "interface to listen at"
        )

    def find(self) -> str | None:
        """Return the address; if the name has several, the next one each time.

        Raises
        ------
        RendezvousError
            The name has not resolved for a while.
        """
        now = time.monotonic()
        if now - self._resolved_at >= _RESOLVE_AGAIN_S:
            try:
                self._addresses = reachable_addresses(self.host)
            except OSError as error:
                self._wait_for_name(error, now)
            else:
                self._unknown_since, self.trouble = None, ""
            self._resolved_at = time.monotonic()
        if not self._addresses:
            return None
        self._n_asked += 1
        address = self._addresses[(self._n_asked - 1) % len(self._addresses)]
        return join_address(address, self.port)

    def leads_to(self) -> str:
        """Return rank 0's host."""
        return self.host

    def _wait_for_name(self, error: OSError, now: float) -> None:
        self._addresses = []
        self.trouble = str(self._unresolved(error))
        self._unknown_since = now if self._unknown_since is None else self._unknown_since
        if error.errno != socket.EAI_AGAIN and now - self._unknown_since > _MAY_NOT_RESOLVE_S:
            raise self._unresolved(error)

    def _unresolved(self, error: OSError) -> RendezvousError:
        return RendezvousError(
            f"the host of the meeting point {self.text} does not resolve on "
            f"{socket.gethostname()}: {error.strerror}. Give its address instead, or put the name "
            "into the DNS or /etc/hosts"
        )


class SharedPoint(MeetingPoint):
    """A store of keys and values that all ranks share: rank 0 sets a key to its address.

    A subclass implements `set`, `get` and `delete`. No method waits for a key: what a killed job
    has left may be under it, so callers ask again until they find what they need.

    Parameters
    ----------
    name : str
        The meeting's name, which tells it apart from others in the same store.
    text : str
        The store, for messages.
    """

    def __init__(self, name: str, text: str) -> None:
        self.text = text
        self._name, self._number = name, 0
        self._address: str | None = None
        self._secret: bytes | None = None

    def set(self, key: str, text: str) -> None:
        """Set a key; RendezvousError: it cannot be set."""
        raise NotImplementedError

    def get(self, key: str) -> str:
        """Return a key's value; empty: it is not set, or the store cannot be read (`trouble`)."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Delete a key. It raises nothing."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """The key of rank 0's address."""
        return f"{self._name}#{self._number}"

    def numbered(self, number: int) -> SharedPoint:
        """Return the point of another meeting in the same store."""
        point = copy.copy(self)
        point._number = number
        return point

    def publish(self, address: str) -> None:
        """Set the key."""
        self.set(self.key, address)

    def find(self) -> str | None:
        """Return the key's value."""
        self._address = None
        if text := self.get(self.key):
            try:
                split_address(text)
            except ValueError as error:
                self.trouble = f"the key {self.key!r} of {self.text} is {text[:100]!r}: {error}"
            else:
                self._address = text
        return self._address

    def withdraw(self) -> None:
        """Delete the key."""
        self.delete(self.key)

    def leads_to(self) -> str | None:
        """Return rank 0's host, once it is known."""
        return split_address(self._address)[0] if self._address else None
