"""A leader's links to other hosts: sending over them, and the thread that listens to them.

The thread receives messages, forwards those for all hosts, and watches the links and the ranks of
this host, whatever the program is doing. It sleeps while nothing happens. While exchanges follow
each other closely, the calling thread receives messages itself, so no other thread has to wake it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from gpucoll.errors import AuthenticationError
from gpucoll.group.world.hosts import further_hosts, neighbours
from gpucoll.group.world.messages import Kind, Message, pack, unpack
from gpucoll.group.world.observers import Observers
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.transport.tcp.connection import SealedConnection

LINKS_THREAD: Final = "gpucoll-links"
"""The thread's name."""
_SLICE_S = 0.02
_YIELDS = 50
"""How often an exchange checks for a message before it sleeps.

8 bytes between two hosts take 120 us, and 350 us if the exchange sleeps at once (best of 200,
loopback on 2 cores, 2026-11-22).
"""
_MOST_UNSENT_BYTES = 1 << 20
"""Observers' answers are not kept for a link on which more waits to be sent: it may be cut."""
_LEAVING_S = 5.0
"""How long a leader that closes waits until its last messages are on their way."""
_all: weakref.WeakSet[Links] = weakref.WeakSet()


class Listener(Protocol):
    """The receiver of a link's news. The links' thread calls it, so its methods must not wait."""

    def hear(self, message: Message) -> None:
        """Handle a message for all hosts."""

    def lose(self, host: int, reason: str) -> None:
        """Handle the end of a link whose host has not announced it."""

    def look(self) -> None:
        """Report what this host's ranks have done, after the bell was rung."""

    def go_deaf(self, error: Exception) -> None:
        """Handle a fault that ends the thread: no more news will come."""

    def miss(self, fd: int) -> None:
        """Handle the end of the process that this descriptor belongs to."""


