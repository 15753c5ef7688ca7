"""Hosts that are network namespaces on a bridge: one is cut off. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.certificates import Authority
from tests.hosts import SECRET
from tests.waiting import is_broken, until

from gpucoll import config
from gpucoll.errors import PeerLostError, RendezvousError

USER_TIMEOUT_S = 5.0
ENVIRONMENT = {config.HOST_ID: "", config.INTERFACES: "eth0"}
CLONE_NEWNET = 0x40000000
ALL_PROTOCOLS, SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 3, 263, 6, 33


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Namespaces:
    """So many network namespaces on one bridge; each has an eth0."""

    def __init__(self, count):
        word = f"{os.getpid() % 100_000}"
        self.bridge = f"gct{word}"
        self.names = [f"gct{word}h{place}" for place in range(count)]
        self.ends = [f"gct{word}v{place}" for place in range(count)]

    def make(self):
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for place, (name, end) in enumerate(zip(self.names, self.ends, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", end, "master", self.bridge)
            ip("link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{place + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            with contextlib.suppress(subprocess.SubprocessError):  # a kernel without IPv6
                ip("-n", name, "addr", "add", f"fd78::{place + 1}/64", "dev", "eth0", "nodad")

    def cut_off(self, place):
        ip("-n", self.names[place], "link", "set", "eth0", "down")

    def restore(self, place):
        ip("-n", self.names[place], "link", "set", "eth0", "up")

    def remove(self):
        for kind, names in (("netns", self.names), ("link", [*self.ends, self.bridge])):
            for name in names:
                with contextlib.suppress(subprocess.SubprocessError):
                    ip(kind, "del", name)


def made_namespaces():
    """Yield three of them, for a fixture."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2's ip")
    made = Namespaces(3)
    try:
        made.make()
    except subprocess.SubprocessError as error:
        made.remove()
        output = getattr(error, "stderr", b"") or b""
        pytest.skip(f"no network namespaces can be made here: {output.decode().strip()}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def namespaces():
    yield from made_namespaces()


def enter(name):
    """Have this process's main thread, and what it starts, use a namespace's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def on_namespaces(seat, names, function, *args):
    enter(names[ord(seat.meeting.placed[seat.rank]) - ord("a")])
    with seat.init() as comm:
        return function(comm, *args)


def work(comm):
    totals = [int(comm.all_reduce(np.arange(100_000))[1]) for _ in range(5)]
    with comm.split(comm.rank % 2) as part:
        totals.append(part.all_reduce(1))
    return totals, dict(comm.describe().facts)["hosts"]


def test_ranks_in_namespaces_are_on_hosts_of_their_own(hosts, rank_server, namespaces):
    with rank_server.fork(5) as pool:
        hosts.start(
            pool,
            "aabbc",
            on_namespaces,
            namespaces.names,
            work,
            gives="seat",
            environment=ENVIRONMENT,
        )
        replies = pool.results()

    for rank, (totals, placed) in enumerate(replies):
        assert totals == [5] * 5 + [2 if rank % 2 else 3]
        assert "ranks 0, 1" in placed
        assert "ranks 2, 3" in placed
        assert "10.78.0.3: rank 4" in placed


def meet_in(seat, names):
    enter(names[seat.rank])
    with pytest.raises(RendezvousError) as caught:
        seat.init(meet_s=5.0)
    return str(caught.value)


def test_one_host_id_on_several_hosts(hosts, rank_server, namespaces):
    """As where a file with the variable is copied from one machine to another."""
    with rank_server.fork(3) as pool:
        hosts.start(
            pool,
            "aaa",
            meet_in,
            namespaces.names,
            gives="seat",
            environment={config.HOST_ID: "node1", config.INTERFACES: "eth0"},
        )
        replies = pool.results()

    for text in replies:
        assert "report the same host, 'node1'" in text
        assert "rank 0 (on " in text
        assert "rank 1 (on " in text
        assert f"give {config.HOST_ID} another value on each host, or unset it" in text


# --- what is on the network -----------------------------------------------------------------------

MARK = b"\x5aA payload that nobody else would send.\xa5"


class Capture:
    """All packets of an interface, by a raw socket, while in the block."""

    def __init__(self, interface):
        self._end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        self._end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._end.bind((interface, 0))
        self._stop = os.eventfd(0)
        self._packets = []
        self._thread = threading.Thread(target=self._take)

    def _take(self):
        poll = select.poll()
        for fd in (self._end.fileno(), self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._end.fileno() in ready:
                self._packets.append(self._end.recv(1 << 17))
            elif ready:
                return

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        counts = self._end.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._end.close()
        os.close(self._stop)
        _, n_dropped = struct.unpack("II", counts)
        assert n_dropped == 0, "packets were not captured"

    def holds(self, data):
        return any(data in packet for packet in self._packets)


def send_marks(comm):
    """Send the mark as an array that rides with a call, as a large one, and as objects."""
    marks = np.frombuffer(MARK, np.uint8)
    comm.broadcast(marks.copy(), root=0)
    comm.all_gather(np.tile(marks, 30_000))
    comm.all_reduce(
        np.tile(marks, 3_000) if comm.rank == 0 else np.zeros(3_000 * len(MARK), np.uint8)
    )
    comm.broadcast_object({"text": MARK}, root=0)
    comm.all_gather_object([MARK] * 5_000)
    with comm.split(0) as part:
        part.broadcast_object(MARK, root=1)
    for count in (1, 30_000):
        work = comm.send(np.tile(marks, count), (comm.rank + 1) % 3, async_op=True)
        comm.recv(source=(comm.rank - 1) % 3)
        work.wait()
    return dict(comm.describe().facts)["links"]


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_a_capture_holds(hosts, rank_server, namespaces, tmp_path, is_encrypted):
    """Without TLS the payload, which shows that it captures; with it nothing; never the secret."""
    certificates = Authority(tmp_path / "ca").environment() if is_encrypted else {}
    key = Path(certificates.get(config.TLS_KEY, os.devnull)).read_bytes()
    with rank_server.fork(3) as pool, Capture(namespaces.ends[0]) as capture:
        hosts.start(
            pool,
            "abc",
            on_namespaces,
            namespaces.names,
            send_marks,
            gives="seat",
            meet="tcp://10.78.0.1:29500",
            environment={**ENVIRONMENT, **certificates},
        )
        links = pool.results()[0]

    assert ("encrypted by TLS 1.3" in links) == is_encrypted
    secret = SECRET.encode()
    assert capture.holds(b"gpucoll\0") != is_encrypted
    assert capture.holds(MARK) != is_encrypted
    assert not capture.holds(secret)
    assert not capture.holds(secret[:12])
    assert not capture.holds(secret.hex().encode())
    assert not any(len(line) > 20 and capture.holds(line) for line in key.splitlines()[1:-1])


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_over_ipv6(hosts, rank_server, namespaces, tmp_path, is_encrypted):
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this kernel has no IPv6")
    certificates = Authority(tmp_path / "ca").environment() if is_encrypted else {}
    with rank_server.fork(3) as pool:
        hosts.start(
            pool,
            "abc",
            on_namespaces,
            namespaces.names,
            work,
            gives="seat",
            meet="tcp://[fd78::1]:29500",
            environment={config.HOST_ID: "", config.INTERFACES: "", **certificates},
        )
        replies = pool.results()

    for totals, placed in replies:
        assert totals[:5] == [3] * 5
        assert "fd78::3: rank 2" in placed, placed


def lose(comm, ready, count):
    """Return when this rank was told of the loss, and how."""
    comm.barrier()
    with open(f"{ready}{comm.rank}", "w"):  # of all: others may be in the barrier still
        pass
    try:
        while count:
            comm.all_reduce(np.ones(count))
        until(lambda: is_broken(comm))
        comm.all_reduce(1)
    except PeerLostError as error:
        return time.monotonic(), str(error)
    return None


@pytest.mark.parametrize("count", [1000, 2_000_000, 0])
@pytest.mark.parametrize("placed", ["abc"])
def test_a_host_that_is_cut_off(hosts, rank_server, namespaces, tmp_path, placed, count):
    ready, cut = tmp_path / "ready", len(placed) - 1
    with rank_server.fork(len(placed)) as pool:
        hosts.start(
            pool,
            placed,
            on_namespaces,
            namespaces.names,
            lose,
            str(ready),
            count,
            gives="seat",
            environment=ENVIRONMENT,
        )
        try:
            until(lambda: all(Path(f"{ready}{rank}").exists() for rank in range(len(placed))))
            start = time.monotonic()
            namespaces.cut_off(cut)
            replies = pool.results()
        finally:
            namespaces.restore(cut)

    for rank, (moment, text) in enumerate(replies):
        assert moment - start < USER_TIMEOUT_S + 1, (rank, text)
        assert rank == cut or f"rank {cut}" in text, text
