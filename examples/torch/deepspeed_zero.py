"""DeepSpeed on CPUs: ZeRO divides the optimizer's state, then the gradients, then the weights.

The same network learns the same digits with stage 1 (the state), 2 (also the gradients) and 3 (also
the weights). DeepSpeed only gets the backend's name, through `init_distributed`:

    pip install scikit-learn deepspeed
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/torch/deepspeed_zero.py
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/torch/deepspeed_zero.py --backend gloo

Rank 0 then trains alone on whole batches, and its loss curve is the same up to rounding.
"""

import argparse

import deepspeed
import digits
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

# Otherwise DeepSpeed takes half a minute to compile a shared-memory all_reduce for inference.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage):
    """Return DeepSpeed's engine for the network and its optimizer."""
    model = digits.network(dtype=torch.float32)
    settings = {
        "train_batch_size": digits.TRAINING_IMAGES // digits.BATCHES,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=digits.optimizer_of(model), config=settings)[
        0
    ]


def train(engine, images, labels):
    """Train, and return the mean loss of each epoch, over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for _ in range(digits.EPOCHS):
        total = torch.zeros(())
        for some_images, some_labels in digits.parts(images, labels, rank, world_size):
            loss = cross_entropy(engine(some_images), some_labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        losses.append(float(digits.mean_over_ranks(total / digits.BATCHES)))
    return losses


def main():
    """Train with each stage on all ranks, then on rank 0 alone."""
    training, _ = digits.load(torch.float32)
    for stage in (1, 2, 3):
        losses = train(engine_of(stage), *training)
        if dist.get_rank() == 0:
            print(f"ZeRO, stage {stage}")
            digits.compare_with_one_process(losses, *training)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    deepspeed.init_distributed(dist_backend=arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
