"""Lightning on CPUs: its Trainer with a DDPStrategy that gets the backend's name.

    pip install scikit-learn lightning
    torchrun --nproc-per-node 2 examples/torch/lightning_digits.py
    torchrun --nproc-per-node 2 examples/torch/lightning_digits.py --backend gloo

Without torchrun, Lightning starts the second process itself. Rank 0 then trains alone on whole
batches, and its loss curve is the same up to rounding.
"""

import argparse

import digits
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Digits(LightningModule):
    """The network, with the methods that Lightning calls."""

    def __init__(self, images, labels):
        super().__init__()
        self.images, self.labels = images, labels
        self.network = digits.network()
        self.of_epoch, self.losses = [], []

    def train_dataloader(self):
        """Return a loader of this rank's part of each batch."""
        place = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(list(digits.parts(self.images, self.labels, *place)), batch_size=None)

    def training_step(self, batch, _):
        """Return the loss of one batch."""
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.of_epoch.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        """Record the mean loss over the epoch and the ranks."""
        self.losses.append(float(self.all_gather(torch.stack(self.of_epoch)).mean()))
        self.of_epoch.clear()

    def configure_optimizers(self):
        """Return the optimizer."""
        return digits.optimizer_of(self.network)


def main(backend, ranks=2):
    """Train on all ranks, then on rank 0 alone."""
    training, _ = digits.load()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=digits.EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(*training)
    trainer.fit(model)
    if trainer.is_global_zero:
        digits.compare_with_one_process(model.losses, *training)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    main(arguments.parse_args().backend)
    dist.destroy_process_group()
