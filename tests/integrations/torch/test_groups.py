"""Process groups: how they are made, found, made again and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll
from gpucoll.errors import RendezvousDeadlineError

TORCHRUN_LIMIT_S = 100


def total(group=None):
    import torch
    from torch import distributed as dist

    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=group)
    return x.item()


def say_what_torch_asks():
    import torch
    from torch import distributed as dist

    group = dist.group.WORLD
    return {
        "backend": dist.get_backend(),
        "place": (dist.get_rank(), dist.get_world_size(), group.rank(), group.size()),
        "name": (group.name(), group.group_name, group._get_backend_name()),
        "devices": [str(device) for device in group._device_types],
        "capable": dist.is_backend_available("gpucoll"),
        "text": repr(group),
        "communicator": group.comm.rank,
        "is itself": group._get_backend(torch.device("cpu")) is group,
        "desc": group.group_desc,
    }


def test_what_torch_asks_a_group(groups):
    answers = groups.call(2, say_what_torch_asks)

    for rank, answer in enumerate(answers):
        assert answer["backend"] == "gpucoll"
        assert answer["place"] == (rank, 2, rank, 2)
        assert answer["name"] == ("gpucoll", "0", "gpucoll")
        assert answer["devices"][0] == "cpu"
        assert answer["capable"]
        assert answer["text"] == f"<gpucoll process group '0', rank {rank} of 2>"
        assert answer["communicator"] == rank
        assert answer["is itself"]


def use_subgroups():
    from torch import distributed as dist

    rank = dist.get_rank()
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    lone = dist.new_group([2])
    reversed_ = dist.new_group([3, 1, 0], sort_ranks=False) if rank != 2 else None
    if rank == 2:
        dist.new_group([3, 1, 0], sort_ranks=False)
    found = {
        "pair": total(pair),
        "lone": total(lone) if rank == 2 else dist.get_rank(lone),
        "reversed": None if rank == 2 else (dist.get_rank(reversed_), total(reversed_)),
        "again": total(),
    }
    for group in (pair, lone, reversed_):
        if group is not None and dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    found["after"] = total()
    return found


def test_subgroups(groups):
    found = groups.call(4, use_subgroups)

    assert [one["pair"] for one in found] == [3.0, 3.0, 7.0, 7.0]
    assert [one["lone"] for one in found] == [-1, -1, 3.0, -1]
    assert [one["reversed"] for one in found] == [(2, 7.0), (1, 7.0), None, (0, 7.0)]
    assert [(one["again"], one["after"]) for one in found] == [(10.0, 10.0)] * 4


def use_a_mesh():
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    found = [total(mesh.get_group(name)) for name in ("rows", "columns")]
    return [*found, dist.get_backend(mesh.get_group("rows"))]


def test_a_mesh(groups):
    assert groups.call(4, use_a_mesh) == [
        [4.0, 3.0, "gpucoll"],
        [6.0, 3.0, "gpucoll"],
        [4.0, 7.0, "gpucoll"],
        [6.0, 7.0, "gpucoll"],
    ]


def make_many(count):
    from torch import distributed as dist

    def state():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")

    for number in range(count):
        group = dist.new_group([0, 1])
        assert total(group) == 3.0
        dist.destroy_process_group(group)
        if number == 20:
            before = state()
    return before, state()


def test_a_thousand_groups_leave_nothing(groups):
    for (fds, maps), (later_fds, later_maps) in groups.call(2, make_many, 1000):
        assert later_fds <= fds
        assert later_maps <= maps + 5  # of the heap


def make_again(count):
    from torch import distributed as dist

    rank, world_size, store = dist.get_rank(), dist.get_world_size(), dist.group.WORLD._store
    totals = []
    for _ in range(count):
        dist.destroy_process_group()
        dist.init_process_group("gpucoll", store=store, rank=rank, world_size=world_size)
        totals.append((total(), total(dist.new_group([0, 1]))))
    return totals


def test_a_group_made_again_by_the_same_store(groups):
    assert groups.call(2, make_again, 5) == [[(3.0, 3.0)] * 5] * 2


def come_alone():
    import datetime

    from torch import distributed as dist

    soon = datetime.timedelta(seconds=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="rank 0 of 2: rank 1 did not come") as info:
            dist.new_group([0, 1], timeout=soon)
        assert isinstance(info.value, RendezvousDeadlineError)
    return total()


def test_a_group_whose_members_did_not_all_come(groups):
    assert groups.call(2, come_alone) == [3.0, 3.0]


def abort_one():
    import torch
    from torch import distributed as dist

    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        group.abort()
        return None
    while True:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except dist.DistBackendError as error:
            return type(error).__name__


def test_abort(groups):
    assert groups.call(2, abort_one)[1] == "AbortedError"


def pickle_a_group():
    import pickle

    from torch import distributed as dist

    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(dist.group.WORLD)
    return pickle.loads(pickle.dumps(dist.get_backend()))


def test_a_group_belongs_to_its_process(groups):
    assert groups.call(2, pickle_a_group) == ["gpucoll"] * 2


def see_options():
    from torch import distributed as dist

    text = str(dist.group.WORLD.comm.describe())
    return "order" in text, dist.group.WORLD.options.timeout_s


def test_options(groups):
    given = {"deterministic": "order", "timeout_s": 7.5}

    assert groups.call(2, see_options, options=given) == [(True, 7.5)] * 2


@pytest.fixture
def torchrun(tmp_path):
    """Run a program on ranks as users do; return what it wrote."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = str(Path(gpucoll.__file__).parent.parent)

    def run(program, *options, **environment):
        (tmp_path / "program.py").write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
        ended = subprocess.run(
            [*command, str(tmp_path / "program.py")],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCHRUN_LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-5000:]
        return ended.stdout

    return run


RESTARTED = """\
import os, signal, sys
import gpucoll.integrations.torch
import torch
from torch import distributed as dist

dist.init_process_group("gpucoll")
x = torch.ones(1)
dist.all_reduce(x)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "0":
    dist.barrier()
sys.stdout.write(f"attempt {attempt}: {x.item()}\\n")
dist.destroy_process_group()
"""


def test_torchrun_restarts_ranks_that_were_killed(torchrun):
    written = torchrun(RESTARTED, "--nproc-per-node=2", "--max-restarts=1")

    assert written.splitlines() == ["attempt 1: 2.0"] * 2
