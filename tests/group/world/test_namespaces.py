"""Hosts that are network namespaces on a bridge: one is cut off. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tests.faults.test_ends import is_broken, until

from gpucoll import config
from gpucoll.errors import PeerLostError

USER_TIMEOUT_S = 5.0
ENVIRONMENT = {config.HOST_ID: "", config.INTERFACES: "eth0"}
CLONE_NEWNET = 0x40000000


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Namespaces:
    """So many network namespaces on one bridge; each has an eth0."""

    def __init__(self, count):
        word = f"{os.getpid() % 100_000}"
        self.bridge = f"gct{word}"
        self.names = [f"gct{word}h{place}" for place in range(count)]
        self._ends = [f"gct{word}v{place}" for place in range(count)]

    def make(self):
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for place, (name, end) in enumerate(zip(self.names, self._ends, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", end, "master", self.bridge)
            ip("link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{place + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def cut_off(self, place):
        ip("-n", self.names[place], "link", "set", "eth0", "down")

    def restore(self, place):
        ip("-n", self.names[place], "link", "set", "eth0", "up")

    def remove(self):
        for kind, names in (("netns", self.names), ("link", [*self._ends, self.bridge])):
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


def lose(comm, ready, is_calling):
    """Return when this rank was told of the loss, and how."""
    comm.barrier()
    with open(f"{ready}{comm.rank}", "w"):  # of all: others may be in the barrier still
        pass
    try:
        while is_calling:
            comm.all_reduce(np.ones(1000))
        until(lambda: is_broken(comm))
        comm.all_reduce(1)
    except PeerLostError as error:
        return time.monotonic(), str(error)
    return None


@pytest.mark.parametrize("is_calling", [True, False])
@pytest.mark.parametrize("placed", ["abc"])
def test_a_host_that_is_cut_off(hosts, rank_server, namespaces, tmp_path, placed, is_calling):
    ready, cut = tmp_path / "ready", len(placed) - 1
    with rank_server.fork(len(placed)) as pool:
        hosts.start(
            pool,
            placed,
            on_namespaces,
            namespaces.names,
            lose,
            str(ready),
            is_calling,
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
