"""What bulk connections are set to."""

from __future__ import annotations

import socket

import pytest

from gpucoll import config
from gpucoll.transport.tcp.socket_options import tune_socket

TCP = socket.IPPROTO_TCP


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("timeout_s", [None, 0.25, 60.0, config.LONGEST_TIMEOUT_S])
def test_options(family, timeout_s):
    with socket.socket(family) as one:
        before = [
            one.getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_SNDBUF, socket.SO_RCVBUF)
        ]
        tune_socket(one) if timeout_s is None else tune_socket(one, timeout_s)
        after = [one.getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_SNDBUF, socket.SO_RCVBUF)]

        assert before == after
        assert one.getsockopt(TCP, socket.TCP_NODELAY)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        milliseconds = one.getsockopt(TCP, socket.TCP_USER_TIMEOUT)
        assert milliseconds == 1000 * (5.0 if timeout_s is None else timeout_s)
        idle_s = one.getsockopt(TCP, socket.TCP_KEEPIDLE)
        interval_s = one.getsockopt(TCP, socket.TCP_KEEPINTVL)
        probes = one.getsockopt(TCP, socket.TCP_KEEPCNT)
        assert idle_s + probes * interval_s <= max(5.0, milliseconds / 1000)


def test_congestion_control_where_there_is_cubic():
    with socket.socket() as one:
        try:
            one.setsockopt(TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            pytest.skip("no cubic here")
    with socket.socket() as one:
        tune_socket(one)
        assert one.getsockopt(TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"cubic"


def test_a_kernel_without_cubic(monkeypatch):
    monkeypatch.setattr("gpucoll.transport.tcp.socket_options._CONGESTION_CONTROL", b"nosuch")
    with socket.socket() as one:
        tune_socket(one)
        assert one.getsockopt(TCP, socket.TCP_NODELAY)


def test_what_is_accepted_inherits_them():
    with socket.socket() as listener, socket.socket() as client:
        tune_socket(listener, 3.0)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client.connect(listener.getsockname())
        with listener.accept()[0] as accepted:
            assert accepted.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 3000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
