"""Optimizers whose gradients are averaged over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from gpucoll.integrations.keras.gradients import all_reduce
from gpucoll.integrations.native import chosen

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["DistributedOptimizer", "communicator_of"]

_COMMUNICATOR = "gpucoll_communicator"
_REPLACED = ("apply", "stateless_apply")


def DistributedOptimizer(optimizer: Any, comm: Communicator | None = None) -> Any:  # noqa: N802
    """Make an optimizer average gradients over all ranks before it uses them, and return it.

    All gradients of a step go in one fused call for each dtype, before they are accumulated,
    checked for overflow, unscaled and clipped. `fit` and steps of your own (``apply``,
    ``apply_gradients``, ``stateless_apply``) do so alike. The optimizer itself is changed, with the
    state that it has; it is saved as what it was, so a model can be loaded without gpucoll. A
    loaded model's optimizer is passed to this function again.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer or str
        A `LossScaleOptimizer`, which mixed precision needs, goes around it or into it: the averages
        are checked for overflow, so all ranks leave out the same steps.
    comm : Communicator, optional
        The ranks. Default: that of the latest `gpucoll.init`.

    Returns
    -------
    keras.optimizers.Optimizer
        The one that was passed; for a str: a new one.

    Raises
    ------
    ValueError
        The optimizer averages over another communicator already.
    gpucoll.MismatchError
        In a step: the ranks' models differ. Backends that compile raise it as their own error.

    Notes
    -----
    On PyTorch gradients are averaged in their own memory. Sparse gradients of TensorFlow
    (`IndexedSlices`) become dense. A scale of float8 training, which Keras passes as a gradient,
    becomes the largest of the ranks'. Cost: an all_reduce of the size of the trainable weights.
    """
    optimizer = keras.optimizers.get(optimizer)
    comm = chosen(comm, "DistributedOptimizer")
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaling:
        _give_back(optimizer.inner_optimizer)
    known = communicator_of(optimizer)
    if known is comm:
        return optimizer
    if known is not None:
        raise ValueError(f"this optimizer averages over {known!r} already, and not over {comm!r}")
    setattr(optimizer, _COMMUNICATOR, comm)
    optimizer.apply = _averaging_apply(optimizer, optimizer.apply, comm)
    if is_scaling:  # others end in apply
        optimizer.stateless_apply = _averaging_stateless(optimizer, comm)
    return optimizer


def communicator_of(optimizer: Any) -> Communicator | None:
    """Return what an optimizer averages over; None: it does not."""
    return getattr(optimizer, _COMMUNICATOR, None)


def _averaging_apply(
    optimizer: Any, apply: Callable[..., Any], comm: Communicator
) -> Callable[..., Any]:
    def averaging_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = trainable_variables
        variables = optimizer._trainable_variables if variables is None else [*variables]
        return apply(_averages(comm, grads, variables), trainable_variables)

    return averaging_apply


def _averaging_stateless(optimizer: Any, comm: Communicator) -> Callable[..., Any]:
    apply = optimizer.stateless_apply

    def averaging_stateless_apply(
        optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        averages = _averages(comm, grads, optimizer._trainable_variables)
        return apply(optimizer_variables, averages, trainable_variables)

    return averaging_stateless_apply


def _averages(comm: Communicator, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return averages of gradients; None stays, and what overwrites its variable is a maximum."""
    result = list(grads)
    places: dict[str, list[int]] = {"avg": [], "max": []}
    for place, (gradient, variable) in enumerate(zip(result, variables, strict=False)):
        if gradient is not None:
            is_new_value = getattr(variable, "overwrite_with_gradient", False)
            places["max" if is_new_value else "avg"].append(place)
    for op, which in places.items():
        found = all_reduce(comm, [result[place] for place in which], op)
        for place, value in zip(which, found, strict=True):
            result[place] = value
    return result


def _give_back(optimizer: Any) -> Communicator | None:
    """Make an optimizer use gradients as they are again; return what it averaged over."""
    comm = communicator_of(optimizer)
    if comm is not None:
        for name in (_COMMUNICATOR, *_REPLACED):
            vars(optimizer).pop(name, None)
    return comm


def _take_over() -> None:
    """Let a LossScaleOptimizer average instead of the optimizer that it gets.

    `compile` makes one around the model's optimizer with the policy "mixed_float16". It leaves out
    steps whose gradients overflow: on one rank alone, if they were averaged behind it.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    begin = scaling.__init__

    @functools.wraps(begin)
    def __init__(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        begin(self, inner_optimizer, *args, **kwargs)
        comm = _give_back(inner_optimizer)
        if comm is not None:
            DistributedOptimizer(self, comm)

    scaling.__init__ = __init__


_take_over()
