"""DistributedDataParallel: every rank has a part of each batch, and all have the same weights.

A network learns handwritten digits. Only the name of the backend refers to gpucoll:

    pip install scikit-learn
    torchrun --nproc-per-node 2 examples/torch/ddp_digits.py
    torchrun --nproc-per-node 2 examples/torch/ddp_digits.py --backend gloo

Rank 0 then trains alone on whole batches, and its loss curve is the same up to rounding.
"""

import argparse

import digits
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def accuracy_of(model, images, labels):
    """Return the fraction of the images that are recognised; every rank tests some of them."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(right)
    return float(right) / len(labels)


def main():
    """Train on all ranks, then on rank 0 alone."""
    training, test = digits.load()
    model = DistributedDataParallel(digits.network())
    losses = digits.train(model, *training, dist.get_rank(), dist.get_world_size())
    accuracy = accuracy_of(model.module, *test)
    if dist.get_rank() == 0:
        print(f"accuracy on other images: {accuracy:.1%}")
        digits.compare_with_one_process(losses, *training)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
