"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from gpucoll.integrations.horovod.basics import Adasum, Average, rocm_built, size
from gpucoll.integrations.horovod.objects import broadcast_object
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.torch.compression import Compression, Compressor
from gpucoll.integrations.horovod.torch.handles import synchronize
from gpucoll.integrations.horovod.torch.reductions import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from gpucoll.integrations.horovod.util import split_list

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like `optimizer` whose step uses the gradients of all ranks.

    Each gradient is reduced as soon as the backward pass has made it; ``step()`` waits for all.
    ``synchronize()`` waits earlier, to clip gradients for example; the step that follows is then
    made within ``with optimizer.skip_synchronize():``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The class and the groups of parameters are taken from it.
    named_parameters : iterable of (str, tensor), optional
        Names by which ranks match gradients: ``model.named_parameters()``.
    compression : Compressor
        `Compression.fp16` sends halves.
    backward_passes_per_step : int
        How many backward passes add up before gradients are reduced.
    op : ReduceOp
        Average, Sum, or Adasum, which combines the changes that each rank's own step makes.
    gradient_predivide_factor : float
        Average divides by it before the sum, and by the rest afterwards.
    num_groups : int
        An old name of `groups`.
    groups : int or list of lists of tensors, optional
        Gradients that are reduced in one call: lists of them, or how many lists to make.
    sparse_as_dense : bool
        Reduce sparse gradients as dense ones, rather than gather their entries.
    process_set : ProcessSet
        The ranks that reduce; other ranks make steps of their own.

    Raises
    ------
    ValueError
        Options do not fit each other or the parameters.
    """
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        text = (
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
        )
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    kind: type[_Distributed] = _OfGradients
    if op == Adasum and size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        kind = _OfChanges
    own = type(optimizer)
    made = type(own.__name__, (kind, own), {"__module__": kind.__module__})
    distributed: _Distributed = made(optimizer.param_groups)
    distributed._begin(
        _Options(named_parameters, compression, op, gradient_predivide_factor, sparse_as_dense),
        backward_passes_per_step,
        groups,
        process_set,
    )
    return distributed


class _Options:
    """How gradients are reduced."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: type[Compressor],
        op: int,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self.named = None if named_parameters is None else list(named_parameters)
        self.compression, self.op, self.sparse_as_dense = compression, op, sparse_as_dense
        self.factors = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide}
        if op != Average:
            self.factors = {}


