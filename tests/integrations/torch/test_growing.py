"""A process group is made anew when the communicator beside it has grown, or has shrunk."""

from __future__ import annotations

import os

import gpucoll
from gpucoll import config


def renew(comm, path):
    """Make the process group of all ranks of a communicator, in place of an earlier one."""
    from torch import distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    where = f"file://{path}-{comm.epoch}"
    dist.init_process_group(
        "gpucoll", init_method=where, rank=comm.rank, world_size=comm.world_size
    )


def train_and_grow(seat, path):
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ[config.JOB] = seat.token
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0 if seat.rank < 2 else 0.0)
    found = []
    if seat.rank == 2:
        comm = gpucoll.join(timeout_s=20)
    else:
        comm = gpucoll.init(rank=seat.rank, world_size=2, timeout_s=20, name="old")
        renew(comm, path)
        found.append(one_step(model))
        comm = comm.grow(wait_s=20)
    renew(comm, path)
    try:
        found.append(one_step(DistributedDataParallel(model)))  # hands rank 0's weights over
        return found, model.weight.tolist(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
        comm.close()


def one_step(model):
    import torch
    from torch import distributed as dist

    model(torch.ones(1, 3)).sum().backward()
    total = torch.ones(2)
    dist.all_reduce(total)
    return total.tolist()


def test_a_process_group_grows_with_its_communicator(torch_server, tmp_path):
    with torch_server.fork(3) as pool:
        pool.start(train_and_grow, str(tmp_path / "group"), gives="seat")
        replies = pool.results()

    assert [found for found, _, _ in replies] == [[[2.0] * 2, [3.0] * 2]] * 2 + [[[3.0] * 2]]
    assert all(weight == [[1.0] * 3] for _, weight, _ in replies)
    assert [size for _, _, size in replies] == [3] * 3
