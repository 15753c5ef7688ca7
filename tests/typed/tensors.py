"""A user's program on PyTorch's tensors, which mypy and pyright accept as it stands."""

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import assert_type

from gpucoll import Communicator, Work
from gpucoll.integrations.torch import CompressedGradients, Options


def collectives(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    assert_type(comm.all_reduce(x), torch.Tensor)
    assert_type(comm.all_reduce([x, x], async_op=True), Work[list[torch.Tensor]])
    assert_type(comm.gather(x), torch.Tensor | None)
    comm.send(x, 1)
    return comm.recv(out=x, source=0)


def data_parallel(module: torch.nn.Module) -> torch.nn.Module:
    dist.init_process_group("gpucoll", pg_options=Options(timeout_s=30.0))
    model = torch.nn.parallel.DistributedDataParallel(module)
    CompressedGradients("int8_block").register(model)
    return model
