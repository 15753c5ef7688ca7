"""The meeting point that a user has specified: ``init(meet=...)``, ``--meet``, ``GPUCOLL_MEET``."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.rendezvous.addresses import split_address
from gpucoll.rendezvous.meeting_points import MeetingPoint, TcpPoint

if TYPE_CHECKING:
    from gpucoll.rendezvous.meeting_store import AnyStore

__all__ = ["parse_meet"]

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
