"""Which backend moves which arrays: agreed, connected, shown, refused with cause and remedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank, left_on_gpu
from tests.faults.test_ends import errors

from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import ArgumentError, BackendUnavailableError, MismatchError, RendezvousError


def ones(kit, count=4):
    values = np.ones(count, np.float32)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), (count,), "float32")


def facts_of(comm):
    return dict(comm.describe().facts)


# --- chosen and shown -----------------------------------------------------------------------------


def describe(rank):
    with rank.init() as comm:
        before = facts_of(comm)
        comm.all_reduce(np.ones(3))
        loaded = rank.control.communicators
        comm.all_reduce(ones(rank.kit))
        return before, loaded, facts_of(comm)


@pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
def test_auto_connects_at_the_first_call_on_gpu_arrays(gpus):
    backend, kind = gpus.double.vendor, gpus.double.kind
    for rank, (before, loaded, after) in enumerate(gpus.call_ranks(2, describe)):
        assert before["host arrays"] == "backend cpu: chosen by auto"
        assert before["GPU arrays"].startswith(f"backend {backend}: chosen by auto: ")
        assert before["GPU arrays"].endswith("to be connected at the first call on GPU arrays")
        assert loaded == 0
        assert re.match(rf"{kind}:{rank}: Double of a GPU, GPU-", after["GPU"])
        assert str(gpus.double.library) in after["GPU library"]
        assert "no" in after["GPU: same bits whatever size and placement"]


def connect_at_once(rank, options):
    with rank.init(device=rank.rank, **options) as comm:
        assert rank.control.communicators == 1
        x = ones(rank.kit)
        if rank.rank == 0:
            comm.send(x, 1)
        else:
            x = comm.recv(x, 0)
        comm.check()
        return facts_of(comm)["host arrays"], facts_of(comm)["GPU arrays"]


def test_a_device_is_connected_at_once(gpus):
    for options, host in (({}, "backend cpu"), ({"backend": "nccl"}, "none: backend='nccl' was")):
        for hosts, gpu in gpus.call_ranks(2, connect_at_once, options):
            assert hosts.startswith(host)
            assert gpu.startswith("backend nccl")


class Torchlike:
    """A device as PyTorch has them."""

    def __init__(self, index):
        self.index = index


def name_devices(rank):
    for device in (rank.rank, f"cuda:{rank.rank}", Torchlike(rank.rank)):
        with rank.init(device=device) as comm:
            assert f"cuda:{rank.rank}" in facts_of(comm)["GPU"]
    for device in (-1, "gpu", True, 1.5):
        with pytest.raises(ArgumentError, match="device must be a GPU's number"):
            rank.init(device=device)
    with pytest.raises(ArgumentError, match='on_async_error must be "raise" or "exit"'):
        rank.init(on_async_error="print")


def test_devices(gpus):
    gpus.call_ranks(2, name_devices)


# --- forced ---------------------------------------------------------------------------------------


def host_arrays(rank):
    with rank.init(backend="nccl", device=rank.rank) as comm:
        calls = (
            lambda: comm.all_reduce(np.ones(3)),
            lambda: comm.all_reduce(3.0),
            lambda: comm.all_reduce([np.ones(3)]),
            lambda: comm.broadcast(np.ones(3), async_op=True),
            lambda: comm.plan_all_reduce(np.ones(3)),
            lambda: comm.send(np.ones(3), 1 - comm.rank),
            lambda: comm.recv(np.ones(3), 1 - comm.rank),
            lambda: comm.send_recv(np.ones(3), 1 - comm.rank, 1 - comm.rank),
            lambda: comm.all_gather(np.ones(3), counts="auto"),
            lambda: comm.all_reduce(np.ones(3, np.float32), compression="int8_block"),
        )
        for call in calls:
            with pytest.raises(BackendUnavailableError, match="moves GPU arrays only: use"):
                call()
        comm.barrier()
        assert comm.all_gather_object(comm.rank) == [0, 1]
        return rank.kit.read(comm.all_reduce(ones(rank.kit)))[0]


def test_host_arrays_to_a_communicator_that_was_told_to_use_nccl(gpus):
    assert gpus.call_ranks(2, host_arrays) == [2.0] * 2


def divide_what_was_told_to_use_nccl(rank, device):
    with rank.init(backend="nccl", device=device and rank.world_size - 1 - rank.rank) as comm:
        inits = rank.control.calls("ncclCommInitRankConfig")
        with comm.duplicate() as again:
            rank.kit.use(int(again.describe().facts["GPU"][5]))
            total = rank.kit.read(again.all_reduce(ones(rank.kit)))[0]
            assert again.describe().facts["GPU"] == comm.describe().facts["GPU"]
        assert rank.control.communicators == 1
    connected = rank.control.calls("ncclCommInitRankConfig") - inits
    return total, connected, rank.control.communicators


@pytest.mark.parametrize("device", [True, None])
def test_dividing_what_was_told_to_use_nccl_connects_nothing_anew(gpus, device):
    """Whatever GPUs the ranks have: by default, without a launcher, that of the rank."""
    assert gpus.call_ranks(3, divide_what_was_told_to_use_nccl, device) == [(3.0, 0, 0)] * 3


def gpu_arrays_on_cpu(rank):
    with rank.init(backend="cpu") as comm:
        with pytest.raises(BackendUnavailableError, match=r"lies on cuda:\d, .*'cpu' was asked"):
            comm.all_reduce(ones(rank.kit))
        return comm.all_reduce(1)


def test_gpu_arrays_to_a_communicator_that_was_told_to_use_the_cpu(gpus):
    assert gpus.call_ranks(2, gpu_arrays_on_cpu) == [2] * 2


def wish_differently(rank):
    rank.init(backend="cpu" if rank.rank else "auto")


def test_ranks_that_ask_for_different_backends(gpus):
    for error in errors(gpus.replies(2, wish_differently)):
        assert isinstance(error, RendezvousError)
        assert "the backend asked for is cpu on rank 1 and auto on rank 0" in str(error)


# --- what stands against it -----------------------------------------------------------------------


def fail_to_connect(rank, options, number):
    if number is not None:
        rank.kit.use(number)
    with rank.init(**options) as comm:
        text = ""
        for _ in range(2):
            with pytest.raises(BackendUnavailableError) as caught:
                comm.all_reduce(ones(rank.kit))
            text = str(caught.value)
        assert rank.control.communicators == 0
        return text, facts_of(comm)["GPU arrays"], comm.all_reduce(1)


def share_one(rank):
    rank.kit.use(3)
    with rank.init() as comm:
        before = facts_of(comm)["GPU arrays"]
        total = rank.kit.read(comm.all_reduce(ones(rank.kit)))[0]
        part = comm.split(comm.rank % 2)
        totals = total, rank.kit.read(part.all_reduce(ones(rank.kit)))[0]
        part.close()
        return before, facts_of(comm)["GPU arrays"], totals, rank.control.communicators


def test_several_ranks_on_one_gpu_are_served_by_direct(gpus):
    for rank, (before, shown, totals, left) in enumerate(gpus.call_ranks(3, share_one)):
        assert before.startswith("backend nccl: chosen by auto")
        assert shown.startswith("backend direct: chosen by auto when the GPUs connected: NCCL ")
        assert "ranks 0, 1, 2 share one GPU (Double of a GPU, GPU-" in shown
        assert totals == (3.0, 1.0 if rank == 1 else 2.0)
        assert left == 0


def test_ranks_that_are_told_to_use_nccl_may_not_share_a_gpu(gpus):
    for error in errors(gpus.replies(3, fail_to_connect, {"backend": "nccl", "device": 3}, None)):
        said = str(error)
        assert "ranks 0, 1, 2 share one GPU (Double of a GPU, GPU-" in said
        assert "NCCL 2.29.7 refuses: start one rank per GPU, or leave it to backend='auto'" in said


def test_a_backend_asked_for_by_name_that_cannot_serve(gpus):
    for error in errors(gpus.replies(2, fail_to_connect, {"backend": "nccl", "device": 1}, None)):
        assert isinstance(error, BackendUnavailableError)
        assert "ranks 0, 1 share one GPU" in str(error)
    for error in errors(gpus.replies(2, fail_to_connect, {"device": 99}, None)):
        assert isinstance(error, BackendUnavailableError)
        assert "cuda:99 is not there: the CUDA driver sees 8 GPUs" in str(error)


def fail_while_joining(rank, on_rank):
    if rank.rank == on_rank:
        rank.control.fail_at(1, 2, "ncclCommInitRankConfig")
    try:
        return fail_to_connect(rank, {}, None)
    finally:
        rank.control.fail_at(0, 0)


def test_one_rank_fails_to_join(gpus):
    for text, shown, total in gpus.call_ranks(3, fail_while_joining, 1):
        for said in (text, shown):
            assert "NCCL cannot connect these ranks: rank 1: ncclCommInitRankConfig: " in said
            assert "unhandled system error" in said
        assert total == 3


def mix_host_and_gpu(rank):
    with rank.init() as comm:
        comm.all_reduce(ones(rank.kit) if rank.rank else np.ones(4, np.float32))
        comm.check()


def test_host_arrays_on_one_rank_and_gpu_arrays_on_another(gpus):
    for error in errors(gpus.replies(2, mix_host_and_gpu)):
        assert isinstance(error, MismatchError)
        assert "rank 1 called a collective on GPU arrays (it connects" in str(error)


def see_no_gpu(rank):
    from gpucoll.backends import discovery

    look, discovery._DEVICE_FILES = discovery._DEVICE_FILES, {}
    drivers, discovery._DRIVERS = discovery._DRIVERS, {}
    try:
        with rank.init() as comm:
            assert comm._group.members.tuning.enqueued_records == 0
            with pytest.raises(BackendUnavailableError) as caught:
                comm.all_reduce(ones(rank.kit))
            return str(caught.value), facts_of(comm)["GPU arrays"]
    finally:
        discovery._DEVICE_FILES, discovery._DRIVERS = look, drivers


def test_no_gpu_is_seen(gpu_ranks, doubles):
    double = doubles.double("nccl")
    for text, shown in gpu_ranks.call(
        2, in_rank, double, see_no_gpu, (), gives="seat", environment=double.variables
    ):
        assert "no GPU: there are no device files of NVIDIA's, AMD's or Intel's driver" in text
        assert (
            shown == "none: no GPU: there are no device files of NVIDIA's, AMD's or Intel's driver"
        )


def without_double(seat):
    with seat.init() as comm:
        return dict(comm.describe().facts)["GPU arrays"]


def test_cpu_only(ranks):
    for shown in ranks.call(2, without_double, gives="seat"):
        assert shown == "none: no GPU: GPUCOLL_CPU_ONLY keeps this process to the CPU"


NO_GPU = "no GPU: GPUCOLL_CPU_ONLY keeps this process to the CPU"
NEEDS_A_GPU = [
    (
        {"device": 0},
        f"device=0 is not available: {NO_GPU}. Without device=, host arrays still work",
    ),
    ({"device": "cuda:1"}, f"device=1 is not available: {NO_GPU}"),
    ({"device": 0, "backend": "cpu"}, "device=0 is not available: backend='cpu' was asked for"),
]


def ask_for_a_device(seat, options):
    with pytest.raises(BackendUnavailableError) as caught:
        seat.init(**options)
    return str(caught.value)


@pytest.mark.parametrize(("options", "said"), NEEDS_A_GPU)
def test_a_device_without_a_gpu(ranks, options, said):
    for text in ranks.call(2, ask_for_a_device, options, gives="seat"):
        assert text.startswith(said)


# --- more communicators ---------------------------------------------------------------------------


def divide(rank, is_connected):
    with rank.init() as comm:
        x = ones(rank.kit)
        if is_connected:
            comm.all_reduce(x)
        splits = rank.control.calls("ncclCommSplit")
        part = comm.split(comm.rank % 2 if comm.rank < 4 else None, key=-comm.rank)
        again = comm.duplicate()
        totals = [rank.kit.read(again.all_reduce(x))[0]]
        place = None
        if part is not None:
            gathered = part.all_gather(
                rank.kit.seen_as(
                    rank.kit.bytes_of(np.full(1, comm.rank, np.float32).view(np.uint8)),
                    (1,),
                    "float32",
                )
            )
            totals += rank.kit.read(gathered).tolist()
            place = part.rank
            part.close()
        again.close()
        totals.append(rank.kit.read(comm.all_reduce(x))[0])
        return place, totals, rank.control.calls("ncclCommSplit") - splits


def divided(is_connected):
    """Return what five ranks get."""
    n_splits = 2 if is_connected else 0
    return [
        (1, [5.0, 2.0, 0.0, 5.0], n_splits),
        (1, [5.0, 3.0, 1.0, 5.0], n_splits),
        (0, [5.0, 2.0, 0.0, 5.0], n_splits),
        (0, [5.0, 3.0, 1.0, 5.0], n_splits),
        (None, [5.0, 5.0], n_splits),
    ]


@pytest.mark.parametrize("is_connected", [False, True])
def test_split_and_duplicate(gpus, is_connected):
    assert gpus.call_ranks(5, divide, is_connected) == divided(is_connected)


def open_many(rank):
    ones(rank.kit)  # the first array makes the double's default streams
    before = left_on_gpu(rank)
    for _ in range(5):
        with rank.init(device=rank.rank) as comm:
            comm.all_reduce(ones(rank.kit), async_op=True).synchronize()
            comm.scan(ones(rank.kit))
    return rank.control.communicators, before == left_on_gpu(rank)


def test_nothing_is_left_of_many_communicators(gpus):
    assert gpus.call_ranks(2, open_many) == [(0, True)] * 2


def emulate(comm, kit):
    from tests.calls.gpu.cases import run_cases
    from tests.collective_cases import Case

    cases = [
        Case("int32", count, root=count % comm.world_size if name in ("gather", "scatter") else -1,
             collective=name, in_place=in_place, row=row)
        for name in ("all_to_all", "gather", "scatter")
        for count in (0, 1, 5, 1000)
        for in_place in (False, True)
        for row in (0, 3)
    ]  # fmt: skip
    run_cases(comm, kit, cases)
    return facts_of(comm)["emulated by sends and receives"]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_an_older_library_lacks_is_emulated(rank_server, doubles, world_size):
    from tests.calls.gpu.conftest import with_communicator

    double = doubles.double("nccl", without=("ncclAlltoAll", "ncclGather", "ncclScatter"))
    with rank_server.fork(world_size) as pool:
        arguments: tuple[Any, ...] = (double, with_communicator, ({}, emulate, ()))
        found = pool.call(in_rank, *arguments, gives="seat", environment=double.variables)
    assert found == ["AlltoAll, Gather, Scatter"] * world_size


# --- other vendors, old libraries -----------------------------------------------------------------


def on_either(seat, pair, function, args):
    """Set up a GPU of one vendor on even ranks, of the other on odd ones."""
    double = pair[seat.rank % 2]
    with environment({config.GPU_KIND: double.kind}):
        return in_rank(seat, double, function, args)


def meet_another_vendor(rank):
    with rank.init() as comm:
        total = rank.kit.read(comm.all_reduce(ones(rank.kit)))[0]
        part = comm.split(comm.rank % 2)
        again = rank.kit.read(part.all_reduce(ones(rank.kit)))[0]
        shown = facts_of(comm), facts_of(part)
        part.close()
        return total, again, *shown


def test_gpus_of_different_vendors(gpu_ranks, doubles):
    pair = doubles.double("nccl"), doubles.double("rccl")
    variables = {**pair[0].variables, **pair[1].variables}
    arguments = (pair, meet_another_vendor, ())
    found = gpu_ranks.call(3, on_either, *arguments, gives="seat", environment=variables)
    for rank, (total, again, facts, part) in enumerate(found):
        assert (total, again) == (3.0, 1.0 if rank == 1 else 2.0)
        assert "different vendors (cuda on ranks 0, 2, rocm on rank 1)" in facts["GPU arrays"]
        assert facts["GPU arrays"].startswith("backend direct: chosen by auto")
        assert part["GPU arrays"] == facts["GPU arrays"]


def meet_an_old_library(rank):
    with rank.init() as comm:
        total = rank.kit.read(comm.all_reduce(ones(rank.kit)))[0]
        return facts_of(comm)["GPU arrays"], total


def test_a_library_that_is_too_old(rank_server, gpus):
    old = {**gpus.variables, "NCCL_DOUBLE_VERSION": "21000"}
    with rank_server.fork(2) as pool:
        arguments: tuple[Any, ...] = (gpus.double, meet_an_old_library, ())
        replies = pool.call(in_rank, *arguments, gives="seat", environment=old)
    for text, total in replies:
        assert text.startswith("backend direct: chosen by auto when the GPUs connected: ")
        assert "NCCL 2.10.0" in text
        assert "is too old: gpucoll needs NCCL 2.18.0 or newer" in text
        assert total == 2
