"""Data-parallel training: gradients, variables and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gpucoll import Communicator, ReduceOp
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError
from gpucoll.integrations.tensorflow.call_sites import site_of
from gpucoll.integrations.tensorflow.collectives import all_reduce, broadcast

__all__ = ["DistributedGradientTape", "broadcast_variables", "shard"]


class DistributedGradientTape:
    """A gradient tape whose gradients are combined over the ranks, all in one call.

    Parameters
    ----------
    tape : tf.GradientTape
        Entered or not: ``with DistributedGradientTape(tf.GradientTape()) as tape``, or made around
        a tape that has recorded.
    comm : Communicator, optional
        Default: that of `gpucoll.init`.
    op : str or ReduceOp
        Default: the mean.

    Notes
    -----
    Everything else of the tape (`watch`, `stop_recording`, `jacobian`, ...) is the tape's own, and
    is not combined.
    """

    @tf.autograph.experimental.do_not_convert
    def __init__(
        self, tape: tf.GradientTape, comm: Communicator | None = None, op: str | ReduceOp = "avg"
    ) -> None:
        site_of(comm, Collective.ALL_REDUCE, op)  # wrong options are errors here
        self._tape, self._comm, self._op = tape, comm, op

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *options: Any, **named: Any) -> Any:
        """Return the gradients, combined over the ranks.

        Every rank must have gradients of the same sources: None stays None, and is not sent.

        Parameters
        ----------
        target, sources, *options, **named
            As for `tf.GradientTape.gradient`.
        """
        gradients = self._tape.gradient(target, sources, *options, **named)
        flat = list(tf.nest.flatten(gradients))
        present = [i for i, x in enumerate(flat) if x is not None]
        reduced = all_reduce([flat[i] for i in present], self._op, comm=self._comm)
        for i, x in zip(present, reduced, strict=True):
            flat[i] = x
        return tf.nest.pack_sequence_as(gradients, flat)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Sequence[Any], root: int = 0, *, comm: Communicator | None = None
) -> None:
    """Assign the root's values to the variables of every rank, in one call.

    Parameters
    ----------
    variables : sequence of tf.Variable or keras.Variable
        In the same order on every rank.
    root : int
        The rank whose values are kept.
    comm : Communicator, optional
        Default: that of `gpucoll.init`.
    """
    variables = list(variables)
    values = [tf.convert_to_tensor(x) for x in variables]
    for variable, value in zip(variables, broadcast(values, root, comm=comm), strict=True):
        variable.assign(value)


@tf.autograph.experimental.do_not_convert
def shard(dataset: tf.data.Dataset, *, comm: Communicator | None = None) -> tf.data.Dataset:
    """Return this rank's part of a dataset: on every rank the same number of elements.

    Of every P elements rank r gets element r; what is left over at the end is dropped, so that all
    ranks take the same number of steps. Shard before `batch`, and give `shuffle` a seed if it comes
    before: every rank must see the same order.

    Parameters
    ----------
    dataset : tf.data.Dataset
        The same on every rank. Every rank reads all of it; of files, shard the list of names.
    comm : Communicator, optional
        Default: that of `gpucoll.init`.

    Raises
    ------
    ArgumentError
        There is less than one element for each rank.
    """
    site = site_of(comm, Collective.BARRIER)
    n_ranks, rank = site.world_size, site.rank
    n = int(dataset.cardinality())
    if n == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(n_ranks, rank)
    if n == tf.data.UNKNOWN_CARDINALITY:
        # A window is a dataset; of elements with several parts, a structure of datasets.
        def mine(*parts: Any) -> Any:
            window: Any = parts[0] if len(parts) == 1 else parts
            if not isinstance(window, tf.data.Dataset):
                window = tf.data.Dataset.zip(window)
            return window.skip(rank).take(1)

        return dataset.window(n_ranks, drop_remainder=True).flat_map(mine)
    if n < n_ranks:
        raise ArgumentError(f"shard: {n} elements are too few for {n_ranks} ranks")
    return dataset.take(n // n_ranks * n_ranks).shard(n_ranks, rank)
