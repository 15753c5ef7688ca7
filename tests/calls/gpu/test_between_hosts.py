"""GPU arrays of ranks on several hosts, which are played here: through doubles of NCCL and RCCL.

The doubles' ranks share memory whatever host they are on; what is tested is gpucoll's part: that
the ranks of all hosts come together in one communicator of the library's, that what they call is
compared between hosts, and that whatever ends a call on one host ends it on all.
"""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
from tests.calls.gpu import test_connecting as connecting
from tests.calls.gpu import test_failures as alone
from tests.calls.gpu import test_messages as messages
from tests.calls.gpu import test_repeated_calls as repeated
from tests.calls.gpu import test_windows as windows
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import vendors_in_turn
from tests.calls.gpu.failing import counted, ones
from tests.calls.gpu.test_collectives import cases_of
from tests.collective_cases import MOVEMENTS, REDUCTIONS
from tests.faults.test_ends import errors
from tests.ranks import Ended
from tests.topology.machines import write_xml
from tests.waiting import SOON_S, until

from gpucoll.config import environment
from gpucoll.errors import (
    AbortedError,
    BackendUnavailableError,
    DeadlineError,
    MismatchError,
    PeerLostError,
)

SHAPES = ["ab", "aabb", "abc", "abbb", "abab"]
BOTH = pytest.mark.parametrize("gpus_on_hosts", ["nccl", "rccl"], indirect=True)


@pytest.mark.soak
@vendors_in_turn("placed", SHAPES, fixture="gpus_on_hosts")
def test_every_collective(gpus_on_hosts, placed):
    size = len(placed)
    cases = [case for name in (*REDUCTIONS, *MOVEMENTS) for case in cases_of(name, size, size)]
    assert gpus_on_hosts.call(placed, run_cases, cases) == [len(cases)] * size


# --- different calls ------------------------------------------------------------------------------


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize("kind", alone.OTHERWISE)
@pytest.mark.parametrize("placed", ["aba", "aab", "abc"])
def test_a_mismatch_names_the_odd_rank_on_every_rank(gpus_on_hosts, placed, kind):
    found = gpus_on_hosts.call_ranks(placed, alone.call_otherwise, kind)

    for rank, text in enumerate(found):
        assert re.search(r"rank 1 called \w+\(.*ranks 0, 2 called all_reduce\(", text), text
        assert f"This is rank {rank} of 3. Outputs are undefined" in text
        assert "The communicator was aborted: close it" in text


def call_by_parity(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit, 8 + comm.rank % 2))
        comm.check()

    return counted(rank, calls)


@pytest.mark.parametrize("placed", ["aabb", "abab", "abbb"])
def test_ranks_that_differ_on_each_host(gpus_on_hosts, placed):
    for error in errors(gpus_on_hosts.replies(placed, call_by_parity)):
        assert isinstance(error, MismatchError), error
        for ranks, size in (("0, 2", 8), ("1, 3", 9)):
            called = f"all_reduce(op=sum, float32, shape ({size},))"
            assert f"ranks {ranks} called {called}" in str(error)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_another_root(gpus_on_hosts, name):
    for error in errors(gpus_on_hosts.replies("ab", alone.call_with_another_root, name)):
        assert isinstance(error, MismatchError), error
        assert "root=1" in str(error)
        assert "root=0" in str(error)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (alone.call_in_another_order, "shape (3,)"),
        (alone.never_meet, "all_to_all"),
        (alone.send_counts_that_differ, "send_counts and recv_counts must agree"),
    ],
)
def test_other_differences(gpus_on_hosts, function, said):
    for error in errors(gpus_on_hosts.replies("ab", function)):
        assert isinstance(error, MismatchError), error
        assert said in str(error)


def exchange_rows_that_fit(comm, kit):
    """What two ranks say of the rows between them fits over all ranks, and in no single host."""
    sent = [[0, 1, 0, 2], [1, 0, 3, 0], [0, 0, 1, 1], [2, 1, 0, 0]]
    received = [row[comm.rank] for row in sent]
    x = ones(kit, sum(sent[comm.rank]))
    y = comm.all_to_all(x, send_counts=sent[comm.rank], recv_counts=received)
    comm.check()
    return int(kit.read(y).sum())


def test_rows_between_two_ranks_are_compared_over_all_hosts(gpus_on_hosts):
    assert gpus_on_hosts.call("aabb", exchange_rows_that_fit) == [3, 2, 4, 3]


