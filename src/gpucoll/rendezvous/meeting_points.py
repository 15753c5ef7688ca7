"""How the ranks of several hosts learn where rank 0 listens.

=================  ===========================================================================
``tcp://h:p``      every rank knows beforehand that rank 0 listens at port p of host h
``file://path``    rank 0 listens at any port and writes the address to a file that all can read
a store            rank 0 sets a key of a store that all share: torch's, or any with set and get
torchrun           a key of the store by which torchrun's agents met
=================  ===========================================================================

These classes only provide an address. Other modules handle how the ranks meet there, and how they
prove that they belong to the job.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import TYPE_CHECKING, Protocol

from gpucoll import config
from gpucoll.errors import ArgumentError, ArgumentTypeError, RendezvousError
from gpucoll.rendezvous.addresses import join_address, split_address
from gpucoll.topology.interfaces import chosen_addresses, is_local, reachable_addresses

if TYPE_CHECKING:
    from gpucoll.rendezvous.meeting_store import AnyStore

__all__ = ["MeetingPoint", "TcpPoint", "parse_meet"]

_RESOLVE_AGAIN_S = 0.5
_MAY_NOT_RESOLVE_S = 20.0
"""How long a name may fail to resolve: the DNS may learn a container's name only once it runs."""


class MeetingPoint(Protocol):
    """A way to learn rank 0's TCP address.

    Rank 0 calls `listen_at`, listens, calls `publish`, and calls `withdraw` when the meeting is
    over, however it ended. The others call `find` until they are connected to a rank that proves to
    be rank 0. An address that refuses them may have been left behind by a killed job, so they call
    `find` again.
    """

    text: str
    """The meeting point, for messages: ``tcp://10.0.0.1:29500``, ``file:///shared/x``."""
    trouble: str
    """Why the last `find` returned None, as a sentence without its full stop.

    Empty if rank 0 has not come yet, and nothing else is wrong.
    """

    def numbered(self, number: int) -> MeetingPoint:
        """Return the point for another meeting of the same job and name."""

    def listen_at(self) -> tuple[str, int] | None:
        """Return where rank 0 must listen; None: at any port of the interface that it chooses."""

    def publish(self, address: str) -> None:
        """Publish where rank 0 listens, as ``host:port``."""

    def find(self) -> str | None:
        """Return rank 0's address as ``host:port``, with a numeric host; None: not known yet.

        It does not wait for rank 0. It may be called again and again; if a name has several
        addresses, it returns one after the other.
        """

    def withdraw(self) -> None:
        """Remove what rank 0 has published, because the meeting is over. It raises nothing."""

    def leads_to(self) -> str | None:
        """Return a host; the interface that leads to it is the default. None: there is none."""

    def secret(self) -> bytes | None:
        """Return a secret that only this job's ranks can know; None: the point provides none.

        On rank 0 it is called before `publish`, on the others after a `find` that returned an
        address.
        """


class TcpPoint:
    """``tcp://host:port``: rank 0's own address, which all ranks know beforehand.

    Parameters
    ----------
    host : str
        The name, or an IPv4 or IPv6 address, of rank 0's host.
    port : int
        A port that is free on that host.
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

    def publish(self, address: str) -> None:
        """Do nothing: all ranks have the address already."""

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


# --- from the user's argument -------------------------------------------------------------------

_KINDS = "tcp://HOST:PORT of rank 0's host, or file:///PATH on a file system that all hosts share"


def parse_meet(meet: str | AnyStore | None, name: str = "", where: str = "meet") -> MeetingPoint:
    """Return the meeting point that a user has specified.

    Parameters
    ----------
    meet : str or object
        ``tcp://host:port`` (``tcp://`` may be missing), ``file://path``, or a store: an object with
        ``set(key, value)`` and ``get(key)``, and better also ``check([key])`` or
        ``wait([key], timedelta)``, as torch's have.
    name : str
        Name of the meeting, which tells it apart from others at the same place.
    where : str
        The name of the argument or variable, for messages.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is none of these.
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
            f"{where}: {meet!r} is the address of every interface, so no other host can connect to "
            "it: name rank 0's host"
        )
    return TcpPoint(host, port)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False
