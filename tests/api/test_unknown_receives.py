"""Receives of unknown size that are pending go on, whatever their rank waits for meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

SIZES = 3, 3000, 70_000, 400_000


def send_meanwhile(comm, x, peer):
    work = comm.recv(source=peer, async_op=True)
    comm.send(x, peer)
    return work.wait()


def meet_meanwhile(comm, x, peer):
    if comm.rank == 1:
        comm.send(x, 0)
        comm.barrier()
        return comm.recv(source=0)
    work = comm.recv(source=peer, async_op=True)
    comm.barrier()
    comm.send(work.wait(), peer)
    return work.wait()


def send_an_object_meanwhile(comm, x, peer):
    work = comm.recv_object(peer, async_op=True)
    comm.send_object({"x": x, "y": x + 1}, peer)
    received = work.wait()
    assert (received["y"] == x + 1).all()
    return received["x"]


def send_in_the_group(comm, x, peer):
    with comm.group():
        comm.send(x, peer)
        work = comm.recv(source=peer)
    return work.wait()


def receive_in_the_order_posted(comm, x, peer):
    """Receives of known size of the same source come before, between and behind."""
    with comm.group():
        for place in range(4):
            comm.send(x + place, peer)
        known = [comm.recv(np.empty_like(x), peer)]
        unknown = [comm.recv(source=peer), comm.recv(source=peer)]
        known.append(comm.recv(np.empty_like(x), peer))
    received = [known[0], *(work.wait() for work in unknown), known[1]]
    for place, array in enumerate(received):
        assert (array == x + place).all()
    return received[0]


WAYS = [
    send_meanwhile,
    meet_meanwhile,
    send_an_object_meanwhile,
    send_in_the_group,
    receive_in_the_order_posted,
]


def exchange(comm, way):
    for size in SIZES:
        x = np.arange(float(size))
        for _ in range(3):
            assert (way(comm, x, 1 - comm.rank) == x).all()


@pytest.mark.parametrize("way", WAYS)
def test_they_go_on(ranks, way):
    ranks.call(2, exchange, way)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_they_go_on_between_hosts(hosts, way):
    hosts.call("ab", exchange, way)
