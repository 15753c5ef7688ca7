"""Gradients are added up over several backward passes, and reduced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.tensorflow.gradients import LocalVariables, as_dense

__all__ = ["LocalGradientAggregation"]


class LocalGradientAggregation:
    """Sums of gradients, for graphs and for eager mode.

    Parameters
    ----------
    backward_passes_per_step : int
        How many passes make a step.
    allreduce_func : callable
        Reduces: ``f(gradients, variables)``.
    sparse_as_dense : bool
        Whether IndexedSlices become tensors; otherwise they are refused.
    average_aggregated_gradients : bool
        Whether the sum is divided by the number of passes.
    local_variables : LocalVariables
        Those whose gradients are not reduced.
    name : str
        A prefix for the variables.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., list[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        local_variables: LocalVariables,
        name: str = "",
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.local_variables = local_variables
        self._reduce, self._sparse_as_dense = allreduce_func, sparse_as_dense
        self._averages, self._name = average_aggregated_gradients, name
        self._sums: dict[int, Any] = {}
        self.counter = self._variable("aggregation_counter", tf.zeros([], tf.int32))
        """Backward passes since the last reduction."""

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self.local_variables.add(variable)

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients to the sums; return the reduced sums if this pass ends a step.

        Otherwise the result is not to be applied: see `apply_gradients`.
        """
        grads = [self._checked(grad) for grad in grads]
        there = [i for i, grad in enumerate(grads) if grad is not None]
        for i in there:
            if i not in self._sums:
                shape = grads[i].shape
                self._sums[i] = self._variable(str(i), tf.zeros(shape, grads[i].dtype))
        with tf.control_dependencies([self._sums[i].assign_add(grads[i]) for i in there]):
            count = self.counter.assign_add(1, read_value=True)
        with tf.control_dependencies([count]):
            sums = [self._sums[i].read_value() for i in there]

        def reduced() -> list[Any]:
            results = self.local_variables.reduce(self._reduce, sums, [variables[i] for i in there])
            if self._averages:
                results = [x / self.backward_passes_per_step for x in results]
            with tf.control_dependencies(results):
                zeros = [self._sums[i].assign(tf.zeros_like(self._sums[i])) for i in there]
                zeros.append(self.counter.assign(0))
            with tf.control_dependencies(zeros):
                return [tf.identity(x) for x in results]

        done = tf.cond(tf.equal(count, self.backward_passes_per_step), reduced, lambda: sums)
        done = done if isinstance(done, (list, tuple)) else [done]
        results: list[Any] = [None] * len(grads)
        for i, grad in zip(there, done, strict=True):
            results[i] = grad
        return results

    def apply_gradients(
        self, grads: Sequence[Any], apply: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Call `apply` after the pass that ends a step, and `skip` after the others."""
        with tf.control_dependencies([x for x in grads if x is not None]):
            return tf.cond(tf.equal(self.counter, 0), apply, skip)

    def _checked(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
                "`sparse_as_dense` is False."
            )
        return as_dense(grad)

    def _variable(self, name: str, initial: Any) -> Any:
        if tf.compat.v1.executing_eagerly_outside_functions():
            with tf.init_scope():
                return tf.Variable(tf.zeros(initial.shape, initial.dtype), trainable=False)
        return tf.compat.v1.Variable(
            tf.zeros(initial.shape, initial.dtype),
            trainable=False,
            name=f"aggregation_variables_{self._name}/{name}",
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )
