"""Plain sockets that lead through TLS: what goes in at one end comes out at the other."""

from __future__ import annotations

import os
import random
import select
import socket
import threading

import pytest
from tests.transport.tcp.test_secure_streams import contexts  # noqa: F401, a fixture

from gpucoll.transport.tcp.tls_relay import TlsRelay

LIMIT_S = 20


def secured(contexts):  # noqa: F811
    """Return both ends of a TCP connection on which TLS has begun."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        server, _ = listener.accept()
    server.settimeout(LIMIT_S)
    made = {}

    def serve():
        made["server"] = contexts[0].wrap_socket(server, server_side=True)

    thread = threading.Thread(target=serve)
    thread.start()
    made["client"] = contexts[1].wrap_socket(client)
    thread.join(LIMIT_S)
    for end in made.values():
        end.setblocking(False)
    return made["client"], made["server"]


class Ends:
    """Two plain sockets with TLS between them."""

    def __init__(self, contexts):  # noqa: F811
        self.relays = TlsRelay(), TlsRelay()
        self.raw = secured(contexts)
        self.plain = [
            relay.put_behind(end) for relay, end in zip(self.relays, self.raw, strict=True)
        ]
        for end in self.plain:
            end.settimeout(LIMIT_S)

    def close(self):
        for end in self.plain:
            end.close()
        for relay in self.relays:
            relay.close()


@pytest.fixture
def ends(contexts):  # noqa: F811
    made = Ends(contexts)
    yield made
    made.close()


def receive_all(end):
    """Return what comes until the end."""
    found = bytearray()
    while data := end.recv(1 << 20):
        found += data
    return bytes(found)


def test_both_ways_at_once(ends):
    draw = random.Random(14)
    sent = [draw.randbytes(5_000_003), draw.randbytes(3_000_001)]
    came = [b"", b""]

    def send(place):
        at = 0
        while at < len(sent[place]):
            size = draw.choice([1, 7, 5000, 400_000])
            ends.plain[place].sendall(sent[place][at : at + size])
            at += size
        ends.plain[place].shutdown(socket.SHUT_WR)

    def receive(place):
        came[place] = receive_all(ends.plain[place])

    threads = [
        threading.Thread(target=step, args=(place,)) for step in (send, receive) for place in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert came == [sent[1], sent[0]]


def test_one_way_may_end_before_the_other(ends):
    one, other = ends.plain
    one.shutdown(socket.SHUT_WR)
    assert other.recv(10) == b""
    other.sendall(b"still here")
    assert one.recv(100) == b"still here"


def test_what_was_sent_before_the_end_comes(ends):
    ends.plain[0].settimeout(None)
    data = bytes(1_000_000)
    sender = threading.Thread(target=ends.plain[0].sendall, args=(data,))
    sender.start()
    found = bytearray()
    while len(found) < len(data):
        found += ends.plain[1].recv(1 << 20)
    sender.join(LIMIT_S)
    ends.plain[0].sendall(b"the last")
    ends.plain[0].close()
    ends.relays[0].close()

    assert receive_all(ends.plain[1]) == b"the last"


def test_a_connection_that_is_cut_is_the_end(ends):
    # Through another descriptor: SSLSocket.shutdown makes it a plain socket first, which the relay
    # may meet.
    with socket.socket(fileno=os.dup(ends.raw[1].fileno())) as below:
        below.shutdown(socket.SHUT_RDWR)
    assert ends.plain[0].recv(10) == b""


def test_what_is_not_taken_waits(ends):
    """The sender is held up, as by a plain connection, and memory does not grow with what waits."""
    one, other = ends.plain
    one.setblocking(False)
    n_sent = 0
    while may_send(one) and n_sent < 1 << 30:
        n_sent += one.send(bytes(1 << 16))
    assert n_sent < 64 << 20
    n_came = 0
    while n_came < n_sent:
        n_came += len(other.recv(1 << 20))
    assert n_came == n_sent


def may_send(end):
    """Wait until an end takes more, for half a second at most; return whether it does."""
    poll = select.poll()
    poll.register(end, select.POLLOUT)
    return bool(poll.poll(500))


def test_threads_end(contexts):  # noqa: F811
    before = threading.active_count()
    made = Ends(contexts)
    made.close()
    assert threading.active_count() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        made.raw[0].send(b"x")
