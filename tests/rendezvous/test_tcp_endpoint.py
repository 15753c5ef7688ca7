"""Connecting to rank 0's port: nobody there, and a host that answers nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import time

import pytest

from gpucoll.errors import RendezvousError
from gpucoll.rendezvous import tcp
from gpucoll.rendezvous.meeting_points import HandedPoint
from gpucoll.rendezvous.tcp import TcpEndpoint
from gpucoll.transport.tcp.credentials import Credentials

SECRET = b"0123456789abcdef"


@pytest.fixture
def silent_address():
    """An address whose kernel drops what asks to connect: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(64):
            end = stack.enter_context(socket.socket())
            end.setblocking(False)
            end.connect_ex(listener.getsockname())
            poll = select.poll()
            poll.register(end, select.POLLOUT)
            if not poll.poll(50):
                break
        else:
            pytest.skip("this kernel's queue of connections does not fill")
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_no_answer_is_asked_for_in_short_steps(silent_address, monkeypatch):
    endpoint = TcpEndpoint(
        HandedPoint(silent_address, Credentials(SECRET, None)), SECRET, "a", "rank 1 of 2"
    )
    start = time.monotonic()
    for _ in range(3):
        assert endpoint.connect(100, 0) is None
    assert time.monotonic() - start < 0.5  # Ctrl-C is looked for in between

    assert endpoint._connecting is not None
    monkeypatch.setattr(tcp, "_CONNECTING_S", 0.0)
    assert endpoint.connect(100, 0) is None
    assert "does a firewall drop packets" in endpoint.trouble()
    endpoint.connect(100, 0)
    endpoint.close()
    assert endpoint._connecting is None


@pytest.mark.parametrize("host", ["fe80::1%lo", "fe80::1"])
def test_a_link_local_address(host):
    with pytest.raises(RendezvousError, match=r"link-local address of IPv6.*such as fd00::1"):
        tcp.listen_at(host, 0, "rank 0 of 2 cannot listen")


def test_nobody_there():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        endpoint = TcpEndpoint(
            HandedPoint(address, Credentials(SECRET, None)), SECRET, "a", "rank 1 of 2"
        )
        assert endpoint.connect(100, 0) is None
    assert "nobody listens there" in endpoint.trouble()
    endpoint.close()
