"""Check whether this host reaches another one as ranks do: ``--listen`` there, ``--reach`` here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpucoll.errors import AuthenticationError, GpucollError, RendezvousError
from gpucoll.rendezvous.addresses import join_address, split_address
from gpucoll.rendezvous.tcp import TROUBLES, listen_at
from gpucoll.topology.interfaces import check_not_link_local, interface_of, reachable_addresses
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.credentials import Credentials, job_tls
from gpucoll.transport.tcp.handshake import Role, encode_purpose
from gpucoll.transport.tcp.secret import job_secret, missing_secret_error
from gpucoll.transport.tcp.socket_options import tune_socket

if TYPE_CHECKING:
    from gpucoll.rendezvous.frames import Message

__all__ = ["UnreachableError", "listen", "reach"]

_T = TypeVar("_T")
Say = Callable[[str, str, str], None]
"""Prints ``(state, name, text)``, a line of the report."""
_WHO: Final = "gpucoll-doctor"
_PURPOSE: Final = encode_purpose("doctor")
_MOST_BYTES: Final = 4096
_PINGS: Final = 50
_RATE_S: Final = 1.0
_PIECE: Final = bytes(1 << 18)
_LATE_CLOCK_S: Final = 1.0


class UnreachableError(Exception):
    """The other host cannot be reached; the message says why, and what to do."""


class _Talk:
    """A connection on which each side waits for the other for a limited time."""

    def __init__(self, end: socket.socket, role: Role, timeout_s: float) -> None:
        secret = job_secret()
        if secret is None:
            raise missing_secret_error(_WHO)
        credentials = Credentials(secret, job_tls(_WHO))
        self.is_encrypted = credentials.tls is not None
        self._timeout_s = timeout_s
        self.connection = SealedConnection(end, credentials, role, _PURPOSE, _MOST_BYTES)

    def send(self, **content: object) -> None:
        """Send a message."""
        self.connection.send(json.dumps(content).encode())
        self._until(lambda: not self.connection.is_sending or None)

    def receive(self) -> Message:
        """Return the next message."""
        content: dict[str, Any] = json.loads(self._until(self.connection.receive))
        return content

    def receive_unsealed(self) -> bytes:
        """Return data that has arrived and is not sealed; empty if the other end has closed."""
        found: bytes = self._until(lambda: self.connection.receive_unsealed(len(_PIECE)))
        return found

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _until(self, step: Callable[[], _T | None]) -> _T:
        stop = time.monotonic() + self._timeout_s
        while (found := step()) is None:
            if time.monotonic() > stop:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            poll = select.poll()
            sending = self.connection.events if self.connection.is_sending else 0
            poll.register(self.connection, select.POLLIN | sending)
            poll.poll(100)
            if self.connection.is_sending:
                self.connection.flush()
        return found


# --- this end answers ---------------------------------------------------------------------------


def listen(address: str, say: Say, timeout_s: float, *, once: bool = False) -> None:
    """Answer hosts that call `reach`, until Ctrl-C.

    Raises
    ------
    RendezvousError, AuthenticationError, ArgumentError
        This host cannot listen at that address, or has no secret.
    """
    if job_secret() is None:
        raise missing_secret_error(_WHO)
    job_tls(_WHO)
    host, port = _split(address)
    listener = listen_at(_resolved(host), port, "gpucoll-doctor cannot listen")
    with listener:
        shown = join_address(*listener.getsockname()[:2])
        say("ok", "listening", f"at {shown}: gpucoll-doctor --reach {shown} on the other host")
        while True:
            end, peer = listener.accept()
            with end:
                _answer(end, join_address(*peer[:2]), say, timeout_s)
            if once:
                return


def _answer(end: socket.socket, peer: str, say: Say, timeout_s: float) -> None:
    try:
        with contextlib.closing(_Talk(end, Role.ACCEPTS, timeout_s)) as talk:
            while (asked := talk.receive()).get("what") != "rate":
                talk.send(now=time.time(), host=socket.gethostname())
            talk.send(go=True)  # the data that follows is not sealed
            n_bytes = 0
            while part := talk.receive_unsealed():
                n_bytes += len(part)
        say("ok", peer, f"asked, and sent {n_bytes / 1e6:.0f} MB in {asked['seconds']:g} s")
    except (OSError, GpucollError, ValueError) as error:
        say("bad", peer, str(error))


# --- this end measures --------------------------------------------------------------------------


def reach(address: str, say: Say, timeout_s: float) -> None:
    """Report how this host reaches another one, on which `listen` runs.

    Raises
    ------
    UnreachableError
        The other host cannot be reached.
    """
    try:
        host, port = _split(address)
        place = _resolved(host), port
        with _connected(place, say, timeout_s) as end:
            _ask(end, say, timeout_s)
    except GpucollError as error:
        raise UnreachableError(str(error)) from None


def _split(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError as error:
        raise RendezvousError(f"{address!r} is not HOST:PORT: {error}") from None


def _resolved(host: str) -> str:
    try:
        address = reachable_addresses(host)[0]
        check_not_link_local(address)
        return address
    except OSError as error:
        raise RendezvousError(
            f"{host!r} does not resolve on {socket.gethostname()} ({error.strerror}): give its "
            "address, or put the name into the DNS or /etc/hosts"
        ) from None


@contextlib.contextmanager
def _connected(place: tuple[str, int], say: Say, timeout_s: float) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as end:
        tune_socket(end)
        end.settimeout(timeout_s)
        start = time.monotonic()
        try:
            end.connect(place)
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or 0
            reason = error.strerror or str(error)
            hint = TROUBLES.get(number, "no known cause")
            raise UnreachableError(f"{join_address(*place)}: {reason} ({hint})") from None
        took_ms = 1000 * (time.monotonic() - start)
        mine = end.getsockname()[0]
        interface = interface_of(mine)
        say("ok", "interface", f"{interface.name}, {mine}, MTU {interface.mtu}")
        say("ok", "connection", f"to {join_address(*place)} in {took_ms:.2f} ms")
        yield end


def _ask(end: socket.socket, say: Say, timeout_s: float) -> None:
    peer = join_address(*end.getpeername()[:2])
    try:
        with contextlib.closing(_Talk(end, Role.CONNECTS, timeout_s)) as talk:
            _ask_all(talk, say, timeout_s)
    except (OSError, AuthenticationError, ValueError, KeyError) as error:
        place = peer if isinstance(error, AuthenticationError) else ""
        raise UnreachableError(f"{place} {error}".strip()) from None


def _ask_all(talk: _Talk, say: Say, timeout_s: float) -> None:
    start = time.monotonic()
    trips, other, offset_s = [], "", 0.0
    for _ in range(_PINGS):
        begun, clock = time.monotonic(), time.time()
        talk.send(what="ping")
        answer = talk.receive()
        trips.append(time.monotonic() - begun)
        if not other:
            other = str(answer["host"])
            took_ms = 1000 * (time.monotonic() - start)
            inside = " inside of TLS 1.3" if talk.is_encrypted else ""
            say(
                "ok",
                "handshake",
                f"with {other} in {took_ms:.2f} ms{inside}: both have the same secret",
            )
        offset_s = float(answer["now"]) - clock - trips[-1] / 2
    say("ok", "round trip", f"{1e6 * median(trips):.0f} us, the median of {_PINGS}")
    is_late = abs(offset_s) > _LATE_CLOCK_S
    say(
        "warn" if is_late else "ok",
        "clocks",
        f"{other}'s is {abs(offset_s):.3f} s {'ahead' if offset_s > 0 else 'behind'}"
        + (
            ": timestamps in logs of the two hosts will not match (gpucoll itself is not affected)"
            * is_late
        ),
    )
    talk.send(what="rate", seconds=_RATE_S)
    talk.receive()
    rate = _rate(talk.connection.detach(), timeout_s)
    say("ok", "rate", f"{rate * 8 / 1e9:.2f} Gbit/s, one way")


def _rate(plain: socket.socket, timeout_s: float) -> float:
    """Return the rate in bytes per second, from one second of sending."""
    plain.setblocking(True)
    plain.settimeout(timeout_s)
    start, n_bytes = time.monotonic(), 0
    while (took_s := time.monotonic() - start) < _RATE_S:
        plain.sendall(_PIECE)
        n_bytes += len(_PIECE)
    return n_bytes / took_s
