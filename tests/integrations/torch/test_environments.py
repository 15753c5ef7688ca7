"""Where process groups live: several hosts, torch's debugging, the entry point, GPUs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from tests.hosts import SECRET
from tests.process_groups import Given, in_group

from gpucoll import config
from gpucoll.config import environment


def on_hosts(comm, path, variables, function):
    """Call a function in a process group whose second half is on another host."""
    half = f"host {2 * comm.rank // comm.world_size}"
    with environment({"GPUCOLL_HOST_ID": half, "GPUCOLL_INTERFACES": "lo", **variables}):
        return in_group(comm, path, Given(), function, ())


def reduce_on_hosts():
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    pair = dist.new_group([1, 2], use_local_synchronization=True) if rank in (1, 2) else None
    if pair is not None:
        dist.all_reduce(total, group=pair)
    passed = torch.zeros(3)
    if rank == 0:
        dist.send(torch.arange(3.0), 3)
    elif rank == 3:
        dist.recv(passed, 0)
    return total.item(), passed.sum().item(), "hosts" in str(dist.group.WORLD.comm.describe())


def test_ranks_on_two_hosts(torch_ranks, tmp_path):
    given = str(tmp_path / "store"), {"GPUCOLL_SECRET": SECRET}, reduce_on_hosts
    found = torch_ranks.call(4, on_hosts, *given)

    assert [one[0] for one in found] == [6.0, 12.0, 12.0, 6.0]
    assert found[3][1] == 3.0
    assert all(one[2] for one in found)


def expect_no_secret(comm, path):
    import torch

    with pytest.raises(torch.distributed.DistBackendError, match="GPUCOLL_SECRET"):
        on_hosts(comm, path, {"GPUCOLL_SECRET": ""}, reduce_on_hosts)


def test_several_hosts_need_a_secret(torch_ranks, tmp_path):
    torch_ranks.call(2, expect_no_secret, str(tmp_path / "store"))


def train_a_step(device="cpu"):
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False).to(device))
    model(torch.full((1, 3), 1.0 + dist.get_rank(), device=device)).sum().backward()
    return next(model.parameters()).grad.tolist()


def debugged(comm, path):
    with environment({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        import torch

        torch.distributed.set_debug_level_from_env()
        try:
            return in_group(comm, path, Given(), train_a_step, ())
        finally:
            torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)


def test_torchs_debugging(torch_ranks, tmp_path):
    assert torch_ranks.call(2, debugged, str(tmp_path / "store")) == [[[1.5] * 3]] * 2


def call_everything(device):
    """Make the calls that frameworks make, on a device; return what came, as lists."""
    import torch
    from torch import distributed as dist

    assert not config.cpu_only()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), 1.0 + rank, device=device)
    summed, later = x.clone(), x.clone()
    dist.all_reduce(summed)
    work = dist.all_reduce(later, op=dist.ReduceOp.AVG, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    blocks = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(blocks, x)
    whole = torch.empty(4 * size, device=device)
    dist.all_gather_into_tensor(whole, x)
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device=device))
    swapped = [torch.empty(1, device=device) for _ in range(size)]
    dist.all_to_all(swapped, list(x[:size].split(1)))
    listed = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, listed)
    scattered = torch.empty(4, device=device)
    dist.scatter(scattered, blocks if rank == 0 else None)
    received = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for one in works:
        one.wait()
    dist.barrier()
    found = [summed, doubled, *blocks, whole, part, *swapped, scattered, received]
    found += [] if listed is None else listed
    return [one.tolist() for one in found], train_a_step(device)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_frameworks_call(groups, device):
    if device == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    replies = groups.call(2, call_everything, device, environment={config.CPU_ONLY: "0"})
    for rank, (found, gradient) in enumerate(replies):
        ones, twos = [1.0] * 4, [2.0] * 4
        expected = [[3.0] * 4, [3.0] * 4, ones, twos, ones + twos]
        expected += [[[0.0, 2.0], [4.0, 6.0]][rank], [1.0], [2.0]]
        expected += [[ones, twos][rank], [twos, ones][rank]]
        assert found == expected + ([ones, twos] if rank == 0 else [])
        assert gradient == [[1.5] * 3]


def run(program, **variables):
    with environment(variables):
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
        )
    return ended.stdout.split()


def test_what_registration_loads():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = (
        "import sys, torch\n"
        "before = {*sys.modules}\n"
        "import gpucoll.integrations.torch\n"
        "print(*sorted({*sys.modules} - before))\n"
    )

    loaded = run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert [*loaded] == [
        *("gpucoll", "gpucoll.integrations", "gpucoll.integrations.torch"),
        *("gpucoll.integrations.torch.registration", "gpucoll.version"),
    ]


def test_ranks_are_forked_from_a_process_that_has_loaded_gpucoll(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = (
        "import gpucoll, threading, torch\n"
        "from gpucoll.integrations.torch import ProcessGroup\n"
        "from torch import distributed as dist, multiprocessing\n"
        "gpucoll.init(rank=0, world_size=1).close()\n"
        "print(threading.active_count(), flush=True)\n"
        "def run(rank, path):\n"
        "    dist.init_process_group('gpucoll', init_method=path, rank=rank, world_size=2)\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    assert x.item() == 2\n"
        "    dist.destroy_process_group()\n"
        f"given = 'file://{tmp_path}/store',\n"
        "multiprocessing.start_processes(run, given, 2, start_method='fork')\n"
    )

    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ["1"]


def test_modules_are_loaded_without_a_collection():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = (
        "import gc, sys, torch\n"
        "import gpucoll.integrations.torch\n"
        "dist, n_collections = torch.distributed, 0\n"
        "def count(phase, _):\n"
        "    module = sys.modules.get('gpucoll.integrations.torch.creation')\n"
        "    global n_collections\n"
        "    n_collections += module is not None and module.__spec__._initializing\n"
        "gc.callbacks.append(count)\n"
        "gc.set_threshold(10)\n"
        "dist.init_process_group('gpucoll', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(n_collections, gc.isenabled())\n"
        "dist.destroy_process_group()\n"
    )

    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ["0", "True"]


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_import_torch_registers_it(autoload):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if not importlib.metadata.entry_points(group="torch.backends", name="gpucoll"):
        pytest.skip("gpucoll is not installed, but seen through the link tree")
    program = "import torch\nprint('gpucoll' in torch.distributed.Backend.backend_list)\n"

    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == [str(autoload == "1")]