class Links:
    """The links of one leader.

    Parameters
    ----------
    host, count : int
        This host's number, and the number of hosts.
    connections : mapping of int to SealedConnection
        The connection to each of the host's `neighbours`; they belong to this object from here on.
    bell_fd : int
        An eventfd of this host's ranks; the caller keeps it.
    """

    def __init__(
        self, host: int, count: int, connections: Mapping[int, SealedConnection], bell_fd: int
    ) -> None:
        assert sorted(connections) == neighbours(host, count)
        self.host, self.count = host, count
        self._connections = dict(connections)
        self._bell_fd = bell_fd
        self._listening: Callable[[], Listener | None] = _nobody
        self._life_fds: set[int] = set()
        self._observers: Observers | None = None
        self._parts: dict[tuple[int, int, int], bytes] = {}
        self._receiving = threading.Lock()
        """Held by the thread that receives from a link: one at a time."""
        self._is_taken_by_caller = False
        self._is_exchanging = False
        self._n_exchanges = 0
        self._lock = threading.RLock()  # not the condition: an interrupt can leave that locked
        self._changed = threading.Condition(self._lock)
        """Guards the connections and received messages; notified of every change."""
        self._heard: set[tuple[int, int]] = set()
        self._n_told = 0
        self._rest_until_s = 0.0
        self._leaving: set[int] = set()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        _all.add(self)

    def serve(self, listener: Listener, life_fds: Sequence[int], observers: Observers) -> None:
        """Start the thread; `life_fds` show when processes of this host's other ranks end.

        `observers` belong to this object from here on.
        """
        self._observers = observers
        self._listening = weakref.ref(listener)  # a strong one would keep it alive for ever
        self._life_fds = {fd for fd in life_fds if fd >= 0}
        self._thread = threading.Thread(target=self._run, name=LINKS_THREAD, daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Return the hosts and addresses that the links lead to."""
        found = [f"host {host} at {end.peer}" for host, end in sorted(self._connections.items())]
        return ", ".join(found) or "none any more"

    # --- saying -----------------------------------------------------------------------------------

    def tell_all(self, kind: Kind, facts: Mapping[str, Any], data: bytes = b"") -> None:
        """Send a message to every host, without waiting for any."""
        with held_signals(), self._lock:
            self._n_told += 1
            message = Message(kind, {**facts, "from": self.host, "n": self._n_told}, data)
            self._heard.add((self.host, self._n_told))
            self._spread(message, but=-1)

    def tell_each(self, kind: Kind, facts: Mapping[str, Any], data: bytes) -> None:
        """Send a message to every host exactly once, for frequent news; it takes log2(hosts) steps.

        Every other host receives one host's messages in the order in which they were sent.
        """
        with held_signals(), self._lock:
            self._hand_on(Message(kind, {**facts, "from": self.host}, data))

    def _hand_on(self, message: Message) -> None:
        encoded = message.encode()
        for host in further_hosts(int(message.facts["from"]), self.host, self.count):
            self._send(host, encoded)

    def rest(self, pause_s: float) -> None:
        """Ignore the bell for `pause_s`: this host's news of that time is reported together."""
        self._rest_until_s = time.monotonic() + pause_s

    def _spread(self, message: Message, but: int) -> None:
        encoded = message.encode()
        for host, connection in list(self._connections.items()):
            may_wait = message.kind != Kind.SEEN or connection.unsent_bytes < _MOST_UNSENT_BYTES
            if host != but and may_wait:
                self._send(host, encoded)

    def _send(self, host: int, encoded: bytes) -> None:
        connection = self._connections.get(host)
        if connection is None:
            return
        with contextlib.suppress(OSError, AuthenticationError):  # the thread sees it, too
            connection.send(encoded)
        if connection.is_sending and threading.current_thread() is not self._thread:
            self.ring()  # the thread sends the rest

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # an earlier ring is still unread
            os.eventfd_write(self._bell_fd, 1)

    # --- exchanging -------------------------------------------------------------------------------

    def exchange(
        self, number: tuple[int, int], data: bytes, look: Callable[[], None]
    ) -> list[bytes]:
        """Give every leader's bytes to every leader; return them by host.

        Cost: ``log2(count)`` steps (Bruck et al. 1997), in which each host receives all data once.

        Parameters
        ----------
        number : (int, int)
            Number of the call, and of the exchange in it: the same on all hosts.
        data : bytes
            This host's.
        look : callable
            Called again and again while waiting; raises if the wait is in vain.
        """
        # An interrupt between two lines would leave a connection in the middle of a message.
        with held_signals() as signals:

            def look_up() -> None:
                signals.check()
                look()

            self._begin_exchange()
            try:
                return self._exchange(number, data, look_up)
            finally:
                self._is_exchanging = False

    def _begin_exchange(self) -> None:
        self._n_exchanges += 1
        self._is_exchanging = True
        if not self._is_taken_by_caller:
            self._is_taken_by_caller = True
            self.ring()

    def _exchange(
        self, number: tuple[int, int], data: bytes, look: Callable[[], None]
    ) -> list[bytes]:
        held, distance, step = [data], 1, 0
        while distance < self.count:
            n_sent = min(distance, self.count - distance)
            facts = {"call": number[0], "round": number[1], "step": step}
            message = Message(Kind.PART, facts, pack(held[:n_sent]))
            with self._lock:
                self._send((self.host + distance) % self.count, message.encode())
            source = (self.host - distance) % self.count
            held += unpack(self._await((*number, step), source, look))
            distance, step = 2 * distance, step + 1
        # `held` begins with this host's part, followed by those of the hosts before it, backwards.
        return [held[(self.host - host) % self.count] for host in range(self.count)]

    def _await(self, key: tuple[int, int, int], source: int, look: Callable[[], None]) -> bytes:
        """Return the bytes that a host sends as this part of an exchange."""
        for _ in range(_YIELDS):
            self._hear(source)
            if key in self._parts:
                return self._parts.pop(key)
            os.sched_yield()
        while True:
            self._take_what_comes()
            if key in self._parts:
                return self._parts.pop(key)
            look()

    def _take_what_comes(self) -> None:
        """Wait a moment for the links, and receive what has come."""
        poll = select.poll()
        with self._lock:
            hosts = self._register_links(poll, select.POLLIN)
        for fd, _ in poll.poll(1000 * _SLICE_S):
            self._hear(hosts[fd])

    def _register_links(self, poll: select.poll, wanted: int) -> dict[int, int]:
        """Poll links for `wanted`, and for room if they have unsent data; return hosts by fd."""
        by_fd = {}
        for host, end in self._connections.items():
            events = wanted | (select.POLLOUT if end.is_sending else 0)
            if events:
                poll.register(end, events)
                by_fd[end.fileno()] = host
        return by_fd

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, for `timeout_s` at most, until news makes `is_over` true; return whether it is."""
        stop = time.monotonic() + timeout_s
        self._is_taken_by_caller = False
        self.ring()
        with self._lock:
            while not is_over():
                if (left_s := stop - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left_s, _SLICE_S))
        return True

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for host in list(self._connections):  # more may have come with the greeting
                self._take(-1, host)
            while not self._is_stopping:
                self._turn()
        except Exception as error:  # a fault in this code: no more news would be reported
            if not self._is_stopping and (listener := self._listening()) is not None:
                listener.go_deaf(error)
                raise
        finally:
            self.drop()

    def _turn(self) -> None:
        """Sleep until something happens, and handle it."""
        poll, n_exchanges = select.poll(), self._n_exchanges
        is_watching = not self._is_taken_by_caller
        with self._lock:
            by_fd = self._register_links(poll, select.POLLIN if is_watching else 0)
        rest_s = self._rest_until_s - time.monotonic()
        if rest_s <= 0:
            poll.register(self._bell_fd, select.POLLIN)
        for fd in self._life_fds:
            poll.register(fd, select.POLLIN)
        limits_s = [*([] if is_watching else [_SLICE_S]), *([rest_s] if rest_s > 0 else [])]
        observed = self._register_observers(poll, limits_s)
        for fd, _ in poll.poll(1000 * min(limits_s) if limits_s else None):
            if fd not in observed:
                self._take(fd, by_fd.get(fd))
        self._serve_observers()
        if not self._is_exchanging and self._n_exchanges == n_exchanges:
            self._is_taken_by_caller = False
        with self._lock:
            self._changed.notify_all()

    def _register_observers(self, poll: select.poll, limits_s: list[float]) -> set[int]:
        """Poll what observers need, and add to the limits of the wait; return the descriptors."""
        if (observers := self._observers) is None:
            return set()
        events = dict(observers.events())
        for fd, wanted in events.items():
            poll.register(fd, wanted)
        if (rest_s := observers.rest_s) is not None:
            limits_s.append(rest_s)
        return {*events}

    def _serve_observers(self) -> None:
        if (observers := self._observers) is not None:
            try:
                observers.work()
            except Exception:  # a job does not end because somebody has looked at it
                self._observers = None
                observers.close()

    def _take(self, fd: int, host: int | None) -> None:
        listener = self._listening()
        if listener is None:
            self._is_stopping = True
        elif host is not None:
            self._receive(host, listener)
        elif fd == self._bell_fd:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            if not self._is_stopping:
                listener.look()
        else:
            self._life_fds.discard(fd)
            listener.miss(fd)

    def _hear(self, host: int) -> None:
        """Receive from one link, in the thread of a call."""
        if (listener := self._listening()) is not None:
            self._receive(host, listener)

    def _receive(self, host: int, listener: Listener) -> None:
        """Receive from one link."""
        with self._receiving:
            self._receive_alone(host, listener)

    def _receive_alone(self, host: int, listener: Listener) -> None:
        if (connection := self._connections.get(host)) is None:
            return
        try:
            # Receive first: if nothing can be sent any more, a message may explain why.
            while (encoded := self._next(connection)) is not None:
                self._accept(host, Message.decode(encoded), listener)
            with self._lock:
                connection.flush()
        except (OSError, AuthenticationError, ValueError) as error:
            with self._lock:
                self._connections.pop(host).close()
            if host not in self._leaving and not self._is_stopping:
                listener.lose(host, getattr(error, "strerror", None) or str(error))

    def _next(self, connection: SealedConnection) -> bytes | None:
        with self._lock:
            return connection.receive()

    def _accept(self, host: int, message: Message, listener: Listener) -> None:
        facts = message.facts
        if message.kind == Kind.PART:
            with self._lock:
                place = int(facts["call"]), int(facts["round"]), int(facts["step"])
                self._parts[place] = message.data
        elif message.kind == Kind.LEAVING:
            self._leaving.add(host)
        elif message.kind == Kind.CALLS:
            with self._lock:
                self._hand_on(message)
            listener.hear(message)
        else:
            key = int(facts["from"]), int(facts["n"])
            if key in self._heard:
                return
            self._heard.add(key)
            with self._lock:
                self._spread(message, but=host)
            if message.kind not in (Kind.LOOK, Kind.SEEN):
                listener.hear(message)
            elif (observers := self._observers) is not None:
                observers.hear(message)
                if threading.current_thread() is not self._thread:
                    self.ring()

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> bool:
        """Report that this leader leaves, release everything; return whether the thread ended."""
        with self._lock:
            self._spread(Message(Kind.LEAVING, {}), but=-1)
        stop = time.monotonic() + _LEAVING_S
        while time.monotonic() < stop and self._is_sending():
            self.wait(lambda: not self._is_sending(), _SLICE_S)
        self._is_stopping = True
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # garbage collected in there
            self.drop()
            return True
        self.ring()
        thread.join(_LEAVING_S)  # it closes the sockets when it ends
        return not thread.is_alive()

    def _is_sending(self) -> bool:
        with self._lock:
            return any(end.is_sending for end in self._connections.values())

    def drop(self) -> None:
        """Close the sockets without a message."""
        self._is_stopping = True
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        observers, self._observers = self._observers, None
        if observers is not None:
            observers.close()


def _nobody() -> None:
    return None


def _after_fork() -> None:
    # A child that outlives its parent would keep the links open, and other hosts would not notice
    # the parent's end.
    for links in list(_all):
        links.drop()


os.register_at_fork(after_in_child=_after_fork)