class _Distributed(torch.optim.Optimizer):
    """What both kinds share; combined with the class of the wrapped optimizer.

    A unit is what one call reduces: a parameter, or a tuple of those of a group.
    """

    _is_ready = False

    def _begin(
        self,
        options: _Options,
        passes: int,
        groups: int | list[list[torch.Tensor]] | None,
        process_set: ProcessSet,
    ) -> None:
        self._options = options
        self._parameter_names = _names(options.named, self.param_groups)
        self.backward_passes_per_step = passes
        self.process_set = process_set
        self._passes_left = dict.fromkeys(self._parameter_names, passes)
        self._waits: dict[torch.Tensor, Callable[[], None]] = {}
        self._is_synchronized = False
        self._should_synchronize = True
        _check_groups(groups)
        self._unit_of: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if process_set.included() and (size() > 1 or is_elastic):
            self._register_hooks(groups)
        self._is_ready = True

    def _register_hooks(self, groups: int | list[list[torch.Tensor]] | None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        units: Iterable[Sequence[torch.Tensor]] = [(p,) for p in trained]
        if groups is not None:
            units = self._grouped(trained, groups)
        for unit in units:
            self._unit_of.update(dict.fromkeys(unit, tuple(unit)))
        for p in trained:
            p.register_post_accumulate_grad_hook(self._accumulated)

    def _grouped(
        self, trained: list[torch.Tensor], groups: int | list[list[torch.Tensor]]
    ) -> list[Sequence[torch.Tensor]]:
        """Return groups in an order that is the same on all ranks: that of the first one."""
        names = [self._parameter_names[p] for p in trained]
        root = self.process_set.ranks[0]
        order = {
            name: place
            for place, name in enumerate(
                broadcast_object(names, root, "groups of gradients", self.process_set)
            )
        }
        in_order = sorted(trained, key=lambda p: order[self._parameter_names[p]])
        if isinstance(groups, list):
            known = set(in_order)
            units: list[Sequence[torch.Tensor]]
            units = [[p for p in group if p in known] for group in groups]
            together = {p for unit in units for p in unit}
            return [unit for unit in units if unit] + [[p] for p in in_order if p not in together]
        parts = split_list(in_order, groups)
        return [part for part in parts if part]

    def _accumulated(self, p: torch.Tensor) -> None:
        """Note that a backward pass has added to a gradient; send it after the last pass."""
        if self._passes_left[p] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[p] -= 1
        unit = self._unit_of[p]
        if all(self._passes_left[each] == 0 for each in unit):
            self._waits[unit[0]] = self._send(unit)

    def _send(self, unit: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Start to reduce a unit; return a function that waits, and takes over the result."""
        raise NotImplementedError

    def _send_rest_and_wait(self) -> None:
        for unit in dict.fromkeys(self._unit_of.values()):
            if unit[0] not in self._waits:
                self._waits[unit[0]] = self._send(unit)
        for wait in self._waits.values():
            wait()
        self._start_anew()

    def _start_anew(self) -> None:
        self._waits.clear()
        self._passes_left = dict.fromkeys(self._passes_left, self.backward_passes_per_step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up before gradients are reduced."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; what the backward pass has begun is forgotten."""
        self._is_synchronized = False
        self._should_synchronize = True
        self._start_anew()
        super().load_state_dict(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, unless they are being reduced.

        Raises
        ------
        AssertionError
            Between the backward pass and `step` or `synchronize`.
        """
        if self._is_ready and self._waits:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause a "
                "race condition."
            )
        super().zero_grad(*args, **kwargs)


class _OfGradients(_Distributed):
    """Reduces gradients, and then makes the step."""

    def _send(self, unit: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        for p in unit:
            if p.grad is None:  # another rank may have one
                p.grad = torch.zeros_like(p)
        options = self._options
        name = self._parameter_names[unit[0]]
        if len(unit) == 1:
            grad = _grad(unit[0])
            if grad.is_sparse and not options.sparse_as_dense:
                summed = sparse_allreduce_async(grad, name, options.op, self.process_set)
                return lambda: _take(unit[0], summed())
        grads = [_dense(_grad(p)) for p in unit]
        sent, how = zip(*(options.compression.compress(grad) for grad in grads), strict=True)
        keywords: dict[str, Any] = {"op": options.op, "process_set": self.process_set}
        keywords.update(options.factors)
        if len(unit) == 1:
            handle = allreduce_async_(sent[0], name=name, **keywords)
        else:
            handle = grouped_allreduce_async_(sent, name=name, **keywords)

        def wait() -> None:
            got = synchronize(handle)
            for p, x, each in zip(unit, got if len(unit) > 1 else (got,), how, strict=True):
                _take(p, options.compression.decompress(x, each))

        return wait

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks."""
        self._send_rest_and_wait()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` take the gradients as they are: `synchronize` was called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which the gradients are those of all ranks."""

        def reduced() -> Any:
            loss = closure()
            self._send_rest_and_wait()
            return loss

        return reduced

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients, those of each call of the closure, too, and make the step."""
        if self._should_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            if closure is None or self._waits:
                self.synchronize()
            if closure is not None:
                closure = self._reducing(closure)
        self._is_synchronized = False
        return super().step(closure)


_OfGradients.step.__dict__["hooked"] = True  # torch runs hooks in the wrapped class's own step


class _OfChanges(_Distributed):
    """Makes each parameter's step alone, and combines the ranks' changes by Adasum."""

    def _send(self, unit: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        waits = [self._send_one(p) for p in unit]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def _send_one(self, p: torch.Tensor) -> Callable[[], None]:
        start = p.detach().clone()
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        usual = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, usual, strict=True):
            group["params"] = [each for each in parameters if each is p]
        try:
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, usual, strict=True):
                group["params"] = parameters
        change = (p.detach() - start).contiguous()
        compression = self._options.compression
        sent, how = compression.compress(change)
        handle = allreduce_async_(sent, name=self._parameter_names[p], op=Adasum)

        def wait() -> None:
            combined = compression.decompress(synchronize(handle), how)
            with torch.no_grad():
                p.copy_(start.add_(combined))

        return wait

    def synchronize(self) -> None:
        """Do nothing: `step` waits."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse: the step was made before the ranks were asked."""
        text = "Skipping synchronization is not supported when using Adasum optimizer."
        raise AssertionError(text)

    def step(self, closure: Any = None) -> Any:
        """Wait for the combined changes, and apply them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._send_rest_and_wait()
        return loss


def _names(
    named: list[tuple[str, torch.Tensor]] | None, param_groups: Iterable[dict[str, Any]]
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter; raise ValueError if the given ones will not do."""
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, p in enumerate(group["params"])
        }
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    names = {p: name for name, p in named}
    unnamed = [p for group in param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Shapes of these: " + ", ".join(str(list(p.shape)) for p in unnamed)
        )
    return names


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if groups <= 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        return
    seen: set[torch.Tensor] = set()
    for p in (p for group in groups for p in group):
        if not isinstance(p, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if p in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(p)


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return what can be sent of a gradient: it itself, if it is dense and contiguous."""
    return (grad.to_dense() if grad.is_sparse else grad).contiguous()


def _take(p: torch.Tensor, reduced: torch.Tensor) -> None:
    """Let a parameter's gradient be the reduced one."""
    grad = _grad(p)
    if grad is reduced:
        return
    if grad.is_sparse:
        p.grad = reduced if reduced.is_sparse else reduced.to_sparse()
    elif grad.is_contiguous():
        grad.set_(reduced)
    else:
        grad.copy_(reduced)
