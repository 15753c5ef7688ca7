"""This rank's part of a data set, with as many batches as the other ranks' parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from gpucoll.integrations.native import chosen

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["shard"]


def shard(x: Any, comm: Communicator | None = None, *, seed: int = 0) -> Any:
    """Return this rank's part of x, of the same size on all ranks.

    With P ranks, rank r gets every P-th part, beginning with the r-th; what remains at the end,
    fewer than P parts, is left out. Parts are rows of arrays, elements of a `tf.data.Dataset`
    (batches, if it is batched), samples of a `DataLoader`, batches of a `PyDataset`. No rank waits
    for others.

    Parameters
    ----------
    x : array, Dataset, DataLoader, PyDataset, or a tuple, list or dict of arrays
        The same on all ranks. Arrays of one call have equally many rows.
    comm : Communicator, optional
        The ranks. Default: that of the latest `gpucoll.init`.
    seed : int
        Of the order of samples, if x is a DataLoader that shuffles; the same on all ranks. Each
        epoch has another order.

    Returns
    -------
    like x
        Arrays are views where slices of x are. A DataLoader is a new one with the same options.

    Raises
    ------
    ValueError
        There are fewer parts than ranks, or arrays have different numbers of rows.
    TypeError
        x is something else, such as a generator, whose length nobody knows; or a DataLoader with a
        sampler or an iterable data set of its own.
    """
    comm = chosen(comm, "shard")
    place = comm.rank, comm.world_size
    if isinstance(x, keras.utils.PyDataset):
        return _Part(x, *place)
    if _is(x, "tensorflow", "data", "Dataset"):
        from gpucoll.integrations.tensorflow import shard as shard_dataset

        return shard_dataset(x, comm=comm)
    if _is(x, "torch", "utils", "data", "DataLoader"):
        return _part_of_loader(x, *place, seed)
    return _part_of_arrays(x, *place)


def _is(x: Any, module: str, *path: str) -> bool:
    """Return whether x is of a class of a module that may not be imported."""
    found: Any = sys.modules.get(module)
    for name in path:
        found = getattr(found, name, None)
    return found is not None and isinstance(x, found)


def _each(n: int, n_ranks: int, what: str) -> int:
    """Return how many of n parts each rank gets."""
    if n < n_ranks:
        raise ValueError(f"{n_ranks} ranks cannot share {n} {what}: every rank needs at least one")
    return n // n_ranks


def _part_of_arrays(x: Any, rank: int, n_ranks: int) -> Any:
    arrays = keras.tree.flatten(x)
    for array in arrays:
        if not len(getattr(array, "shape", ())):
            raise TypeError(
                "shard takes arrays, a tf.data.Dataset, a DataLoader, a PyDataset, or tuples, "
                f"lists and dicts of arrays; got {type(array).__name__}"
            )
    lengths = {int(array.shape[0]) for array in arrays}
    if len(lengths) != 1:
        raise ValueError(f"the arrays have different numbers of rows: {sorted(lengths)}")
    (n,) = lengths
    end = _each(n, n_ranks, "rows") * n_ranks
    return keras.tree.map_structure(lambda array: array[rank:end:n_ranks], x)


def _part_of_loader(x: Any, rank: int, n_ranks: int, seed: int) -> Any:
    from torch.utils import data

    is_shuffled = type(x.sampler) is data.RandomSampler
    if isinstance(x.dataset, data.IterableDataset):
        raise TypeError("shard cannot divide an IterableDataset: let it yield this rank's samples")
    if x.batch_size is None or not (is_shuffled or type(x.sampler) is data.SequentialSampler):
        raise TypeError(
            "shard cannot divide a DataLoader with a sampler or batch_sampler of its own: make one "
            "with batch_size= and shuffle="
        )
    sampler = _Order(len(x.dataset), rank, n_ranks, seed if is_shuffled else None)
    options = {
        name: getattr(x, name)
        for name in (
            *("batch_size", "collate_fn", "drop_last", "generator", "multiprocessing_context"),
            *("num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "timeout"),
            "worker_init_fn",
        )
    }
    return data.DataLoader(x.dataset, sampler=sampler, **options)


class _Order:
    """A sampler: the numbers of this rank's samples, in each epoch in another order.

    Parameters
    ----------
    n : int
        The number of samples.
    rank, n_ranks : int
    seed : int or None
        None: in their own order.
    """

    def __init__(self, n: int, rank: int, n_ranks: int, seed: int | None) -> None:
        self._n, self._rank, self._n_ranks, self._seed = n, rank, n_ranks, seed
        self._each = _each(n, n_ranks, "samples")
        self._epoch = 0

    def __len__(self) -> int:
        return self._each

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._n)
        if self._seed is not None:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self._n)
            self._epoch += 1
        end = self._each * self._n_ranks
        return iter(order[self._rank : end : self._n_ranks].tolist())


class _Part(keras.utils.PyDataset):
    """Every P-th batch of a PyDataset."""

    def __init__(self, whole: Any, rank: int, n_ranks: int) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self._whole, self._rank, self._n_ranks = whole, rank, n_ranks
        self._check()

    def _check(self) -> int | None:
        n = self._whole.num_batches
        return None if n is None else _each(n, self._n_ranks, "batches")

    @property
    def num_batches(self) -> int | None:
        """The number of this rank's batches; None: there is no end."""
        return self._check()

    def __getitem__(self, index: int) -> Any:
        return self._whole[index * self._n_ranks + self._rank]

    def on_epoch_begin(self) -> None:
        """Tell the whole data set."""
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the whole data set."""
        self._whole.on_epoch_end()
