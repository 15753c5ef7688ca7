"""Thousands of strangers at the ports of ranks that meet: they meet, and keep little."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time

import pytest
from tests.certificates import Authority
from tests.group.world.test_joining import free_point, listening_ports, meet
from tests.waiting import until

from gpucoll.transport.tcp.handshake import MAGIC

COUNT = 10_000
MOST_OPEN = 1_000
"""That the strangers themselves keep open, the oldest of which make room."""
SLOW_BYTES = MAGIC + bytes(20)
"""How a rank might begin, sent a byte at a time."""
KEPT = 64
"""Connections of who is not known, kept by whoever listens."""
MOST_RISE_BYTES = 64 << 20
TLS_GREETING = b"\x16\x03\x01\x02\x00"
LIMIT_S = 120.0


class Flood:
    """Opens connections to ports, one after the other, as fast as it can, until it is left.

    Parameters
    ----------
    ports : callable
        Returns where ranks listen now.
    """

    def __init__(self, ports):
        self._ports = ports
        self._thread = threading.Thread(target=self._run)
        self.n_opened = 0
        self.is_stopping = False

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.is_stopping = True
        self._thread.join()

    def _run(self):
        kept: list[tuple[socket.socket, int]] = []
        ports: list[int] = []
        try:
            while not self.is_stopping:
                if self.n_opened % 100 == 0 or not ports:
                    ports = sorted(self._ports())
                for port in ports:
                    self._open(port, kept)
                self._go_on(kept)
                while len(kept) > MOST_OPEN:
                    kept.pop(0)[0].close()
        finally:
            for end, _ in kept:
                end.close()

    def _open(self, port, kept):
        end = socket.socket()
        end.setblocking(False)
        end.connect_ex(("127.0.0.1", port))
        kind = self.n_opened % 5
        self.n_opened += 1
        with contextlib.suppress(OSError):
            if kind == 1:
                end.send(os.urandom(500))
            elif kind == 2:
                end.send(TLS_GREETING)
            elif kind == 3:
                end.shutdown(socket.SHUT_WR)
        if kind == 4:
            end.close()
        else:
            kept.append((end, kind))

    def _go_on(self, kept):
        """Have some that are slow send one byte more."""
        for number, (end, kind) in enumerate(kept[-20:]):
            if kind == 0:
                with contextlib.suppress(OSError):
                    end.send(SLOW_BYTES[number % len(SLOW_BYTES) :][:1])


class Held:
    """The most that processes hold, as often as it is looked at."""

    def __init__(self, pids):
        self._pids = pids
        self.begin = self._now()
        self.most = dict(self.begin)

    def _now(self):
        found = {}
        for pid in self._pids:
            with open(f"/proc/{pid}/status") as status:
                (kib,) = map(int, re.findall(r"VmRSS:\s*(\d+)", status.read()))
            found[pid] = (len(os.listdir(f"/proc/{pid}/fd")), 1024 * kib)
        return found

    def look(self):
        for pid, (n_fds, n_bytes) in self._now().items():
            most_fds, most_bytes = self.most[pid]
            self.most[pid] = max(most_fds, n_fds), max(most_bytes, n_bytes)

    def rises(self):
        """Return how many more descriptors and bytes than at the beginning, at most."""
        pairs = [(self.most[pid], self.begin[pid]) for pid in self._pids]
        return [max(most[place] - begin[place] for most, begin in pairs) for place in range(2)]


@pytest.fixture(scope="module", params=["plain", "TLS"])
def environment(request, tmp_path_factory):
    if request.param == "plain":
        return {}
    return Authority(tmp_path_factory.mktemp("certificates") / "ca").environment()


def test_ten_thousand_while_ranks_meet(hosts, rank_server, environment, record_property):
    """The last rank comes when all of them have come; some still come while leaders connect."""
    placed, point = "abc", free_point()
    last = len(placed) - 1
    options = {"gives": "seat", "meet": point, "environment": environment}
    with rank_server.fork(len(placed)) as pool:
        pids = [rank.pid for rank in pool.ranks]
        held = Held(pids)
        hosts.start(pool, placed, meet, LIMIT_S, only=range(last), **options)
        until(lambda: listening_ports(pids[:1]))
        start = time.monotonic()
        with Flood(lambda: listening_ports(pids)) as flood:
            while flood.n_opened < COUNT:
                assert time.monotonic() - start < LIMIT_S
                held.look()
                time.sleep(0.01)  # so often is often enough
            begin = time.monotonic()
            hosts.start(pool, placed, meet, LIMIT_S, only=[last], **options)
            replies = pool.results(LIMIT_S)
            met_s = time.monotonic() - begin
            held.look()

    assert replies == [len(placed)] * len(placed)
    n_fds, n_bytes = held.rises()
    record_property("opened", flood.n_opened)
    print(
        f"{flood.n_opened} strangers; after {COUNT} of them the last rank came, and met in "
        f"{met_s:.2f} s; at most {n_fds} descriptors and {n_bytes >> 20} MiB more in a rank"
    )
    assert n_fds <= 2 * KEPT + 32, n_fds
    assert n_bytes <= MOST_RISE_BYTES, n_bytes
