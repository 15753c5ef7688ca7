"""Connections to rank 0's socket that have not introduced themselves yet.

Any process of this user may connect and send anything. So each process may have one connection at a
time, the number of connections is limited, and each has limited time for an introduction of limited
size.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import select
import socket
import time
from dataclasses import dataclass

from gpucoll.errors import AuthenticationError
from gpucoll.rendezvous.endpoint import Endpoint, PeerConnection
from gpucoll.rendezvous.frames import BadMessageError, LostDescriptorsError, Message, encode

_INTRODUCTION_S = 10.0  # a rank introduces itself as soon as it is connected
_MOST_WAITING = 64
_LEAST_S = 0.1  # time that each connection has, however many others there are
_AT_ONCE = 128  # connections accepted before ranks that have come are served again
_SHOWN = 5
AGAIN = encode({"again": True})
"""Tells a rank that was turned away for want of room to connect again."""


@dataclass
class Arrival:
    """A connection, the time at which it was accepted, and how long somebody has waited for it."""

    connection: PeerConnection
    since: float
    waited_s: float = 0.0


@dataclass
class Introduced:
    """A connection whose introduction has come."""

    connection: PeerConnection
    introduction: Message
    fds: list[int]


class Arrivals:
    """Accepts connections and takes their introductions, without ever waiting for one of them.

    Parameters
    ----------
    listener : socket
        Rank 0's listening socket; belongs to this object from here on.
    endpoint : Endpoint
        The endpoint that the socket belongs to.
    n_fds : int
        How many descriptors must come with an introduction.
    """

    def __init__(self, listener: socket.socket, endpoint: Endpoint, n_fds: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._endpoint = endpoint
        self._n_fds = n_fds
        self._waiting: dict[int, Arrival] = {}
        self._turned_away: dict[str, tuple[int, str]] = {}
        """By peer: how often it was turned away, and why the last time."""
        self._note = ""

    # --- waiting ----------------------------------------------------------------------------------

    def are_coming(self, spent_s: float, most_s: float) -> bool:
        """Return whether some may introduce themselves soon.

        Parameters
        ----------
        spent_s : float
            For how long the caller has waited since it asked last.
        most_s : float
            How long to wait for each in all. A stranger that says nothing costs no more.
        """
        for arrival in self._waiting.values():
            arrival.waited_s += spent_s
        return any(arrival.waited_s < most_s for arrival in self._waiting.values())

    def register(self, poll: select.poll) -> None:
        """Register the listener and the accepted connections with a poll."""
        if self._has_room():
            poll.register(self._listener, select.POLLIN)
        for fd in self._waiting:
            poll.register(fd, select.POLLIN)

    def serve(self, ready: set[int]) -> list[Introduced]:
        """Accept connections and read from them; return the introductions that are complete."""
        introduced = []
        for arrival in [self._waiting[fd] for fd in ready & self._waiting.keys()]:
            # Reading from the one before may have run out of descriptors, which closes all.
            if arrival.connection.fileno() in self._waiting and (found := self._read(arrival)):
                introduced.append(found)
        for arrival in list(self._waiting.values()):
            if time.monotonic() - arrival.since > _INTRODUCTION_S:
                self._turn_away(arrival, f"did not introduce itself within {_INTRODUCTION_S:g} s")
        if self._listener.fileno() in ready:
            self._accept()
        return introduced

    def _has_room(self) -> bool:
        if len(self._waiting) < _MOST_WAITING:
            return True
        oldest = next(iter(self._waiting.values()))
        return time.monotonic() - oldest.since >= _LEAST_S

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_room():
                return
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._free_descriptors()
                    return
                continue  # the peer is gone again
            self._take_in(end)

    def _take_in(self, end: socket.socket) -> None:
        try:
            connection = self._endpoint.accept(end, self._n_fds)
        except AuthenticationError as error:
            end.close()
            self.note("", str(error))
            return
        peer = connection.peer
        for other in list(self._waiting.values()):
            if peer and other.connection.peer == peer:  # a rank has one connection
                self._turn_away(other, "connected again and again")
        if len(self._waiting) >= _MOST_WAITING:
            self._turn_away(next(iter(self._waiting.values())), "was one of too many", AGAIN)
        self._waiting[connection.fileno()] = Arrival(connection, time.monotonic())

    def _free_descriptors(self) -> None:
        """Close all connections that have not introduced themselves: ranks may wait behind them."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._note = f"rank 0 had no file descriptor left (ulimit -n is {limit})"
        for arrival in list(self._waiting.values()):
            self._turn_away(arrival, "was one of too many", AGAIN)

    def _read(self, arrival: Arrival) -> Introduced | None:
        try:
            received = arrival.connection.receive()
        except LostDescriptorsError as error:
            self._turn_away(arrival, str(error), AGAIN)
            self._free_descriptors()
        except (BadMessageError, AuthenticationError) as error:
            self._turn_away(arrival, str(error))
        except OSError:
            self._turn_away(arrival, "left without introducing itself")
        else:
            if received is not None:
                del self._waiting[arrival.connection.fileno()]
                return Introduced(arrival.connection, *received)
        return None

    # --- strangers --------------------------------------------------------------------------------

    def _turn_away(self, arrival: Arrival, why: str, message: bytes | None = None) -> None:
        del self._waiting[arrival.connection.fileno()]
        self.note(arrival.connection.peer, why)
        self._say_and_close(arrival.connection, message or _refusal(why))

    def refuse(self, guest: Introduced, why: str) -> None:
        """Turn a peer away whose introduction is not a rank's."""
        self.note(guest.connection.peer, why)
        self._say_and_close(guest.connection, _refusal(why))

    @staticmethod
    def _say_and_close(connection: PeerConnection, message: bytes) -> None:
        if connection.is_known:  # strangers get no message
            with contextlib.suppress(OSError, AuthenticationError):  # it may be gone
                connection.send(message)
        connection.close()

    def note(self, peer: str, why: str) -> None:
        """Remember why a peer was turned away, for the error if the meeting fails."""
        times, _ = self._turned_away.get(peer, (0, ""))
        if times or len(self._turned_away) < 1000:
            self._turned_away[peer] = times + 1, why

    def strangers(self) -> str:
        """Return which peers were turned away, and what else went wrong here; empty: nothing."""
        for arrival in self._waiting.values():
            self.note(arrival.connection.peer, "had not introduced itself")
        by_reason: dict[str, list[tuple[str, int]]] = {}
        for peer, (times, why) in self._turned_away.items():
            by_reason.setdefault(why, []).append((peer, times))
        found = []
        for why, peers in list(by_reason.items())[:_SHOWN]:
            (peer, times), more = peers[0], len(peers) - 1
            others = f" (and {more} more {_kind_of(peer)})" if more else ""
            often = f" ({times} times)" if times > 1 else ""
            found.append(f"{peer}{others} {why}{often}".lstrip())
        if len(by_reason) > _SHOWN:
            found.append(f"and others, for {len(by_reason) - _SHOWN} more reasons")
        text = f" Turned away: {'; '.join(found)}." if found else ""
        return f"{text} {self._note}." if self._note else text

    def drop(self) -> None:
        """Close everything without a word: in a forked child, these are its parent's."""
        self._listener.close()
        for arrival in self._waiting.values():
            arrival.connection.close()
        self._waiting.clear()

    def close(self, message: bytes) -> None:
        """Send a message to all connections that are left, and close them."""
        if self._listener.fileno() >= 0:
            self._accept()
            self._listener.close()
        for arrival in self._waiting.values():
            self._say_and_close(arrival.connection, message)
        self._waiting.clear()


def _kind_of(peer: str) -> str:
    return "processes" if peer.startswith("process ") or not peer else "connections"


def _refusal(why: str) -> bytes:
    return encode({"error": f"this process {why}", "kind": "refused"})
