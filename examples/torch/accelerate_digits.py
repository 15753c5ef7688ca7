"""Hugging Face Accelerate on CPUs, with its loop over batches, its data loader, its model.

On CPUs Accelerate chooses "gloo" and refuses other names, but it accepts an existing process group.
So the only new line comes before `Accelerator`:

    pip install scikit-learn accelerate
    torchrun --nproc-per-node 2 examples/torch/accelerate_digits.py
    torchrun --nproc-per-node 2 examples/torch/accelerate_digits.py --backend gloo

(On GPUs `kwargs_handlers=[InitProcessGroupKwargs(backend="gpucoll")]` should do the same according
to Accelerate's code; this has not been run.) Rank 0 then trains alone on whole batches, and its
loss curve is the same up to rounding.
"""

import argparse

import digits
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(images, labels):
    """Train as users of Accelerate do; return the mean loss of each epoch, over all ranks."""
    accelerator = Accelerator(cpu=True)
    model = digits.network()
    batch = len(images) // digits.BATCHES // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(
        model, digits.optimizer_of(model), DataLoader(TensorDataset(images, labels), batch)
    )
    losses = []
    for _ in range(digits.EPOCHS):
        of_epoch = []
        for some_images, some_labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(some_images), some_labels)
            accelerator.backward(loss)
            optimizer.step()
            of_epoch.append(accelerator.gather(loss.detach()).mean())
        losses.append(float(torch.stack(of_epoch).mean()))
    return losses


def main():
    """Train on all ranks, then on rank 0 alone."""
    training, _ = digits.load()
    losses = train(*digits.batch_after_batch(*training))
    if dist.get_rank() == 0:
        digits.compare_with_one_process(losses, *training)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
