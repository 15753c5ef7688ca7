"""A leader's links to other hosts: what goes over them, and the thread that listens.

The thread takes what comes, passes on what concerns everybody, and watches the links and the ranks
of this host, whatever the program is doing. It sleeps while nothing happens. While exchanges follow
each other closely, who makes them takes what comes by itself, and is not woken by another thread.
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
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.transport.tcp.connection import SealedConnection

LINKS_THREAD: Final = "gpucoll-links"
"""The thread's name."""
_SLICE_S = 0.02
_YIELDS = 50
"""So often who exchanges looks whether something came before it sleeps: 8 bytes between two hosts
take 120 us, 350 if it sleeps at once (best of 200, loopback on 2 cores, 2026-11-22)."""
_LEAVING_S = 5.0
"""How long a leader that closes waits until what it has said is on its way."""
_all: weakref.WeakSet[Links] = weakref.WeakSet()


class Listener(Protocol):
    """What is told of what comes; called from the thread, and must not wait."""

    def hear(self, message: Message) -> None:
        """Take a message that concerns everybody."""

    def lose(self, host: int, reason: str) -> None:
        """Take that a host's link has ended without a word."""

    def look(self) -> None:
        """Look what this host's ranks have done: the bell was rung."""

    def go_deaf(self, error: Exception) -> None:
        """Take that the thread ends by a fault, and nothing will be told any more."""

    def miss(self, fd: int) -> None:
        """Take that the process has ended of which this descriptor tells."""


class Links:
    """The links of one leader.

    Parameters
    ----------
    host, count : int
        Which of how many hosts this is.
    connections : mapping of int to SealedConnection
        To each of its `neighbours`; they belong to this from here on.
    bell_fd : int
        An eventfd of this host's ranks; stays the caller's.
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
        self._parts: dict[tuple[int, int, int], bytes] = {}
        self._receiving = threading.Lock()
        """Held by whoever takes what has come over a link: one after the other."""
        self._is_taken_by_caller = False
        self._is_exchanging = False
        self._n_exchanges = 0
        self._lock = threading.RLock()  # not the condition: an interrupt can leave that locked
        self._changed = threading.Condition(self._lock)
        """Guards the connections and what has come; told of everything."""
        self._heard: set[tuple[int, int]] = set()
        self._n_told = 0
        self._rest_until_s = 0.0
        self._leaving: set[int] = set()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        _all.add(self)

    def serve(self, listener: Listener, life_fds: Sequence[int]) -> None:
        """Start the thread; `life_fds` tell of the ends of the other ranks' processes here."""
        self._listening = weakref.ref(listener)  # or it could never be collected
        self._life_fds = {fd for fd in life_fds if fd >= 0}
        self._thread = threading.Thread(target=self._run, name=LINKS_THREAD, daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Return between which addresses the links are."""
        found = [f"host {host} at {end.peer}" for host, end in sorted(self._connections.items())]
        return ", ".join(found) or "none any more"

    # --- saying -----------------------------------------------------------------------------------

    def tell_all(self, kind: Kind, facts: Mapping[str, Any]) -> None:
        """Tell every host; nothing of it is waited for."""
        with held_signals(), self._lock:
            self._n_told += 1
            message = Message(kind, {**facts, "from": self.host, "n": self._n_told})
            self._heard.add((self.host, self._n_told))
            self._spread(message, but=-1)

    def tell_each(self, kind: Kind, facts: Mapping[str, Any], data: bytes) -> None:
        """Tell every host, each of them once: what is told often, and may take log2(hosts) steps.

        What one host tells reaches every other one in the order in which it was told.
        """
        with held_signals(), self._lock:
            self._hand_on(Message(kind, {**facts, "from": self.host}, data))

    def _hand_on(self, message: Message) -> None:
        encoded = message.encode()
        for host in further_hosts(int(message.facts["from"]), self.host, self.count):
            self._send(host, encoded)

    def rest(self, pause_s: float) -> None:
        """Let the bell wait for a while: what happens on this host meanwhile is told together."""
        self._rest_until_s = time.monotonic() + pause_s

    def _spread(self, message: Message, but: int) -> None:
        encoded = message.encode()
        for host in list(self._connections):
            if host != but:
                self._send(host, encoded)

    def _send(self, host: int, encoded: bytes) -> None:
        connection = self._connections.get(host)
        if connection is None:
            return
        with contextlib.suppress(OSError, AuthenticationError):  # the thread meets it, too
            connection.send(encoded)
        if connection.is_sending and threading.current_thread() is not self._thread:
            self.ring()  # the thread sends the rest

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # it has not heard the last time
            os.eventfd_write(self._bell_fd, 1)

    # --- exchanging -------------------------------------------------------------------------------

    def exchange(
        self, number: tuple[int, int], data: bytes, look: Callable[[], None]
    ) -> list[bytes]:
        """Give every leader's bytes to every leader; return them by host.

        Cost: ``log2(count)`` steps (Bruck et al. 1997); what there is goes once to each host.

        Parameters
        ----------
        number : (int, int)
            Of the call, and of the exchange in it: the same on all hosts.
        data : bytes
            This host's.
        look : callable
            Called while waiting, again and again; raises where nothing can come of it.
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
        # Here are this host's, then those of the hosts before it, backwards.
        return [held[(self.host - host) % self.count] for host in range(self.count)]

    def _await(self, key: tuple[int, int, int], source: int, look: Callable[[], None]) -> bytes:
        """Return what a host sends as this part of an exchange."""
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
        """Wait a moment for the links, and take what has come."""
        poll = select.poll()
        with self._lock:
            hosts = self._register_links(poll, select.POLLIN)
        for fd, _ in poll.poll(1000 * _SLICE_S):
            self._hear(hosts[fd])

    def _register_links(self, poll: select.poll, wanted: int) -> dict[int, int]:
        """Poll for what is wanted of the links, and for who can be sent more; return who is who."""
        by_fd = {}
        for host, end in self._connections.items():
            events = wanted | (select.POLLOUT if end.is_sending else 0)
            if events:
                poll.register(end, events)
                by_fd[end.fileno()] = host
        return by_fd

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until what comes has made something true, or for so long; return whether."""
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
            for host in list(self._connections):  # with the greeting more may have come
                self._take(-1, host)
            while not self._is_stopping:
                self._turn()
        except Exception as error:  # a fault of ours: nobody would be told anything any more
            if not self._is_stopping and (listener := self._listening()) is not None:
                listener.go_deaf(error)
                raise
        finally:
            self.drop()

    def _turn(self) -> None:
        """Sleep until something happens, and take it."""
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
        for fd, _ in poll.poll(1000 * min(limits_s) if limits_s else None):
            self._take(fd, by_fd.get(fd))
        if not self._is_exchanging and self._n_exchanges == n_exchanges:
            self._is_taken_by_caller = False
        with self._lock:
            self._changed.notify_all()

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
        """Take what has come over one link, in the thread of a call."""
        if (listener := self._listening()) is not None:
            self._receive(host, listener)

    def _receive(self, host: int, listener: Listener) -> None:
        """Take what has come over one link."""
        with self._receiving:
            self._receive_alone(host, listener)

    def _receive_alone(self, host: int, listener: Listener) -> None:
        if (connection := self._connections.get(host)) is None:
            return
        try:
            # First what has come: where nothing can be sent any more, that may say why.
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
            listener.hear(message)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> bool:
        """Say that this leader leaves, and let go of everything; return whether the thread has."""
        with self._lock:
            self._spread(Message(Kind.LEAVING, {}), but=-1)
        stop = time.monotonic() + _LEAVING_S
        while time.monotonic() < stop and self._is_sending():
            self.wait(lambda: not self._is_sending(), _SLICE_S)
        self._is_stopping = True
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # a collection in there
            self.drop()
            return True
        self.ring()
        thread.join(_LEAVING_S)  # and it lets go of the sockets
        return not thread.is_alive()

    def _is_sending(self) -> bool:
        with self._lock:
            return any(end.is_sending for end in self._connections.values())

    def drop(self) -> None:
        """Close the sockets, and say nothing."""
        self._is_stopping = True
        for connection in self._connections.values():
            connection.close()
        self._connections = {}


def _nobody() -> None:
    return None


def _after_fork() -> None:
    # A child that outlives its parent would keep the links open, and nobody would miss the parent.
    for links in list(_all):
        links.drop()


os.register_at_fork(after_in_child=_after_fork)
