"""Ranks of several hosts that meet: bad input, ranks that are missing, die or differ; leaks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from tests.faults.test_ends import errors
from tests.hosts import SECRET
from tests.ranks import Ended
from tests.rendezvous.conftest import held_open
from tests.waiting import SOON_S, until

import gpucoll.group.world.joining as world_joining
import gpucoll.rendezvous.host as rendezvous_host
from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    AuthenticationError,
    GpucollError,
    PeerLostError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.rendezvous.host import Host

IN_TIME_S = 18.0
"""Of ranks whose deadline for meeting is 8 s at most: it runs out, and the others are told."""
MISSED_S = 3.0
"""The deadline of ranks that must have met, all but one: long enough for a busy machine."""


def meet(seat, meet_s=8.0, changes=None, **given):
    """Join in; return what an all_reduce gives."""
    mine = environment((changes or {}).get(seat.rank, {}))
    with mine, seat.init(meet_s=meet_s, **given) as comm:
        return comm.all_reduce(1)


def meet_differently(seat, differences, common):
    """Join in with other arguments on some ranks."""
    return meet(seat, **{**common, **differences.get(seat.rank, {})})


def refused(hosts, placed, function, *args, **options):
    """Return every rank's error, which has come in time."""
    start = time.monotonic()
    found = errors(hosts.replies(placed, function, *args, gives="seat", **options))
    assert time.monotonic() - start < IN_TIME_S
    return found


