"""Requests in the hands of a program: run and waited for at once, or by a handle later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gpucoll.integrations.horovod.basics import engine_of
from gpucoll.integrations.horovod.engine.request import Kind, Request
from gpucoll.integrations.horovod.torch.arrays import DTYPES, TORCH

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.engine import Engine
    from gpucoll.integrations.horovod.process_sets import ProcessSet

__all__ = ["Call", "call", "differentiable", "forget", "poll", "run", "submit", "synchronize"]

_STRIDED = torch.strided
_PREFIX = {kind: kind.name.lower() for kind in Kind}


Call: TypeAlias = "tuple[Engine, Request, Callable[[Request], Any]]"
"""An engine, a request of it, and what makes the result out of the finished request."""

_begun: dict[int, Call] = {}
_numbers = itertools.count()


def call(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Request], Any],
    *options: Any,
) -> Call:
    """Return a request of tensors, not submitted yet.

    Parameters
    ----------
    kind : Kind
    tensors : sequence of tensor
        Checked: contiguous ones of served dtypes.
    name : str or None
        None: one is made from a counter.
    process_set : ProcessSet
    result : callable
        Makes what `synchronize` returns out of the finished request.
    *options
        `op`, `root`, `prescale` and `postscale` of the request.

    Raises
    ------
    ValueError
        A tensor cannot be taken, or this rank is not in the process set.
    """
    arrays = []
    for x in tensors:
        if x.dtype not in DTYPES or x.layout is not _STRIDED:
            raise ValueError(f"Tensor type {x.type()} is not supported.")
        if not x.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        arrays.append(x.detach() if x.requires_grad else x)
    engine = engine_of(process_set)
    prefix = _PREFIX[kind]
    if kind not in (Kind.ALLREDUCE, Kind.BROADCAST):  # in those, they are copied where needed
        arrays = [x.resolve_conj().resolve_neg() for x in arrays]
    whole = f"{prefix}.{name}" if name is not None else engine.unnamed(prefix)
    return engine, Request(kind, whole, TORCH, arrays, None, *options), result


def run(call: Call) -> Any:
    """Submit a call, and return its result when it is done."""
    engine, request, result = call
    engine.run(request)
    return result(request)


def submit(call: Call) -> int:
    """Submit a call; return the handle for `poll` and `synchronize`."""
    call[0].submit(call[1])
    handle = next(_numbers)
    _begun[handle] = call
    return handle


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once."""
    begun = _begun.get(handle)
    if begun is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return begun[1].is_done


def synchronize(handle: int) -> Any:
    """Return the result of a handle when it is there: one tensor, or a tuple of them.

    A handle counts once: None is returned for one whose result was taken already.

    Raises
    ------
    HorovodInternalError
        The call failed.
    """
    begun = _begun.pop(handle, None)
    if begun is None:
        return None
    engine, request, result = begun
    engine.wait(request)
    return result(request)


def forget() -> None:
    """Forget all handles: their engines are closed."""
    _begun.clear()


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[[], Any], reverse: Callable[..., Any], *tensors: torch.Tensor
    ) -> Any:
        ctx.reverse = reverse
        return function()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.reverse(*(gradient.contiguous() for gradient in gradients))


def differentiable(
    call: Call, tensors: Sequence[torch.Tensor], reverse: Callable[..., Sequence[torch.Tensor]]
) -> Any:
    """Run a call, also as a part of autograd's graph if a tensor asks for gradients.

    Parameters
    ----------
    call : Call
    tensors : sequence of tensor
        The inputs.
    reverse : callable
        Takes the gradients of the results; returns those of the inputs.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Differentiable.apply(lambda: run(call), reverse, *tensors)
    return run(call)
