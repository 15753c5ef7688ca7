"""Tensor parallelism: every rank has some heads of each attention and some rows of each network.

A small GPT learns Python's manual. Of each layer that widens, a rank has some columns; of the next
layer it has the matching rows. So one all_reduce after each such pair is the only communication:

    torchrun --nproc-per-node 2 examples/torch/tensor_parallel_gpt.py
    torchrun --nproc-per-node 2 examples/torch/tensor_parallel_gpt.py --backend gloo

Rank 0 then trains the whole model alone, and its losses are the same up to rounding.
"""

import argparse

import small_gpt
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def main(steps=20):
    """Train on all ranks, then on rank 0 alone."""
    config = small_gpt.Config()
    model = small_gpt.build(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[1:-1]:
        parallelize_module(block, mesh, PLAN)
    losses = small_gpt.train(model, config, steps)
    if dist.get_rank() == 0:
        small_gpt.compare_with_one_process(losses, config)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
