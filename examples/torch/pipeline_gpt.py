"""Pipeline parallelism: every rank has some layers, and sends their outputs to the next rank.

A small GPT learns Python's manual, once with GPipe's schedule (all micro-batches forward, then all
backward) and once with 1F1B (one forward, one backward, which keeps fewer of them in memory):

    torchrun --nproc-per-node 2 examples/torch/pipeline_gpt.py
    torchrun --nproc-per-node 2 examples/torch/pipeline_gpt.py --backend gloo

The last rank, which has the losses, then trains the whole model alone, with the same losses up to
rounding.
"""

import argparse

import small_gpt
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICRO_BATCHES = 4


def stage_of(model, rank, world_size):
    """Return this rank's stage: some consecutive parts of the model."""
    first, end = (len(model) * r // world_size for r in (rank, rank + 1))
    return PipelineStage(model[first:end], rank, world_size, torch.device("cpu"))


def train(schedule_type, config, steps):
    """Train over all ranks; return the loss of each step on the last rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage = stage_of(small_gpt.build(config), rank, world_size)
    schedule = schedule_type(stage, MICRO_BATCHES, loss_fn=small_gpt.loss_of)
    optimizer = small_gpt.optimizer_of(stage.submod)
    losses = []
    for inputs, targets in small_gpt.batches(config, steps):
        optimizer.zero_grad()
        of_micro_batches = []
        schedule.step(
            *([inputs] if rank == 0 else []),
            **({"target": targets, "losses": of_micro_batches} if rank == world_size - 1 else {}),
        )
        optimizer.step()
        if rank == world_size - 1:
            losses.append(float(torch.stack(of_micro_batches).detach().mean()))
    return losses


def main(steps=15):
    """Train with each schedule on all ranks, then on the last rank alone."""
    config = small_gpt.Config()
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        losses = train(schedule_type, config, steps)
        if losses:
            print(schedule_type.__name__)
            small_gpt.compare_with_one_process(losses, config)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
