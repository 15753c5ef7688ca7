"""Elastic training with PyTorch, whose losses must be those of one process.

    gpucoll-run --elastic 2:4 -m gpucoll.integrations.horovod elastic_torch.py STEPS RANK:STEP...

Each batch has 12 samples, which 1, 2, 3 or 4 ranks divide, and train alike. Rank RANK of
those that were started first kills itself in step STEP, in the middle of the backward pass. The
last line of rank 0 is a JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import horovod.torch as hvd
import torch

SAMPLES = 12


def made():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(step):
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 5, generator=random)
    return inputs, inputs.sum(1, keepdim=True)


def loss_of(model, step, rank=0, size=1):
    """Return the mean over this rank's samples; ranks have equally many."""
    inputs, targets = (part[rank::size] for part in batch_of(step))
    return torch.nn.functional.mse_loss(model(inputs), targets)


def alone(steps):
    """Return the losses of one process."""
    model, optimizer = made()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    steps = int(sys.argv[1])
    deadly = dict(map(int, pair.split(":")) for pair in sys.argv[2:])
    torch.set_num_threads(1)
    hvd.init()
    dies_in = None if "GPUCOLL_JOIN" in os.environ else deadly.get(hvd.rank())
    model, optimizer = made()
    first = model[0].weight
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        while state.step < steps:
            optimizer.zero_grad()
            loss = loss_of(model, state.step, hvd.rank(), hvd.size())
            if state.step == dies_in:
                first.register_hook(die)
            loss.backward()
            optimizer.step()
            state.losses = [*state.losses, hvd.allreduce(loss.detach(), name="loss").item()]
            state.sizes = {*state.sizes, hvd.size()}
            state.step += 1
            state.commit()
            time.sleep(float(os.environ.get("PAUSE_S", "0")))

    state = hvd.elastic.TorchState(model, optimizer, step=0, losses=[], sizes=set())
    train(state)
    weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
    if hvd.rank() == 0:
        apart = max(abs(a - b) / b for a, b in zip(state.losses, alone(steps), strict=True))
        told = {"apart": apart, "sizes": sorted(state.sizes), "last": state.losses[-1]}
        print(json.dumps({**told, "alike": all(each == weights[0] for each in weights)}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
