"""Optimizers of Keras that reduce gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.gradient_aggregation import LocalGradientAggregation
from gpucoll.integrations.horovod.tensorflow.gradients import (
    LocalVariables,
    make_allreduce_grads_fn,
)

__all__ = ["Reducing", "reducing_optimizer", "take_state", "variables_of"]


@dataclass(frozen=True)
class Reducing:
    """How a class of optimizers reduces.

    Parameters
    ----------
    name : str or None
        The optimizer's; None: "Distributed" and the class's.
    how : dict
        The parameters of `make_allreduce_grads_fn`.
    scale_local_gradients : bool
        Whether gradients of local variables are divided by the number of ranks.
    backward_passes_per_step : int
    average_aggregated_gradients : bool
    """

    name: str | None
    how: dict[str, Any]
    scale_local_gradients: bool = True
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    @property
    def process_set(self) -> ProcessSet:
        return self.how.get("process_set", global_process_set)  # type: ignore[no-any-return]


def reducing_optimizer(optimizer: Any, reducing: Reducing) -> Any:
    """Return an optimizer with the same settings, of a class made of this one's.

    The new class has the old one's name, so that a saved model can be loaded without gpucoll.
    """
    of = type(optimizer)
    is_keras_2 = hasattr(of, "compute_gradients") or hasattr(of, "_compute_gradients")
    if not is_keras_2:
        _check_keras_3(optimizer, reducing)
    base = _Keras2 if is_keras_2 else _Keras3
    made = type(of.__name__, (base, of), {"_reducing": reducing, "__module__": of.__module__})
    return made.from_config(optimizer.get_config())  # type: ignore[attr-defined]


def _check_keras_3(optimizer: Any, reducing: Reducing) -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "horovod.keras reduces gradients by ops of TensorFlow; Keras runs on "
            f"{keras.backend.backend()} here: set KERAS_BACKEND=tensorflow, or use "
            "gpucoll's own integration of that framework"
        )
    if reducing.backward_passes_per_step > 1:
        raise ValueError(
            "backward_passes_per_step > 1 works with Keras 2 only: Keras 3 has it itself; pass "
            f"gradient_accumulation_steps={reducing.backward_passes_per_step} to "
            f"{type(optimizer).__name__}"
        )


class _Reduces:
    """The part that both kinds of Keras share."""

    _reducing: Reducing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reducing = self._reducing
        label = reducing.name or f"Distributed{type(self).__name__}"
        self._allreduce_grads = make_allreduce_grads_fn(label, **reducing.how)
        self._local = LocalVariables(reducing.process_set, reducing.scale_local_gradients)
        self._agg_helper: LocalGradientAggregation | None = None
        if reducing.backward_passes_per_step > 1:
            self._agg_helper = LocalGradientAggregation(
                reducing.backward_passes_per_step,
                self._allreduce_grads,
                reducing.how.get("sparse_as_dense", False),
                reducing.average_aggregated_gradients,
                self._local,
                label,
            )

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(var)

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._agg_helper is not None:
            return self._agg_helper.compute_gradients(grads, variables)
        return self._local.reduce(self._allreduce_grads, grads, variables)


class _Keras2(_Reduces):
    """Reduces where gradients are computed: `minimize` and `fit` do so, a tape does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = self._reducing.name or f"Distributed{type(self).__name__}"

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Return reduced gradients, each with its variable."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[Any]:
        base: Any = super()
        tape = tf.GradientTape() if tape is None else tape
        if hasattr(base, "_compute_gradients"):
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = base.compute_gradients(loss, var_list, tape=tape)
        grads, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Return reduced gradients, while a graph is built."""
        base: Any = super()
        return self._allreduce(base.get_gradients(loss, params), params)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients; after a pass that does not end a step, only count."""
        base: Any = super()
        if self._agg_helper is None:
            return base.apply_gradients(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        iterations = self.iterations  # type: ignore[attr-defined]

        def apply() -> Any:
            base.apply_gradients(pairs, *args, **kwargs)
            return iterations.read_value()

        def skip() -> Any:
            return iterations.assign_add(1, read_value=True) + 0

        return self._agg_helper.apply_gradients([grad for grad, _ in pairs], apply, skip)


class _Keras3(_Reduces):
    """Reduces where gradients are applied: `fit`, and programs' own steps, all do so."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduce gradients and apply them."""
        base: Any = super()
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables  # type: ignore[attr-defined]
        return base.apply(self._allreduce(list(grads), list(variables)), trainable_variables)


def take_state(optimizer: Any, other: Any, variables: Sequence[Any]) -> None:
    """Give an optimizer the state of another of the same kind, for a model's variables."""
    build = getattr(optimizer, "build", None) or optimizer._create_all_weights
    build(variables)
    for mine, its in zip(variables_of(optimizer), variables_of(other), strict=False):
        mine.assign(its)  # one that has not been trained has fewer


def variables_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables: a list in some versions of Keras, a method in others."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)
