"""Optimizers whose gradients are averaged over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import mxnet as mx

from gpucoll.integrations.horovod.basics import Sum
from gpucoll.integrations.horovod.mxnet.compression import Compression
from gpucoll.integrations.horovod.mxnet.mpi_ops import allreduce_, grouped_allreduce_
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages gradients before it uses them; for ``Module`` and ``Updater``.

    Parameters
    ----------
    optimizer : Optimizer
        Its ``rescale_grad`` is divided by the number of ranks: gradients are summed.
    gradient_predivide_factor : float
        What gradients are divided by before the sum, and multiplied by after it.
    num_groups : int
        Into how many calls the gradients of one update go. 0: one for each.
    process_set : ProcessSet
        The ranks that take part; others update with their own gradients.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._optimizer = optimizer
        self._optimizer.rescale_grad *= gradient_predivide_factor / _n_ranks(process_set)
        self._predivide_factor = gradient_predivide_factor
        self._num_groups = num_groups
        self._process_set = process_set

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def _reduce(self, index: Any, grad: Any) -> None:
        if isinstance(index, tuple | list):
            named = [(str(number), x) for number, x in zip(index, grad, strict=True)]
        else:
            named = [(str(index), grad)]
        _sum(named, self._num_groups, self._predivide_factor, self._process_set)


class DistributedTrainer(mx.gluon.Trainer):
    """Gluon's trainer, with gradients that are averaged over the ranks.

    Parameters
    ----------
    params : dict, ParameterDict or list of Parameter
    optimizer : str or Optimizer
    optimizer_params : dict, optional
    compression : Compressor
        Of the gradients, such as ``Compression.fp16``.
    gradient_predivide_factor : float
        What gradients are divided by before the sum, and multiplied by after it.
    prefix : str, optional
        Of the names: different ones for different trainers.
    num_groups : int
        Into how many calls the gradients go. 0: one for each.
    process_set : ProcessSet
        The ranks that take part; others update with their own gradients.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer. We have "
                "unwrapped it for you.",
                stacklevel=2,
            )
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._scale *= gradient_predivide_factor / _n_ranks(process_set)
        self._compression = compression
        self._predivide_factor = gradient_predivide_factor
        self._prefix = prefix or ""
        self._num_groups = num_groups
        self._process_set = process_set

    def _allreduce_grads(self) -> None:
        if self._process_set.size() == 1:
            return
        compress, decompress = self._compression.compress, self._compression.decompress
        gradients = [
            (f"{self._prefix}{number}", parameter.list_grad()[0])
            for number, parameter in enumerate(self._params)
            if parameter.grad_req != "null"
        ]
        sent = [(name, x, *compress(x)) for name, x in gradients]
        named = [(name, small) for name, _, small, _ in sent]
        _sum(named, self._num_groups, self._predivide_factor, self._process_set)
        for _, x, small, context in sent:
            if small is not x:
                x[:] = decompress(small, context)


def _n_ranks(process_set: ProcessSet) -> int:
    n_ranks = process_set.size()
    if n_ranks is None:
        raise ValueError(f"{process_set} is not in use: add_process_set it first")
    return n_ranks


def _sum(
    named: Sequence[tuple[str, mx.nd.NDArray]],
    n_groups: int,
    predivide_factor: float,
    process_set: ProcessSet,
) -> None:
    """Sum gradients in place; earlier ones are needed first."""
    if _n_ranks(process_set) == 1 or not process_set.included():
        return
    options: dict[str, Any] = {
        "op": Sum,
        "prescale_factor": 1.0 / predivide_factor,
        "process_set": process_set,
    }
    if n_groups <= 0:
        for number, (name, gradient) in enumerate(named):
            allreduce_(gradient, name=name, priority=-number, **options)
        return
    for number, group in enumerate(_groups(named, n_groups)):
        names, gradients = zip(*group, strict=True)
        name = f"{names[0]}:{names[-1]}"
        grouped_allreduce_(gradients, name=name, priority=-number, **options)


def _groups(
    named: Sequence[tuple[str, mx.nd.NDArray]], n_groups: int
) -> Iterator[list[tuple[str, mx.nd.NDArray]]]:
    """Yield the parts of a list of about equal length, and of each what has one element type."""
    length, left = divmod(len(named), n_groups)
    begin = 0
    for number in range(n_groups):
        end = begin + length + (number < left)
        part = sorted(named[begin:end], key=lambda each: str(each[1].dtype))
        for _, of_one_type in groupby(part, key=lambda each: str(each[1].dtype)):
            yield list(of_one_type)
        begin = end
