"""Published between hosts: one transfer for each host, and a loss concerns its own host alone."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.shrinking import die, results, until_lost
from tests.waiting import SOON_S, collect, is_stopped, thread_names, until

from gpucoll import ArgumentError, PeerLostError
from gpucoll.tables import Published

SIZE = 5


def filled(version, size=SIZE):
    return np.full(size, version, np.int64)


def followed(comm, source, size, last):
    """The source publishes; the others read all the time, until they have the last version."""
    start_s = time.monotonic()
    with Published(comm, filled(0, size), source) as shared:
        if comm.rank == source:
            for version in range(1, last + 1):
                shared.publish(filled(version, size))
        version, out = 0, filled(0, size)
        while version < last:
            newer, arrays = shared.latest(version, out=out, wait=True)
            assert newer > version
            assert (arrays == newer).all()
            version = newer
    assert time.monotonic() - start_s < SOON_S
    return thread_names().count("gpucoll-published")


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("placed", ["aab", "abb", "aba", "abcb"])
@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize(("size", "last"), [(0, 20), (5, 200), (300_000, 20)])
def test_versions_reach_other_hosts_whole_and_in_order(hosts, placed, source, size, last):
    assert hosts.call(placed, followed, source, size, last) == [0] * len(placed)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "last"), [(100, 30_000), (1_000_000, 200)])
def test_many_versions_between_hosts(hosts, size, last):
    hosts.call("aabb", followed, 1, size, last, limit_s=600)


def closed_by_the_source(comm):
    shared = Published(comm, filled(0))
    if shared.is_source:
        shared.publish(filled(1))
    else:
        with pytest.raises(PeerLostError, match="the source, rank 0 of 3, has closed it"):
            shared.latest(1, wait=True)
        assert shared.latest()[1].tolist() == filled(1).tolist()
    shared.close()
    return True


def test_a_source_that_closes_waits_until_the_last_version_has_arrived(hosts):
    assert hosts.call("aab", closed_by_the_source) == [True] * 3


def not_kept(comm):
    shared = Published(comm, filled(0))
    with pytest.raises(ArgumentError, match="source is 3; there are ranks 0 to 2"):
        shared.kept_for(comm, source=3)
    if shared.is_source:
        shared.publish(filled(1))
    start_s = time.monotonic()
    if comm.rank == 2:
        with pytest.raises(PeerLostError, match="rank 2 of 3, which receives for this host"):
            shared.latest(wait=True)
    else:
        assert shared.latest(wait=True)[0] == 1
    assert time.monotonic() - start_s < SOON_S
    with shared.kept_for(comm) as kept:
        assert kept.latest(wait=True)[0] == 1
        comm.barrier()
    return True


def test_a_call_of_kept_for_that_raises(hosts):
    assert hosts.call("aab", not_kept) == [True] * 3


def source_lost(comm):
    shared = Published(comm, filled(0))
    if shared.is_source:
        shared.publish(filled(1))
    assert shared.latest(wait=True)[0] == 1
    comm.barrier()
    if shared.is_source:
        die()
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match="the source, rank 0 of 4, is gone"):
        shared.latest(1, wait=True)
    assert time.monotonic() - start_s < SOON_S
    assert shared.latest()[1].tolist() == filled(1).tolist()
    until_lost(comm)
    with comm.shrink() as left, shared.kept_for(left, source=1) as kept:
        assert kept.latest()[0] == 1
        left.barrier()
        if kept.is_source:
            assert kept.publish(filled(2)) == 2
        assert kept.latest(1, wait=True)[1].tolist() == filled(2).tolist()
        left.barrier()
    return thread_names().count("gpucoll-published")


@pytest.mark.parametrize("placed", ["abbc", "aabb"])
def test_waiting_readers_of_all_hosts_hear_that_the_source_is_gone(hosts, rank_server, placed):
    with rank_server.fork(4) as pool:
        hosts.start(pool, placed, source_lost)
        assert results(pool.collect(), but=[0]) == [0] * 3


def killed_at_a_random_moment(comm, moment_s):
    with Published(comm, filled(0, 50_000)) as shared:
        version, arrays = 0, filled(0, 50_000)
        comm.barrier()
        if shared.is_source:
            threading.Timer(moment_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
        try:
            while True:
                if shared.is_source:
                    shared.publish(filled(version + 1, 50_000))
                newer, arrays = shared.latest(version, wait=True)
                assert newer > version
                assert (arrays == newer).all()
                version = newer
        except PeerLostError:
            last, arrays = shared.latest(out=arrays)
            assert last == version
            # Killed at once, the source may have got no version to the other host.
            assert arrays is None if version == 0 else (arrays == version).all()
    return True


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_a_source_that_is_killed_at_a_random_moment(hosts, rank_server, seed):
    moment_s = float(np.random.default_rng(seed).uniform(0, 0.2))
    with rank_server.fork(4) as pool:
        hosts.start(pool, "abba", killed_at_a_random_moment, moment_s)
        assert results(pool.collect(), but=[0]) == [True] * 3


def carrier_lost(comm, how, size):
    """Rank 1, the carrier of host b, is lost; its host hears of it, all others read on."""
    pids = comm.all_gather_object(os.getpid())
    part = comm.split(0 if comm.rank in (0, 3) else None)
    with Published(comm, filled(0, size)) as shared:
        if shared.is_source:
            shared.publish(filled(1, size))
        assert shared.latest(wait=True)[0] == 1
        comm.barrier()
        if comm.rank == 1:
            {"dies": die, "closes": shared.close, "stops": lambda: stop(comm)}[how]()
        if comm.rank == 2:
            if how == "stops":
                until(lambda: is_stopped(pids[1]))
            else:
                text = "rank 1 of 4, which receives for this host, is gone, has closed it"
                with pytest.raises(PeerLostError, match=text):
                    follow(shared)
            version, arrays = shared.latest()
            assert (arrays == version).all()
        if part is not None:
            for version in range(2, 30):
                if shared.is_source:
                    shared.publish(filled(version, size))
                until(lambda version=version: shared.version == version)
                part.barrier()
            part.close()
            if comm.rank == 0 and how == "stops":
                start_s = time.monotonic()
                shared.close(timeout_s=0.3)
                assert time.monotonic() - start_s < SOON_S
                os.kill(pids[1], signal.SIGCONT)
        return thread_names().count("gpucoll-published")


def follow(shared):
    version = 0
    while True:
        version, _ = shared.latest(version, wait=True)


def stop(comm):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("size", [5, 400_000])
@pytest.mark.parametrize("how", ["dies", "closes", "stops"])
def test_a_host_whose_carrier_is_lost_disturbs_no_other(hosts, rank_server, how, size):
    with rank_server.fork(4) as pool:
        hosts.start(pool, "abbc", carrier_lost, how, size)
        results(pool.collect(), but=[1] if how == "dies" else [])


def leaks(comm):
    def facts():
        with open("/proc/self/maps") as file:
            maps = sum("published" in line for line in file)
        return len(os.listdir("/proc/self/fd")), thread_names(), maps

    found = []
    for _ in range(3):
        with Published(comm, filled(0), 1) as shared:
            if shared.is_source:
                shared.publish(filled(1))
            with shared.kept_for(comm, source=2) as kept:
                kept.latest(wait=True)
                comm.barrier()
        collect()
        found.append(facts())
    return found


def test_nothing_is_left(hosts):
    for first, *others in hosts.call("aab", leaks):
        for descriptors, *more in others:
            assert descriptors <= first[0]
            assert more == [*first[1:]]
