"""How the ranks of several hosts learn where rank 0 listens.

=================  ===========================================================================
``tcp://h:p``      said to every rank beforehand: rank 0 listens at port p of host h
``file://path``    rank 0 listens where it likes and writes it into a file that all can read
a store            the same with a key of a store that all share; torch's, or any with set and get
torchrun           the store that torchrun's agents met by
=================  ===========================================================================

No more than an address is learned here. How the ranks meet there, and prove that they belong to the
job, is not these classes' business.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Any, Protocol

from gpucoll import config
from gpucoll.errors import ArgumentError, ArgumentTypeError, RendezvousError
from gpucoll.rendezvous.addresses import join_address, split_address
from gpucoll.topology.interfaces import chosen_addresses, is_local, reachable_addresses

__all__ = ["MeetingPoint", "TcpPoint", "parse_meet"]

_RESOLVE_AGAIN_S = 0.5
_MAY_NOT_RESOLVE_S = 20.0
"""A container's name may get into the DNS only once its first process runs."""


class MeetingPoint(Protocol):
    """A way to learn rank 0's TCP address.

    Rank 0 asks `listen_at`, listens, calls `publish`, and `withdraw` when the meeting is over,
    however it ended. The others call `find` until they are connected to who proves to be rank 0: an
    address that refuses them may be one that a killed job left behind, so they ask again.
    """

    text: str
    """What it is, for messages: ``tcp://10.0.0.1:29500``, ``file:///shared/x``."""
    trouble: str
    """What was in the way of the last `find` that gave None, as a sentence without its full stop;
    empty where rank 0 has just not come."""

    def numbered(self, number: int) -> MeetingPoint:
        """Return the same for another meeting of the same job and name."""

    def listen_at(self) -> tuple[str, int] | None:
        """Return where rank 0 must listen; None: at any port of the interface that it chooses."""

    def publish(self, address: str) -> None:
        """Say where rank 0 listens, as ``host:port``."""

    def find(self) -> str | None:
        """Return rank 0's address as ``host:port``, the host a number; None: not known yet.

        Does not wait for rank 0. May be called again and again; a name with several addresses gives
        one after the other.
        """

    def withdraw(self) -> None:
        """Take back what rank 0 has published: the meeting is over. Raises nothing."""

    def leads_to(self) -> str | None:
        """Return a host on the way to which the default interface lies; None: nothing says."""

    def secret(self) -> bytes | None:
        """Return a secret that only this job's ranks can know; None where it hands none out.

        On rank 0 before `publish`; on the others after a `find` that gave an address.
        """


class TcpPoint:
    """``tcp://host:port``: rank 0's own address, which all ranks have been told.

    Parameters
    ----------
    host : str
        A name, or an IPv4 or IPv6 address, of rank 0's host.
    port : int
        Free on that host.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.text = f"tcp://{join_address(host, port)}"
        self.trouble = ""
        self._addresses: list[str] = []
        self._resolved_at = -_RESOLVE_AGAIN_S
        self._unknown_since: float | None = None
        self._n_asked = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TcpPoint) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def numbered(self, number: int) -> TcpPoint:
        """Return a point at the same address."""
        return TcpPoint(self.host, self.port)

    def listen_at(self) -> tuple[str, int]:
        """Return the address of this host that is meant.

        Raises
        ------
        RendezvousError
            The name does not resolve, or to no address of this host.
        """
        try:
            found = reachable_addresses(self.host)
        except OSError as error:
            raise self._unresolved(error) from None
        if local := [address for address in found if is_local(address)]:
            return local[0], self.port
        if chosen := chosen_addresses():  # reached by way of a router that forwards the port
            return chosen[0], self.port
        raise RendezvousError(
            f"rank 0 cannot listen at {self.text}: {', '.join(found)} is no address of the host "
            f"that rank 0 runs on ({socket.gethostname()}). Name rank 0's host there on every "
            f"rank, or, where a router hands that address on to it, set {config.INTERFACES} to the "
            "interface to listen at"
        )

    def publish(self, address: str) -> None:
        """Do nothing: all have been told."""

    def find(self) -> str | None:
        """Return the address, the next one each time where the name has several.

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

    def withdraw(self) -> None:
        """Do nothing: nothing was published."""

    def leads_to(self) -> str:
        """Return rank 0's host."""
        return self.host

    def secret(self) -> bytes | None:
        """Return None: an address is no secret."""
        return None

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


# --- from what the user says --------------------------------------------------------------------

_KINDS = "tcp://HOST:PORT of rank 0's host, or file:///PATH on a file system that all hosts share"


def parse_meet(meet: Any, name: str = "", where: str = "meet") -> MeetingPoint:
    """Return the meeting point that a user means.

    Parameters
    ----------
    meet : str or object
        ``tcp://host:port`` (``tcp://`` may be missing), ``file://path``, or a store: an object with
        ``set(key, value)`` and ``get(key)``, and better also ``check([key])`` or
        ``wait([key], timedelta)``, as torch's have.
    name : str
        Of the meeting: what keeps it apart from others at the same place.
    where : str
        What said it, for messages.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is nothing of that kind.
    """
    if not isinstance(meet, str):
        if not (callable(getattr(meet, "set", None)) and callable(getattr(meet, "get", None))):
            raise ArgumentTypeError(
                f"{where} must be {_KINDS}, or a store with set and get; got {type(meet).__name__}"
            )
        from gpucoll.rendezvous.meeting_store import StorePoint

        return StorePoint(meet, name)
    scheme, slashes, rest = meet.partition("://")
    if not slashes:
        scheme, rest = "tcp", meet
    if scheme == "file":
        from gpucoll.rendezvous.meeting_file import FilePoint

        if not rest.startswith("/") or rest.endswith("/"):
            raise ArgumentError(
                f"{where}: {meet!r} must name a file by its whole path, as file:///shared/meeting"
            )
        return FilePoint(rest, name)
    if scheme != "tcp":
        raise ArgumentError(f"{where} must be {_KINDS}; got {meet!r}")
    try:
        host, port = split_address(rest)
    except ValueError as error:
        raise ArgumentError(f"{where} must be {_KINDS}; got {meet!r}: {error}") from None
    if _is_unspecified(host):
        raise ArgumentError(
            f"{where}: {meet!r} is the address of every interface, and of none that another host "
            "could connect to: name rank 0's host"
        )
    return TcpPoint(host, port)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False
