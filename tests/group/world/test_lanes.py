"""Several connections for large arrays between two hosts, from several interfaces; and IPv6."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tests.group.world.test_namespaces import enter, ip

from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import ArgumentError

LARGE = 600_001
"""Elements: no multiple of lanes, hosts or ranks, and more than goes over one lane."""


@pytest.fixture
def hosts(hosts_with_schedules):
    """Hosts between which all but small calls go by schedules."""
    return hosts_with_schedules


def every_movement(comm):
    """Return whether large calls give what they should."""
    rank, size = comm.rank, comm.world_size
    x = np.arange(LARGE, dtype=np.float32) % 1000 + rank
    total = size * (np.arange(LARGE) % 1000) + sum(range(size))
    blocks = np.repeat(np.arange(size, dtype=np.int32) + 10 * rank, LARGE)
    return [
        bool((comm.all_reduce(x) == total).all()),
        bool((comm.broadcast(x.copy(), root=1) == np.arange(LARGE) % 1000 + 1).all()),
        bool((comm.all_gather(x)[7::LARGE] == 7 + np.arange(size)).all()),
        bool((comm.all_to_all(blocks)[::LARGE] == 10 * np.arange(size) + rank).all()),
        bool((comm.reduce_scatter(blocks)[::LARGE] == size * rank + 10 * sum(range(size))).all()),
    ]


def places(comm):
    """Return this end's address and the other's, of each connection for large arrays."""
    bulk = comm._group.bulk
    if bulk is None:
        return []
    ends = [(end.getsockname()[0], end.getpeername()[0]) for end in bulk._ends.sockets.values()]
    return sorted(ends)


def move(comm):
    if comm._group.bulk is not None and len(comm._group.bulk._lanes) > 1:
        assert " to each host, from " in comm.describe().facts["links"]
    return every_movement(comm), places(comm)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aabb", "abca"])
def test_several_sockets(hosts, placed):
    replies = hosts.call(placed, move, environment={config.SOCKETS: "3"})

    for right, ends in replies:
        assert all(right)
        assert len(ends) in (0, 3 * (len(set(placed)) - 1))


def test_several_interfaces(hosts):
    several = {config.INTERFACES: "127.0.0.2,127.0.0.3", config.SOCKETS: "2"}

    for right, ends in hosts.call("abb", move, environment=several):
        assert all(right)
        assert ends in ([], [("127.0.0.2", "127.0.0.2")] * 2 + [("127.0.0.3", "127.0.0.3")] * 2)


def move_with_as_many_as_its_rank(seat):
    with environment({config.SOCKETS: str(2 + seat.rank)}), seat.init() as comm:
        return move(comm)


def test_hosts_that_differ_use_the_least(hosts):
    for right, ends in hosts.call("abc", move_with_as_many_as_its_rank, gives="seat"):
        assert all(right)
        assert len(ends) == 2 * 2


@pytest.mark.parametrize("interfaces", ["::1", "::1,::1"])
@pytest.mark.parametrize("sockets", ["1", "2"])
def test_large_arrays_over_ipv6(hosts, interfaces, sockets):
    given = {config.INTERFACES: interfaces, config.SOCKETS: sockets}

    for right, ends in hosts.call("aab", move, environment=given):
        assert all(right)
        assert ends in ([], [("::1", "::1")] * int(sockets))


@pytest.mark.parametrize("word", ["0", "-1", "17", "two", "1.5", ""])
def test_numbers_of_sockets_that_cannot_be(word):
    with (
        environment({config.SOCKETS: word}),
        pytest.raises(ArgumentError, match="GPUCOLL_SOCKETS must be a whole number, 1 to 16"),
    ):
        config.sockets()


# --- two interfaces, each with a limit ------------------------------------------------------------

MBIT_PER_S = 200
"""A small part of what the cores move: what a call takes are the links, beside other work, too."""


@pytest.fixture(scope="module")
def twins():
    """Two network namespaces with two links between them, each limited to MBIT_PER_S."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc")):
        pytest.skip("network namespaces need root and iproute2's ip and tc")
    word = f"gcl{os.getpid() % 100_000}"
    names = [f"{word}a", f"{word}b"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for card in range(2):
            ends = f"type veth peer name eth{card} netns {names[1]}".split()
            ip("-n", names[0], "link", "add", f"eth{card}", *ends)
            for place, name in enumerate(names):
                address = f"10.9{card}.0.{place + 1}/24"
                ip("-n", name, "addr", "add", address, "dev", f"eth{card}")
                ip("-n", name, "link", "set", f"eth{card}", "up")
                bucket = f"tbf rate {MBIT_PER_S}mbit burst 64kb latency 50ms"
                limit = f"dev eth{card} root {bucket}".split()
                ip("netns", "exec", name, "tc", "qdisc", "add", *limit)
        yield names
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", b"") or b""
        pytest.skip(f"no network namespaces can be made here: {output.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


CALLS = 4


def sent_bytes():
    """Return what each card of this thread's network namespace has sent."""
    lines = [line.split() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[9]) for line in lines if line[0].startswith("eth")}


def timed(seat, names, count):
    enter(names[seat.rank])
    with seat.init() as comm:
        right = every_movement(comm)
        x, times, before = np.ones(count, np.float32), [], sent_bytes()
        for _ in range(CALLS):
            start = time.perf_counter()
            comm.all_reduce(x, out=x)
            times.append(time.perf_counter() - start)
        comm.barrier()
        after = sent_bytes()
        sent = {card: (after[card] - before[card]) / CALLS for card in after}
        return right, places(comm), min(times), sent


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("interfaces", ["eth0", "eth0,eth1", "eth1,eth0"])
def test_large_arrays_use_all_interfaces(hosts, rank_server, twins, interfaces):
    given = {config.HOST_ID: "", config.INTERFACES: interfaces}
    count = 1 << 20
    with rank_server.fork(2) as pool:
        hosts.start(pool, "ab", timed, twins, count, gives="seat", environment=given)
        replies = pool.results()

    used = interfaces.split(",")
    for rank, (right, ends, seconds, sent) in enumerate(replies):
        assert all(right)
        subnets = [f"10.9{name[-1]}.0" for name in sorted(used)]
        assert ends == [(f"{net}.{rank + 1}", f"{net}.{2 - rank}") for net in subnets]
        of_one_card = 4 * count * 8 / seconds / (MBIT_PER_S * 1e6)  # above 1: both at once
        assert of_one_card < 1.1 if len(used) == 1 else of_one_card > 1.2
        # Two ranks send each other as many bytes as the array has: half of it summed already.
        # Packets' headers, and what is sent again, come on top; what is small takes one card.
        share = 4 * count / len(used)
        for card, n_bytes in sent.items():
            assert n_bytes > 0.95 * share if card in used else n_bytes < 0.01 * share, sent