# --- late, gone -----------------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("way", ["call", "work", "communicator"])
@pytest.mark.parametrize("placed", ["aba", "aab", "abb", "abc"])
def test_a_deadline_names_the_late_rank(gpus_on_hosts, placed, way):
    found = errors(gpus_on_hosts.replies(placed, alone.come_too_late, way))

    for error in found:
        assert isinstance(error, DeadlineError), error
        assert (
            "rank 1 had not made this call: rank 1 is in no call of this communicator; the last "
            "collective: all_reduce(op=sum, float32, shape (8,)) (#1) on GPU arrays. Is"
        ) in str(error)
        assert "all_reduce(op=sum, float32, shape (8,)) (#2)" in str(error)
    assert "waited 0.3 s" in f"{found[0]}{found[2]}"


def test_a_late_rank_is_found_where_this_ranks_part_is_over(gpus_on_hosts):
    for error in errors(gpus_on_hosts.replies("ab", alone.come_too_late_where_nothing_moves)):
        assert isinstance(error, DeadlineError), error
        assert "rank 1 had not made this call" in str(error)


def test_a_gpu_that_hangs_is_a_deadline(gpus_on_hosts):
    for error in errors(gpus_on_hosts.replies("aab", alone.hang_on_the_gpu)):
        assert isinstance(error, DeadlineError), error
        assert "all ranks had made this call, but the GPUs had not finished it" in str(error)


def stop(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit), timeout_s=20)
        comm.check()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(ones(kit))
        comm.check()

    return counted(rank, calls, timeout_s=0.5)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aba", "aab", "abb"])
def test_a_stopped_rank_is_late_and_not_lost(gpus_on_hosts, rank_server, placed):
    with rank_server.fork(3) as pool:
        gpus_on_hosts.start(pool, placed, stop)
        found = errors(pool.collect(only=[0, 2]))
        pool.ranks[1].send(signal.SIGCONT)
        found += errors(pool.collect(only=[1]))

    for error in found:
        assert isinstance(error, DeadlineError), error
    for error in found[:2]:
        late = "ranks? 1(, 2)? (had not made this call|on .* did not answer)"
        assert re.search(late, str(error)), error


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", ["aba", "aab", "abc"])
def test_a_lost_rank(rank_server, gpus_on_hosts, placed):
    with rank_server.fork(3) as pool:
        gpus_on_hosts.start(pool, placed, alone.be_killed, "before")
        first, killed, last = pool.collect()

    assert isinstance(killed, Ended)
    for reply in (first, last):
        assert isinstance(reply.error, PeerLostError), reply
        assert "lost rank 1" in str(reply.error)