def free_point():
    """Return a port that nobody has: whoever comes to it there, comes a moment from now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


# --- bad input ------------------------------------------------------------------------------------


def test_without_a_secret(hosts):
    """A port is open to anybody; a file hands out a secret to who can read it."""
    environment = {config.SECRET: ""}
    first, *others = refused(hosts, "aab", meet, 1.0, environment=environment, meet=free_point())

    assert isinstance(first, AuthenticationError), first
    assert "rank 0 of 3 must talk to other hosts over TCP, and no secret is set" in str(first)
    for error in others:
        assert isinstance(error, AuthenticationError | RendezvousDeadlineError), error
    assert hosts.call("aab", meet, gives="seat", environment=environment) == [3] * 3


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_another_secret_on_one_rank(hosts, who):
    changes = {who: {config.SECRET: SECRET[::-1]}}

    found = refused(hosts, "aab", meet, 1.0, changes)

    assert all(isinstance(error, GpucollError) for error in found), found
    assert any("secret" in str(error) for error in found), found


def test_a_secret_that_is_too_short(hosts):
    for error in refused(hosts, "ab", meet, environment={config.SECRET: "short"}):
        assert isinstance(error, ArgumentError), error
        assert "at least 16 are needed" in str(error)


def test_one_rank_twice(hosts):
    found = refused(hosts, "abc", meet_differently, {2: {"rank": 1}}, {})

    for error in found:
        assert isinstance(error, RendezvousError), error
        assert "two processes claim to be rank 1" in str(error)


@pytest.mark.soak
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank(hosts, missing, rank_server):
    there = [rank for rank in range(3) if rank != missing]
    with rank_server.fork(3) as pool:
        start = time.monotonic()
        hosts.start(pool, "aab", meet, MISSED_S, gives="seat", only=there)
        found = errors(pool.collect(only=there))

    assert time.monotonic() - start < IN_TIME_S
    for error in found:
        assert isinstance(error, RendezvousDeadlineError), error
        assert f"rank {missing}" in str(error), error


@pytest.mark.parametrize("who", [1, 2, 3])
def test_a_host_id_that_was_copied(hosts, who):
    """A rank is on another machine, or in another network namespace, than it says."""

    def be_elsewhere(seat):
        with pytest.MonkeyPatch.context() as patch:
            if seat.rank == who:
                patch.setattr(world_joining, "network_id", lambda: "another kernel")
            return meet(seat)

    other = {1: 0, 2: 0, 3: 2}[who]
    for error in refused(hosts, "aabb" if who != 2 else "aaab", be_elsewhere):
        assert isinstance(error, RendezvousError), error
        assert f"rank {other} (on " in str(error)
        assert f"rank {who} (on " in str(error)
        assert f"give {config.HOST_ID} another value on each host" in str(error)


def test_another_version(hosts):
    def be_newer(seat):
        with pytest.MonkeyPatch.context() as patch:
            if seat.rank == 2:
                patch.setattr(world_joining, "__version__", "99.0")
            return meet(seat)

    for error in refused(hosts, "aab", be_newer):
        assert isinstance(error, RendezvousError), error
        assert "the version of gpucoll is 99.0 on rank 2 and" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("address", ["127.0.0.1", 0]), ("address", ["127.0.0.1", 65536]), ("address", ["a name", 5]),
     ("message_port", -1), ("message_port", 1 << 80), ("lanes", [["fd00::1", 70000]]),
     ("gpu", ["cuda"]), ("gpu", [1, 2])],
)  # fmt: skip
def test_a_rank_with_the_secret_that_introduces_itself_wrongly(name, value):
    told = {"address": ["127.0.0.1", 40000], "lanes": [["fd00::1", 40001]], "message_port": 40002}
    told |= {"host": "a", "network": "b", "name": "c", "gpu": ["", "none"]}
    facts = {"gpu": ("cuda", "seen")}

    world_joining._check(told, facts)
    with pytest.raises(ValueError, match="without"):
        world_joining._check({**told, name: value}, facts)


def test_nobody_waits_when_the_rank_that_is_refused_came_first(hosts, tmp_path):
    """Rank 0 stays for ranks that are to be told, too: until they have come, and no longer."""
    has_come = tmp_path / "has come"
    examine = Host._examine

    def look(host, guest):
        found = examine(host, guest)
        has_come.touch()
        return found

    def come(seat):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous_host, "_REFUSING_S", 60.0)
            patch.setattr(Host, "_examine", look)
            if seat.rank == 2:
                patch.setattr(world_joining, "__version__", "99.0")
            if seat.rank == 1:
                until(has_come.exists)
            return meet(seat, 60.0)

    for error in refused(hosts, "aab", come):
        assert isinstance(error, RendezvousError), error
        assert "the version of gpucoll is 99.0 on rank 2 and" in str(error)


@pytest.mark.soak
def test_another_world_size(hosts):
    found = refused(hosts, "aab", meet_differently, {1: {"world_size": 4}}, {"meet_s": 1.0})

    assert all(isinstance(error, RendezvousError) for error in found), found
    assert any("another job" in str(error) for error in found), found


@pytest.mark.soak
def test_another_name(hosts):
    """Two jobs at one meeting point: nobody takes the other one's ranks for its own."""
    names = {rank: {"name": f"job {rank % 2}"} for rank in range(4)}

    found = refused(hosts, "abab", meet_differently, names, {"meet_s": 1.0}, meet=free_point())

    assert all(isinstance(error, GpucollError) for error in found), found


