"""FSDP2 (fully_shard): every rank has a part of each weight, of its gradient and its momentum.

Before a layer is used, an all_gather collects its weights. Afterwards a reduce_scatter adds up its
gradients, of which each rank keeps its part:

    pip install scikit-learn
    torchrun --nproc-per-node 2 examples/torch/fsdp_digits.py
    torchrun --nproc-per-node 2 examples/torch/fsdp_digits.py --backend gloo

Rank 0 then trains alone on whole batches, and its loss curve is the same up to rounding.
"""

import argparse

import digits
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(model):
    """Divide every layer of a model among the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    """Train on all ranks, then on rank 0 alone."""
    training, _ = digits.load()
    model = sharded(digits.network())
    losses = digits.train(model, *training, dist.get_rank(), dist.get_world_size())
    here = sum(weight.to_local().numel() for weight in model.parameters())
    whole = sum(weight.numel() for weight in model.parameters())
    if dist.get_rank() == 0:
        print(f"rank 0 holds {here} of {whole} weights")
        digits.compare_with_one_process(losses, *training)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