def close_early(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        if comm.rank == 1:
            comm.close()
            return
        begun = time.monotonic()
        comm.all_reduce(ones(kit))
        try:
            comm.check()
        finally:
            assert time.monotonic() - begun < SOON_S

    return counted(rank, calls)


@pytest.mark.parametrize("placed", ["aba", "aab", "abc"])
def test_a_rank_that_closes_early(gpus_on_hosts, placed):
    replies = gpus_on_hosts.replies(placed, close_early)

    assert replies[1].error is None, replies[1].error
    for rank in (0, 2):
        assert isinstance(replies[rank].error, PeerLostError), replies[rank].error
        assert "it closed the communicator" in str(replies[rank].error)
        assert re.search(r"in all_reduce\(.*\(#2\)", str(replies[rank].error))


def leave_in_peace(rank):
    def calls(comm, kit):
        for _ in range(3):
            y = comm.all_reduce(ones(kit))
        if comm.rank == 0:
            others = range(1, comm.world_size)
            until(lambda: any(comm._group.has_closed(rank) for rank in others))
        comm.check()
        return kit.read(y).tolist()

    return counted(rank, calls)


@pytest.mark.parametrize("placed", ["aab", "abb", "abc"])
def test_ranks_that_close_when_all_is_done_are_no_loss(gpus_on_hosts, placed):
    assert gpus_on_hosts.call_ranks(placed, leave_in_peace) == [[3.0] * 8] * 3


def abort_while_others_wait(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        if comm.rank == comm.world_size - 1:
            comm.abort()
            comm.check()
        begun = time.monotonic()
        comm.all_reduce(ones(kit))
        try:
            comm.check()
        finally:
            assert time.monotonic() - begun < SOON_S

    return counted(rank, calls)


@pytest.mark.parametrize("placed", ["ab", "aab", "abb", "abc"])
def test_an_abort_by_any_rank_ends_the_wait_of_all(gpus_on_hosts, placed):
    last = len(placed) - 1
    for rank, error in enumerate(errors(gpus_on_hosts.replies(placed, abort_while_others_wait))):
        assert isinstance(error, AbortedError), error
        assert rank == last or f"rank {last} aborted it" in str(error)


def fail_in_the_library(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        if comm.rank == 2:
            rank.control.fail_at(1, code=2, function="ncclAllReduce")
        comm.all_reduce(ones(kit))
        comm.check()

    return counted(rank, calls)


@pytest.mark.parametrize("placed", ["abb", "abc"])
def test_an_error_of_the_library_is_told_to_every_rank(gpus_on_hosts, placed):
    first, second, failed = errors(gpus_on_hosts.replies(placed, fail_in_the_library))

    assert "ncclAllReduce" in str(failed)
    for error in (first, second):
        assert isinstance(error, AbortedError), error
        assert "the GPU library of rank 2 failed in all_reduce(" in str(error)


# --- messages, groups, lists, other communicators -------------------------------------------------


@pytest.mark.soak(quick=1)
@BOTH
@pytest.mark.parametrize("placed", ["ab", "aba", "abc"])
def test_messages_and_groups(gpus_on_hosts, placed):
    gpus_on_hosts.call(placed, messages.pass_around)


def test_messages_come_in_order(gpus_on_hosts):
    gpus_on_hosts.call("ab", messages.in_order)


@pytest.mark.parametrize("placed", ["aab", "abc"])
def test_a_group_of_host_and_gpu_arrays(gpus_on_hosts, placed):
    assert gpus_on_hosts.call(placed, messages.grouped) == [[3.0] * 3] * 3


@pytest.mark.parametrize("placed", ["aba", "abc"])
def test_lists(gpus_on_hosts, placed):
    gpus_on_hosts.call(placed, messages.lists)


@pytest.mark.parametrize("placed", ["aba", "abc"])
def test_calls_again_in_one_compiled_step(gpus_on_hosts, placed):
    for results in gpus_on_hosts.call(placed, repeated.repeat_every_kind):
        assert results == [True] * len(results)
        assert results


@pytest.mark.parametrize("placed", ["aba", "abc"])
def test_symmetric_windows(gpus_on_hosts, placed):
    assert gpus_on_hosts.call_ranks(placed, windows.use_windows, 2) == [(2, {6.0}, 0)] * 3


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aabbb", "ababa", "abcab"])
@pytest.mark.parametrize("is_connected", [True, False])
def test_split_and_duplicate(gpus_on_hosts, placed, is_connected):
    found = gpus_on_hosts.call_ranks(placed, connecting.divide, is_connected)

    assert found == connecting.divided(is_connected)


def divide_hosts_and_mistake(rank):
    """Communicators of one host, and of all: each finds out for itself what differs in it."""
    rank.kit.use(rank.rank)
    with rank.init() as comm:
        x = ones(rank.kit)
        comm.all_reduce(x)
        with comm.split(rank.rank // 2) as part, comm.duplicate() as again:
            total = rank.kit.read(part.all_reduce(x)).tolist()
            part.check()
            with pytest.raises(MismatchError) as caught:  # noqa: PT012
                again.all_reduce(ones(rank.kit, 8 + (rank.rank == 3)))
                again.check()
            total += rank.kit.read(comm.all_reduce(part.all_reduce(x))).tolist()
            comm.check()
        return total, str(caught.value)


def test_several_communicators(gpus_on_hosts):
    for total, text in gpus_on_hosts.call_ranks("aabb", divide_hosts_and_mistake):
        assert total == [2.0] * 8 + [8.0] * 8
        assert "rank 3 called" in text
        assert "ranks 0, 1, 2 called" in text


def mix(comm, kit):
    x, y = ones(kit), np.arange(5.0)
    for place in range(20):
        assert kit.read(comm.all_reduce(x)).tolist() == [comm.world_size] * 8
        assert comm.all_reduce(y).tolist() == [comm.world_size * i for i in range(5)]
        assert comm.broadcast(place if comm.rank == 0 else 0) == place
        assert kit.read(comm.all_reduce([x, x])[1]).tolist() == [comm.world_size] * 8
        work, beside = comm.all_reduce(x, async_op=True), comm.all_reduce(y, async_op=True)
        assert beside.wait()[1] == comm.world_size
        assert kit.read(work.wait())[0] == comm.world_size
    comm.check()
    return comm.all_gather_object(comm.rank)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aab", "abc"])
def test_host_and_gpu_arrays(gpus_on_hosts, placed):
    assert gpus_on_hosts.call(placed, mix) == [[0, 1, 2]] * 3


def run_ahead(rank, slow):
    """The other ranks have posted a hundred calls before one comes; all wrap their rings."""
    rank.kit.use(rank.rank)
    with rank.init() as comm:
        x = rank.kit.seen_as(rank.kit.bytes_of(np.zeros(0, np.uint8)), (0,), "float32")
        comm.all_reduce(x)
        comm.barrier()
        if comm.rank == slow:
            members = comm._group.host.members
            rows = set(range(members.layout.enqueued_rows)) - {members.rank}
            until(lambda: all(members.enqueued_header(row, 100) & 0xFF == 100 for row in rows))
        for _ in range(600):
            comm.all_reduce(x)
        comm.check()
        return comm._group.enqueued_calls().compared


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_rank_among_fast_ones(gpus_on_hosts, slow):
    assert gpus_on_hosts.call_ranks("abb", run_ahead, slow) == [601] * 3


def test_one_gpu_for_two_ranks_of_a_host(gpus_on_hosts):
    for error in errors(gpus_on_hosts.replies("abb", share_a_gpu, "the vendor's")):
        assert isinstance(error, BackendUnavailableError), error
        assert "ranks 1, 2 share one GPU" in str(error)
    for total, facts in gpus_on_hosts.call_ranks("abb", share_a_gpu, "auto"):
        assert total == [3.0] * len(total)
        assert "share one GPU" in facts


def share_a_gpu(rank, backend):
    rank.kit.use(0)
    with rank.init(
        backend=backend if backend == "auto" else rank.control.double.vendor, device=0
    ) as comm:
        total = comm.all_reduce(ones(rank.kit))
        comm.check()
        return rank.kit.read(total).tolist(), str(comm.describe())


def take_the_default(rank):
    with rank.init(backend=rank.control.double.vendor) as comm:
        facts = dict(comm.describe().facts)
        return facts["GPU"].partition(":")[0], comm._gpu._connected.device.number


@BOTH
def test_a_rank_takes_the_gpu_of_its_place_on_the_host(gpus_on_hosts):
    found = gpus_on_hosts.call_ranks("aabab", take_the_default)

    assert [number for _, number in found] == [0, 1, 0, 2, 1]


def close_while_others_wait(rank):
    """The first rank of a host closes while the other ranks' calls are under way."""
    rank.kit.use(rank.rank)
    with rank.init() as comm:
        x = ones(rank.kit)
        for _ in range(5):
            x = comm.all_reduce(x)
        if comm.rank == 1:
            return comm.close()
        comm.check()
        return None


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abb", "abab", "abcabc", "abcdefgh"])
def test_close_while_others_wait(gpus_on_hosts, placed):
    assert gpus_on_hosts.call_ranks(placed, close_while_others_wait) == [None] * len(placed)


# --- the network ----------------------------------------------------------------------------------


def tell_network(rank, user):
    """Return what describe says before and after the GPUs connect, and the library's variables."""
    with environment(user), rank.init() as comm:
        before = dict(comm.describe().facts)
        comm.all_reduce(ones(rank.kit))
        after = dict(comm.describe().facts)
        with comm.split(rank.rank % 2) as part:  # each on one host
            alone = dict(part.describe().facts)
        assert "GPU network" not in {**before, **alone}
        assert before["GPU arrays"].endswith("to be connected at the first call on GPU arrays")
        assert after["hosts"].count(";") == 1
        told = os.environ["NCCL_SOCKET_IFNAME"], after["GPU network"], after["NIC of the GPU"]
        return told, alone["GPU arrays"]


MACHINE = "node 0 0-3\n  bridge 10\n" + "".join(
    f"    switch 1{place}\n      gpu {0x1B + place:x}\n      nic 2{place} mlx5_{place}\n"
    for place in range(4)
)
"""Where the GPUs of the double sit: each on a switch with a NIC."""


def test_the_library_uses_the_interface_that_links_the_hosts(gpus_on_hosts, rank_server, tmp_path):
    file = write_xml(tmp_path / "topology.xml", MACHINE, "nvidia")
    with rank_server.fork(4) as pool:
        gpus_on_hosts.start(pool, "abab", tell_network, {"NCCL_TOPO_FILE": str(file)})
        found = pool.results()

    for (value, network, nic), arrays in found:
        assert value == "=lo"
        assert network == (
            "NCCL_SOCKET_IFNAME==lo, set by gpucoll: the interface that links the hosts"
        )
        assert re.match(r"mlx5_\d \(.*\), PIX from the GPU: the nearest; NCCL_IB_HCA=mlx5_", nic)
        assert arrays.startswith("backend nccl: ")
    assert len({nic for (_, _, nic), _ in found}) == 4


def test_what_the_user_says_of_the_network_stands(gpus_on_hosts, rank_server):
    user = {"NCCL_SOCKET_IFNAME": "^docker", "NCCL_IB_HCA": "mlx5_7"}
    with rank_server.fork(4) as pool:
        gpus_on_hosts.start(pool, "abab", tell_network, user)
        found = pool.results()

    for (value, network, nic), _ in found:
        assert value == "^docker"
        assert network == (
            "NCCL_SOCKET_IFNAME=^docker of the environment stands; the hosts are linked by lo"
        )
        assert nic.endswith("; NCCL_IB_HCA=mlx5_7 of the environment stands")
