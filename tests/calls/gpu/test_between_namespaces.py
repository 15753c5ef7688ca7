"""GPU arrays between hosts that are network namespaces on a bridge. Needs root and iproute2.

The doubles' ranks share memory across namespaces; gpucoll's own connections go over the bridge.
"""

from __future__ import annotations

import time

import pytest
from tests.calls.gpu.conftest import in_rank_on_host
from tests.calls.gpu.failing import counted, ones
from tests.group.world.test_namespaces import USER_TIMEOUT_S, enter, made_namespaces
from tests.waiting import until

from gpucoll import config
from gpucoll.errors import MismatchError, PeerLostError


@pytest.fixture(scope="module")
def namespaces():
    yield from made_namespaces()


def in_namespace(seat, names, double, function, args):
    enter(names[ord(seat.meeting.placed[seat.rank]) - ord("a")])
    return in_rank_on_host(seat, double, function, args)


@pytest.fixture
def start(gpus_on_hosts, namespaces):
    """Have the ranks of a pool begin, each in the namespace that its letter says."""

    def begin(pool, placed, function, *args):
        environment = {
            **gpus_on_hosts.gpus.variables,
            config.HOST_ID: "",
            config.INTERFACES: "eth0",
        }
        given = namespaces.names, gpus_on_hosts.gpus.double, function, args
        options = {"gives": "seat", "environment": environment, "backend": "auto"}
        gpus_on_hosts.hosts.start(pool, placed, in_namespace, *given, **options)

    return begin


def work(rank):
    with rank.init() as comm:
        x = ones(rank.kit)
        totals = [rank.kit.read(comm.all_reduce(x))[0] for _ in range(20)]
        with comm.split(comm.rank % 2) as part:
            totals.append(rank.kit.read(part.all_reduce(x))[0])
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        totals.append(rank.kit.read(comm.send_recv(x, right, left))[0])
        comm.check()
        network = dict(comm.describe().facts)["GPU network"]
        with pytest.raises(MismatchError) as caught:  # noqa: PT012
            comm.all_reduce(ones(rank.kit, 8 + (comm.rank == 2)))
            comm.check()
        return totals, network, str(caught.value)


@pytest.mark.parametrize("placed", ["aab", "aabbc"])
def test_calls_between_namespaces(start, rank_server, placed):
    with rank_server.fork(len(placed)) as pool:
        start(pool, placed, work)
        found = pool.results()

    size = len(placed)
    for rank, (totals, network, text) in enumerate(found):
        assert totals == [size] * 20 + [len(range(rank % 2, size, 2)), 1]
        assert network.startswith("NCCL_SOCKET_IFNAME==eth0, set by gpucoll")
        assert "rank 2 called all_reduce(op=sum, float32, shape (9,))" in text


def lose(rank, ready):
    """Return when this rank was told of the loss, and how."""
    ended = []

    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        if comm.rank == 2:  # its host is cut off while the others wait for it
            ready.touch()
            until(lambda: comm._group.is_aborted)
            comm.check()
        comm.all_reduce(ones(kit))
        try:
            comm.check()
        finally:
            ended.append(time.monotonic())

    try:
        counted(rank, calls)
    except PeerLostError as error:
        return (ended or [time.monotonic()])[0], str(error)
    return None


@pytest.mark.parametrize("placed", ["aab", "abc"])
def test_a_host_that_is_cut_off_ends_the_wait(start, namespaces, rank_server, tmp_path, placed):
    ready = tmp_path / "ready"
    with rank_server.fork(3) as pool:
        start(pool, placed, lose, ready)
        cut = ord(placed[2]) - ord("a")
        try:
            until(ready.exists)
            begun = time.monotonic()
            namespaces.cut_off(cut)
            found = pool.results()
        finally:
            namespaces.restore(cut)

    for rank, (moment, text) in enumerate(found):
        assert moment - begun < USER_TIMEOUT_S + 2, (rank, text)
        assert rank == 2 or "lost rank 2" in text, text


# --- without a library ----------------------------------------------------------------------------


def work_directly(rank):
    """Nothing but the bridge joins the ranks of two hosts: all that moves goes over it."""
    kit = rank.kit
    with rank.init(backend="direct", device=rank.rank) as comm:
        totals = []
        for count in (8, 3_000_000):  # the larger one in several pieces
            x = ones(kit, count)
            totals.append(kit.read(comm.all_reduce(x)))
            gathered = kit.read(comm.all_gather(x[:5]))
            assert gathered.tolist() == [1.0] * 5 * comm.world_size
            right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
            totals.append(comm.world_size * kit.read(comm.send_recv(x, right, left)))
        compressed = comm.all_reduce(x, compression="int8_block")
        totals.append(kit.read(compressed))
        with comm.split(comm.rank % 2) as part:
            assert kit.read(part.all_reduce(x))[-1] == part.world_size
        comm.check()
        said = comm.describe().facts["GPU path through shared GPU memory"]
        return [float(each[at]) for each in totals for at in (0, -1)], said


@pytest.mark.parametrize("placed", ["aab", "abab"])
def test_the_direct_backend_between_namespaces(start, rank_server, placed):
    with rank_server.fork(len(placed)) as pool:
        start(pool, placed, work_directly)
        found = pool.results()
    for totals, said in found:
        assert totals == [float(len(placed))] * 10
        assert said == "none: the ranks are on several hosts"
