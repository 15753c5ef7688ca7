"""What is under way on a process's TCP connections."""

from __future__ import annotations

import os
import socket

import pytest
from tests.waiting import until

from gpucoll.observe.sockets import Traffic, _host, traffic_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_data_that_moves_changes_the_queues(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} cannot be used here")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as end, listener.accept()[0]:
            before = traffic_of([os.getpid()])[os.getpid()]
            assert before == traffic_of([os.getpid()])[os.getpid()]
            end.send(b"x" * 1000)
            until(lambda: traffic_of([os.getpid()])[os.getpid()].queues != before.queues)
    assert before.unacknowledged == ()


def test_a_process_that_is_gone_has_none():
    assert traffic_of([1 << 22]) == {1 << 22: Traffic()}


def test_addresses():
    assert _host("0100007F:1F90") == "127.0.0.1"
    assert _host("00000000000000000000000001000000:1F90") == "::1"
