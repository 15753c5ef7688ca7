"""Optimizers that reduce gradients: those of TensorFlow 1, here; of Keras, in `_keras`."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import Adasum, Average
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.gradient_aggregation import LocalGradientAggregation
from gpucoll.integrations.horovod.tensorflow.gradients import (
    LocalVariables,
    checked_groups,
    make_allreduce_grads_fn,
)
from gpucoll.integrations.horovod.tensorflow.reductions import allreduce
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = ["DistributedOptimizer"]

_OPTIMIZER = tf.compat.v1.train.Optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like this one that reduces gradients over the ranks.

    Parameters
    ----------
    optimizer : tf.compat.v1.train.Optimizer, or an optimizer of Keras
    op : Average, Sum, or Adasum
        Adasum only with optimizers of TensorFlow 1: it combines the steps, not the gradients.
    backward_passes_per_step : int
        How many passes' gradients are added up before they are reduced.
    average_aggregated_gradients : bool
        Whether that sum is divided by the number of passes.
    gradient_predivide_factor, groups, scale_local_gradients
        As for `DistributedGradientTape`.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    groups = checked_groups(num_groups, groups)
    devices = {"device_dense": device_dense, "device_sparse": device_sparse}
    if isinstance(optimizer, _OPTIMIZER) and op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support process sets yet")
        options = {**devices, "compression": compression}
        return _AdasumOptimizer(optimizer, name, use_locking, backward_passes_per_step, options)
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    reducing = {
        **devices,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "process_set": process_set,
    }
    passes = backward_passes_per_step, average_aggregated_gradients
    if isinstance(optimizer, _OPTIMIZER):
        local = LocalVariables(process_set, scale_local_gradients)
        return _ReducingOptimizer(optimizer, name, use_locking, reducing, local, passes)
    from gpucoll.integrations.horovod.tensorflow._keras.optimizer import (
        Reducing,
        reducing_optimizer,
    )

    return reducing_optimizer(optimizer, Reducing(name, reducing, scale_local_gradients, *passes))


class _Around(tf.compat.v1.train.Optimizer):
    """An optimizer that another one does the work for."""

    _optimizer: Any

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.compute_gradients(*args, **kwargs)


class _ReducingOptimizer(_Around):
    """Reduces what `compute_gradients` returns."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducing: dict[str, Any],
        local: LocalVariables,
        passes: tuple[int, bool],
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer, self._local = optimizer, local
        self._allreduce_grads = make_allreduce_grads_fn(name, **reducing)
        self._agg_helper = None
        if passes[0] > 1:
            if _executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 is not yet supported for _LegacyOptimizer with "
                    "eager execution."
                )
            sparse = reducing["sparse_as_dense"]
            self._agg_helper = LocalGradientAggregation(
                passes[0], self._allreduce_grads, sparse, passes[1], local, name
            )

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return reduced gradients, each with its variable."""
        grads, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(grads, variables)
        else:
            reduced = self._local.reduce(self._allreduce_grads, grads, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply them; after a pass that does not end a step, only count."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def skip() -> Any:
            if global_step is None:
                return tf.no_op()
            return tf.group(global_step.assign_add(tf.ones([], global_step.dtype)))

        if self._agg_helper is None:
            return apply()
        return self._agg_helper.apply_gradients([grad for grad, _ in pairs], apply, skip)


class _AdasumOptimizer(_Around):
    """Lets each rank make its step, and combines by Adasum how far each variable has moved."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        backward_passes_per_step: int,
        options: dict[str, Any],
    ) -> None:
        super().__init__(
            name=name or f"DistributedDelta{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer, self._options = optimizer, options
        self._passes = backward_passes_per_step
        self._starts: dict[Any, Any] = {}
        self._steps: Any = None

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply this rank's gradients, and combine after the last pass of a step."""
        pairs = [(grad, x) for grad, x in grads_and_vars if grad is not None]
        variables = [x for _, x in pairs]
        before = self._begin(variables)
        with tf.control_dependencies(before):
            step = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([step] if step is not None else []):
            count = self._steps.assign_add(1, read_value=True)
        with tf.control_dependencies([count]):
            is_last = tf.equal(tf.math.floormod(count, self._passes), 0)
            return tf.group(*[self._combine(is_last, x) for x in variables])

    def _begin(self, variables: list[Any]) -> list[Any]:
        """Note where the variables stand before a step; return the ops that do."""
        make = functools.partial(tf.compat.v1.Variable, trainable=False)
        with tf.init_scope() if _executing_eagerly() else tf.name_scope(self._name):
            if self._steps is None:
                self._steps = make(tf.zeros([], tf.int64), name="step_count")
            for x in variables:
                if x.ref() not in self._starts:
                    zeros = tf.zeros(x.shape, x.dtype.base_dtype)
                    self._starts[x.ref()] = make(zeros, name="delta_start")
        is_first = tf.equal(tf.math.floormod(self._steps, self._passes), 0)

        def note(x: Any) -> Any:
            return tf.group(self._starts[x.ref()].assign(x))

        return [tf.cond(is_first, functools.partial(note, x), tf.no_op) for x in variables]

    def _combine(self, is_last: Any, x: Any) -> Any:
        start = self._starts[x.ref()]

        def combine() -> Any:
            moved = allreduce(x - start, op=Adasum, **self._options)
            return tf.group(x.assign(start + moved))

        return tf.cond(is_last, combine, tf.no_op)
