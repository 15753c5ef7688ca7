"""Parameters, the state of an optimizer, and Python objects: from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gpucoll.integrations.horovod.basics import rank
from gpucoll.integrations.horovod.objects import allgather_object, broadcast_object
from gpucoll.integrations.horovod.torch.handles import synchronize
from gpucoll.integrations.horovod.torch.movements import broadcast_async_

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

_STATE = "optimizer_state"


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Sequence[Any] | Iterable[Any], root_rank: int
) -> None:
    """Overwrite tensors by those of the root.

    Parameters
    ----------
    params : dict or list
        ``model.state_dict()``, or a list of tensors or of pairs of name and tensor, such as
        ``list(model.named_parameters())``.
    root_rank : int
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, list):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    begun = []
    for name, tensor in pairs:
        x = tensor.detach()
        own = x if x.is_contiguous() else x.contiguous()
        begun.append((broadcast_async_(own, root_rank, name), x, own))
    for handle, x, own in begun:
        synchronize(handle)
        if own is not x:
            x.copy_(own)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give the options and the state of the root's optimizer to those of the other ranks.

    Tensors travel as tensors, everything else as a pickled object. Without a state, such as
    before the first step, gradients of zeros are set, as Horovod does; unlike there no step is
    made to fill the state, which could change parameters.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Of any class but LBFGS; or what `DistributedOptimizer` returned.
    root_rank : int
    model : torch.nn.Module, optional
        Not needed here.

    Raises
    ------
    ValueError
        The optimizer is LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state:
        for p in parameters:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
    tensors: list[torch.Tensor] = []
    if rank() == root_rank:
        described = _described(optimizer, parameters, tensors)
        broadcast_object(described, root_rank, _STATE)
    else:
        described = broadcast_object(None, root_rank, _STATE)
        _adopt(optimizer, parameters, described, tensors)
    names = [f"{_STATE}.{i}" for i in range(len(tensors))]
    broadcast_parameters(list(zip(names, tensors, strict=True)), root_rank)


class _Tensor:
    """Stands for a tensor in what is pickled."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.is_on_gpu = tuple(x.shape), x.dtype, x.is_cuda

    def made(self, like: torch.Tensor, before: object) -> torch.Tensor:
        """Return the tensor that was there before if it fits, otherwise an empty one."""
        device = like.device if self.is_on_gpu else torch.device("cpu")
        if isinstance(before, torch.Tensor):
            found = tuple(before.shape), before.dtype, before.device
            if found == (self.shape, self.dtype, device):
                return before
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _described(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], tensors: list[torch.Tensor]
) -> tuple[list[dict[str, Any]], list[dict[str, Any] | None]]:
    """Return options of groups and states of parameters; move the tensors of both to `tensors`."""

    def without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                value = _Tensor(value)
            kept[name] = value
        return kept

    groups = [
        without_tensors({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    states = [
        without_tensors(optimizer.state[p]) if p in optimizer.state else None for p in parameters
    ]
    return groups, states


def _adopt(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    described: tuple[list[dict[str, Any]], list[dict[str, Any] | None]],
    tensors: list[torch.Tensor],
) -> None:
    """Take over what the root has described; add tensors that wait for their values."""

    def with_tensors(
        values: Mapping[str, Any], before: Mapping[str, Any], like: torch.Tensor
    ) -> dict[str, Any]:
        made = {}
        for name, value in values.items():
            if isinstance(value, _Tensor):
                value = value.made(like, before.get(name))
                tensors.append(value)
            made[name] = value
        return made

    groups, states = described
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(with_tensors(options, group, group["params"][0]))
    for p, state in zip(parameters, states, strict=True):
        before = optimizer.state.pop(p, {})
        if state is not None:
            optimizer.state[p] = with_tensors(state, before, p)
