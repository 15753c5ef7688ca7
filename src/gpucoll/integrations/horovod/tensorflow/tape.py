"""Gradient tapes whose gradients are reduced over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import Average
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.gradients import (
    LocalVariables,
    checked_groups,
    make_allreduce_grads_fn,
)

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape", "checked_layers"]


class _Reducing:
    """The part of a tape's class that differs from that of the tape that it stands for."""

    _allreduce_grads: Any
    _local: LocalVariables

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients, reduced over the ranks.

        Parameters
        ----------
        use_generic_names : bool
            Whether ranks are matched by the places of the gradients, not by the names of tensors.
        """
        grads = super().gradient(target, sources, output_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(grads)
        reduced = self._local.reduce(
            self._allreduce_grads, flat, tf.nest.flatten(sources), use_generic_names
        )
        return tf.nest.pack_sequence_as(grads, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs of variable and gradient: this rank's own, and the reduced ones."""
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, grads, strict=True))
        local = [pair for pair in pairs if pair[0] in self._local]
        return local, [pair for pair in pairs if pair[0] not in self._local]


@functools.cache
def _reducing(of: Any) -> type[Any]:
    return type(of.__name__, (_Reducing, of), {})


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape like this one, whose `gradient` reduces.

    Parameters
    ----------
    gradtape : tf.GradientTape
        With what it has recorded.
    sparse_as_dense : bool
        Whether IndexedSlices are reduced as tensors.
    gradient_predivide_factor : float
        A part of the average's division that comes before the sum.
    groups : int or list of lists of variables, optional
        Gradients that are reduced together.
    scale_local_gradients : bool
        Whether gradients of local variables are divided by the number of ranks.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    tape = object.__new__(_reducing(gradtape.__class__))
    tape.__dict__.update(gradtape.__dict__)
    tape._local = LocalVariables(process_set, scale_local_gradients)
    tape._allreduce_grads = make_allreduce_grads_fn(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        checked_groups(num_groups, groups),
        process_set,
    )
    return tape


def PartialDistributedGradientTape(
    gradtape: Any, *options: Any, local_layers: Any = None, **named: Any
) -> Any:
    """Return a `DistributedGradientTape` that leaves the gradients of some layers on this rank."""
    tape = DistributedGradientTape(gradtape, *options, **named)
    for layer in checked_layers(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def checked_layers(local_layers: Any) -> Sequence[Any]:
    """Return a list of layers.

    Raises
    ------
    ValueError
        There is something else among them.
    """
    if hasattr(local_layers, "trainable_weights"):
        return [local_layers]
    layers = list(local_layers or [])
    if not all(hasattr(x, "trainable_weights") for x in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return layers