def test_two_jobs_by_one_file(hosts):
    """A file holds one entry for each name."""

    def meet_in_pairs(seat):
        return meet(seat, 20.0, rank=seat.rank // 2, world_size=2, name=f"job {seat.rank % 2}")

    assert hosts.call("abba", meet_in_pairs, gives="seat") == [2] * 4


def test_a_host_name_that_does_not_resolve(hosts):
    found = refused(hosts, "ab", meet, meet="tcp://nowhere.invalid:29500")

    assert all(isinstance(error, RendezvousError) for error in found), found
    assert any("does not resolve" in str(error) for error in found), found


def test_an_interface_that_is_not_there(hosts):
    found = refused(hosts, "ab", meet, environment={config.INTERFACES: "nosuch0"})

    assert all(isinstance(error, GpucollError) for error in found), found
    assert any("nosuch0" in str(error) for error in found), found


@pytest.mark.soak
def test_a_port_in_use(hosts):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        first, *others = refused(hosts, "aab", meet, 1.0, meet=meeting)

    assert isinstance(first, RendezvousError)
    assert "choose a free one" in str(first)
    assert all(isinstance(error, RendezvousError) for error in others), others


@pytest.mark.parametrize("meeting", ["udp://x:1", "file://relative", "tcp://0.0.0.0:1", "tcp://x"])
def test_what_is_no_meeting_point(hosts, meeting):
    for error in refused(hosts, "ab", meet, meet=meeting):
        assert isinstance(error, ArgumentError), error


# --- lost while they meet -------------------------------------------------------------------------

STEPS = {
    "before": (world_joining, "TcpEndpoint"),
    "on its way": (world_joining, "meet"),
    "having met": (world_joining, "_settle"),
    "on its host": (world_joining, "join"),
    "between hosts": (world_joining, "Joined"),
}


def end_at(seat, who, step, how):
    """One rank is killed at a step of joining; the others return their error."""
    module, name = STEPS[step]

    def end(*args, **given):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if seat.rank == who:
            patch.setattr(module, name, end)
        return meet(seat, 1.5)


def check_lost(error, who):
    """It names who was killed, and nobody else as lost; some hear so from a rank that had left."""
    told = isinstance(error, AbortedError) and "raised PeerLostError" in str(error)
    assert told or isinstance(error, PeerLostError | RendezvousDeadlineError), error
    assert f"rank {who}" in str(error), error
    assert {*re.findall(r"lost rank (\d)", str(error))} <= {str(who)}, error


@pytest.mark.soak
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_killed_while_they_meet(hosts, rank_server, who, step):
    with rank_server.fork(4) as pool:
        start = time.monotonic()
        hosts.start(pool, "aabb", end_at, who, step, "killed", gives="seat")
        replies = pool.collect()

    assert time.monotonic() - start < IN_TIME_S
    assert replies[who] == Ended(-signal.SIGKILL)
    for rank, reply in enumerate(replies):
        if rank != who:
            check_lost(reply.error, who)


@pytest.mark.parametrize("step", ["having met", "on its host", "between hosts"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_interrupted_while_they_meet(hosts, who, step):
    start = time.monotonic()
    found = errors(hosts.replies("aabb", end_at, who, step, "interrupted", gives="seat"))

    assert time.monotonic() - start < SOON_S
    for rank, error in enumerate(found):
        expected = KeyboardInterrupt if rank == who else GpucollError
        assert isinstance(error, expected), error
    assert hosts.call("aabb", lambda comm: comm.all_reduce(1)) == [4] * 4


def split_and_end(comm, who, step):
    """A rank is killed at a step of a split across hosts."""
    module, name = STEPS[step]
    if comm.rank == who:

        def end(*args, **given):
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, end)
    comm.split(comm.rank % 2)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("who", [0, 3])
def test_killed_in_a_split(hosts, rank_server, who, step):
    with rank_server.fork(4) as pool:
        start = time.monotonic()
        hosts.start(pool, "aabb", split_and_end, who, step, timeout_s=1.5)
        replies = pool.collect()

    assert time.monotonic() - start < IN_TIME_S
    assert replies[who] == Ended(-signal.SIGKILL)
    partner = (who + 2) % 4
    check_lost(replies[partner].error, who)


# --- parts of a communicator ----------------------------------------------------------------------


def split_in_ways(comm):
    """Split across hosts, inside them, with None; each part works, and so does a part of it."""
    found = []
    n_ranks = comm.world_size
    for colors in (
        [rank % 2 for rank in range(n_ranks)],
        [0] * n_ranks,
        [rank // 2 for rank in range(n_ranks)],
        [None if rank == 1 else 7 for rank in range(n_ranks)],
        list(range(n_ranks)),
        [None] * n_ranks,
    ):
        color = colors[comm.rank]
        part = comm.split(color, -comm.rank)
        if color is None:
            assert part is None
            continue
        with part:
            members = [rank for rank in reversed(range(n_ranks)) if colors[rank] == color]
            assert part.all_gather_object(comm.rank) == members
            assert part.world_size == len(members)
            x = np.arange(5000) + comm.rank
            assert part.all_reduce(x)[1] == sum(members) + len(members)
            part.check()
            with part.duplicate() as again:
                found.append(again.all_reduce(1) == len(members))
    return found, comm.all_reduce(1)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aabb", "abc", "abbb", "abab"])
def test_split_and_duplicate(hosts, placed):
    for found, total in hosts.call(placed, split_in_ways):
        assert all(found)
        assert total == len(placed)


def test_describe(hosts):
    def describe(comm):
        found = dict(comm.describe().facts), str(comm.describe())
        comm.barrier()
        return found

    for rank, (facts, text) in enumerate(hosts.call("aabb", describe)):
        assert "ranks 0, 1" in facts["hosts"], facts
        assert "ranks 2, 3" in facts["hosts"], facts
        leads = rank in (0, 2)
        assert ("127.0.0.1" in facts["links"]) == leads, facts
        assert "not encrypted" in facts["links"] or not leads, facts
        assert "hosts" in text


def test_all_on_one_host_is_as_without_meet(hosts):
    def look(comm):
        return type(comm._group).__name__, "links" in comm.describe().facts, comm.all_reduce(1)

    assert hosts.call("aaa", look) == [("HostGroup", False, 3)] * 3


def loaded(comm):
    comm.all_reduce(np.ones(100_000))
    with comm.split(comm.rank) as part:
        part.barrier()
    return [name for name in sys.modules if name.startswith("gpucoll.transport.tcp.tls")]


@pytest.mark.parametrize("placed", ["ab", "aa"])
def test_nothing_of_tls_is_loaded_without_certificates(hosts, rank_server, placed):
    with rank_server.fork(2) as pool:
        hosts.start(pool, placed, loaded)
        assert pool.results() == [[], []]


# --- strangers ------------------------------------------------------------------------------------


def come_to(ports, stop, kind):
    """Be a nuisance at these ports until told to stop."""
    kept = []
    while not stop.is_set():
        for port in ports():
            with contextlib.suppress(OSError):
                end = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                kept.append(end)  # before anything that can fail
                if kind == "garbage":
                    end.sendall(os.urandom(3000))
                if kind == "slow":
                    end.sendall(b"\0")
                if kind == "leaving":
                    end.close()
        while len(kept) > 300:
            kept.pop(0).close()
    for end in kept:
        end.close()


def listening_ports(pids):
    """Return the TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                    inodes |= {found[1]} if found else set()
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    }


def meet_again_and_again(seat, times):
    totals = []
    for turn in range(times):
        with seat.init(meet_s=20.0, name=f"meeting {turn}") as comm:
            totals.append(comm.all_reduce(1))
    return totals


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kind", ["garbage", "silent", "slow", "leaving"])
def test_strangers_at_every_port_while_ranks_meet(hosts, kind):
    placed = "aabc"
    pids = [rank.pid for rank in hosts.pool(placed).ranks]
    stop = threading.Event()
    thread = threading.Thread(target=come_to, args=(lambda: listening_ports(pids), stop, kind))
    thread.start()
    try:
        replies = hosts.call(placed, meet_again_and_again, 5, gives="seat")
    finally:
        stop.set()
        thread.join()

    assert replies == [[4] * 5] * 4


# --- nothing is left ------------------------------------------------------------------------------


def n_tasks():
    """Return this process's threads, as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


def held_after(seat, times):
    """Return what this rank has more than after the first communicator, having made many."""
    held, before = [], 0
    for turn in range(times):
        with seat.init(name=f"turn {turn}") as comm:
            comm.all_reduce(np.ones(10_000))
            with comm.split(comm.rank % 2) as part:
                part.barrier()
            with contextlib.suppress(GpucollError):
                comm.all_reduce(np.ones(3 + comm.rank))
            if turn % 2:
                comm.barrier()
        if turn:
            until(lambda most=before: n_tasks() <= most)
            held.append(held_open())
        before = n_tasks()
    return held


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aabb"])
def test_nothing_is_left(hosts, placed):
    for held in hosts.call(placed, held_after, 6, gives="seat"):
        kinds = [sorted(re.sub(r"\d+", "N", name) for name in names) for names in held]
        assert kinds[0] == kinds[-1]
