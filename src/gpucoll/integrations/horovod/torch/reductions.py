"""Reductions of tensors over the ranks, by name: allreduce, reducescatter, and those of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpucoll.integrations.horovod.arguments import reduction
from gpucoll.integrations.horovod.basics import size
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.torch.compression import Compression, Compressor
from gpucoll.integrations.horovod.torch.handles import (
    Call,
    call,
    differentiable,
    run,
    submit,
    synchronize,
)
from gpucoll.integrations.horovod.torch.movements import (
    allgather,
    allgather_async,
    first,
    grouped_allgather,
    whole,
)

__all__ = [
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
    *("grouped_allreduce", "grouped_allreduce_"),
    *("grouped_allreduce_async", "grouped_allreduce_async_"),
    *("grouped_reducescatter", "grouped_reducescatter_async"),
    *("reducescatter", "reducescatter_async", "sparse_allreduce_async"),
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average (`op`: another reduction) of the ranks' tensors; `tensor` is unchanged.

    Gradients are reduced in the same way.
    """
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    sent, how = compression.compress(tensor)
    begun = _all_reduce([sent], name, *options, in_place=False, result=first)

    def reverse(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [run(_all_reduce([gradient], None, *options, in_place=False, result=first))]

    result: torch.Tensor = differentiable(begun, [sent], reverse)
    return compression.decompress(result, how)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce`; return its handle."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    return submit(_all_reduce([tensor], name, *options, in_place=False, result=first))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place; return it."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    run(_all_reduce([tensor], name, *options, in_place=True, result=first))
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_`; return its handle."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    return submit(
        _all_reduce([tensor], name, *options, in_place=True, result=lambda request: tensor)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in one call, like `allreduce` does one."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    sent, how = _compressed(compression, tensors)
    begun = _all_reduce(sent, name, *options, in_place=False, result=whole)

    def reverse(*gradients: torch.Tensor) -> Any:
        return run(_all_reduce(gradients, None, *options, in_place=False, result=whole))

    results = differentiable(begun, sent, reverse)
    return _decompressed(compression, results, how)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce`; return its handle."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    return submit(_all_reduce(tensors, name, *options, in_place=False, result=whole))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in one call, in place; return them."""
    factors = prescale_factor, postscale_factor
    given: tuple[torch.Tensor, ...] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, *factors, process_set)
    )
    return given


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_`; return its handle."""
    options = reduction(op, average), prescale_factor, postscale_factor, process_set
    given = tuple(tensors)
    return submit(_all_reduce(given, name, *options, in_place=True, result=lambda request: given))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the average (`op`: or sum) of the ranks' tensors.

    The first ranks get a row more if the rows cannot be divided equally.
    """
    options = op, process_set, prescale_factor, postscale_factor
    sent, how = compression.compress(tensor)

    def reverse(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [allgather(_scaled(gradient, *options), process_set=process_set)]

    begun = _reduce_scatter([sent], name, *options, result=first)
    result: torch.Tensor = differentiable(begun, [sent], reverse)
    return compression.decompress(result, how)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter`; return its handle."""
    options = op, process_set, prescale_factor, postscale_factor
    return submit(_reduce_scatter([tensor], name, *options, result=first))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors in one call."""
    options = op, process_set, prescale_factor, postscale_factor
    sent, how = _compressed(compression, tensors)

    def reverse(*gradients: torch.Tensor) -> Sequence[torch.Tensor]:
        scaled = [_scaled(gradient, *options) for gradient in gradients]
        return grouped_allgather(scaled, process_set=process_set)

    begun = _reduce_scatter(sent, name, *options, result=whole)
    return _decompressed(compression, differentiable(begun, sent, reverse), how)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter`; return its handle."""
    options = op, process_set, prescale_factor, postscale_factor
    return submit(_reduce_scatter(tensors, name, *options, result=whole))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up (or average) sparse tensors; return a function that waits for the result.

    The entries of all ranks are gathered: the result is not coalesced.
    """
    indices = tensor._indices().t().contiguous()
    values = tensor._values().contiguous()
    handles = [
        allgather_async(indices, f"{name}.indices", process_set),
        allgather_async(values, f"{name}.values", process_set),
    ]

    def result() -> torch.Tensor:
        all_indices, all_values = map(synchronize, handles)
        if op == ReduceOp.AVERAGE:
            all_values = all_values / process_set.size()
        parts = all_indices.t(), all_values
        return torch.sparse_coo_tensor(*parts, tensor.size(), check_invariants=False)

    return result


def _all_reduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
    result: Callable[[Request], Any],
) -> Call:
    """Return the call."""
    factors = float(prescale), float(postscale)
    if op is not ReduceOp.ADASUM:
        made = call(Kind.ALLREDUCE, tensors, name, process_set, result, op, 0, *factors)
    else:
        _check_adasum(process_set)
        if any(x.is_cuda or x.dtype is torch.bfloat16 for x in tensors):
            tensors, result = _on_host(tensors, in_place, result)
        made = call(Kind.ADASUM, tensors, name, process_set, result, op, 0, *factors)
    if in_place:
        made[1].outputs = made[1].arrays
    return made


def _on_host(
    tensors: Sequence[torch.Tensor], in_place: bool, result: Callable[[Request], Any]
) -> tuple[list[torch.Tensor], Callable[[Request], Any]]:
    """Return copies that NumPy can take, and a `result` that copies back: Adasum is NumPy's."""

    def back(request: Request) -> Any:
        pairs = zip(tensors, request.results or (), strict=True)
        request.results = [y.to(x.device, x.dtype) for x, y in pairs]
        if in_place:
            for x, y in zip(tensors, request.results, strict=True):
                x.detach().copy_(y)
        return result(request)

    wide = {torch.bfloat16: torch.float32}
    return [x.detach().to("cpu", wide.get(x.dtype, x.dtype)) for x in tensors], back


def _check_adasum(process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if size().bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def _reduce_scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    result: Callable[[Request], Any],
) -> Call:
    if op == ReduceOp.ADASUM:
        raise HorovodInternalError("Reducescatter does not support Adasum.")
    factors = float(prescale), float(postscale)
    return call(Kind.REDUCESCATTER, tensors, name, process_set, result, ReduceOp(op), 0, *factors)


def _scaled(
    gradient: torch.Tensor, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> torch.Tensor:
    """Return what is gathered as the gradient of a reducescatter."""
    n_ranks = process_set.size() if op == ReduceOp.SUM else 1
    factor = (n_ranks or 1) * prescale * postscale
    return gradient if factor == 1.0 else gradient * factor


def _compressed(
    compression: type[Compressor], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [compression.compress(x) for x in tensors]
    return [sent for sent, _ in pairs], [how for _, how in pairs]


def _decompressed(
    compression: type[Compressor], results: Sequence[torch.Tensor], how: list[Any]
) -> list[torch.Tensor]:
    return [compression.decompress(x, each) for x, each in zip(results, how, strict=True)]
