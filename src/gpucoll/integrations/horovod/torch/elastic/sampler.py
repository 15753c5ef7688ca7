"""A sampler that knows which samples of an epoch were used, and divides the others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from gpucoll.integrations.horovod import basics

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):
    """Divides the samples of an epoch that no rank has used yet among the ranks.

    As an attribute of a `TorchState` it divides them anew when the ranks change. Call
    `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Parameters
    ----------
    dataset : sized
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """How many samples of this epoch all ranks together have used."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample was used."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of every rank as used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the ranks that there are."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        filled = self.remaining_indices
        while filled and len(filled) < self.total_size:  # as many samples on every rank
            filled = filled + filled[: self.total_size - len(filled)]
        return iter(filled[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
