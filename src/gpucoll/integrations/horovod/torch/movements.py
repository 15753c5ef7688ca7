"""Tensors of ranks gathered, broadcast and exchanged, by name; join and barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gpucoll.integrations.horovod.arguments import root_of, rows_for_each
from gpucoll.integrations.horovod.basics import engine_of, rank
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.torch.arrays import TORCH, TorchArrays
from gpucoll.integrations.horovod.torch.handles import Call, call, differentiable, run, submit

__all__ = [
    *("allgather", "allgather_async", "alltoall", "alltoall_async", "barrier"),
    *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
    *("grouped_allgather", "grouped_allgather_async", "join"),
]

_Splits: TypeAlias = torch.Tensor | Sequence[int] | None


def first(request: Request) -> torch.Tensor:
    """Return the result of one tensor."""
    assert request.results is not None
    result: torch.Tensor = request.results[0]
    return result


def whole(request: Request) -> tuple[torch.Tensor, ...]:
    """Return the results of several tensors."""
    return tuple(request.results or ())


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors one after the other; they may differ in their first dimension.

    The gradient is the average over the ranks of those of this rank's rows.
    """

    def reverse(gradient: torch.Tensor) -> list[torch.Tensor]:
        return _own_rows([gradient], [tensor.shape[0]], process_set)

    begun = call(Kind.ALLGATHER, [tensor], name, process_set, first)
    result: torch.Tensor = differentiable(begun, [tensor], reverse)
    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather`; return its handle."""
    return submit(call(Kind.ALLGATHER, [tensor], name, process_set, first))


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Gather several tensors in one call, like `allgather` does one."""

    def reverse(*gradients: torch.Tensor) -> list[torch.Tensor]:
        return _own_rows(gradients, [x.shape[0] for x in tensors], process_set)

    begun = call(Kind.ALLGATHER, tensors, name, process_set, whole)
    results: tuple[torch.Tensor, ...] = differentiable(begun, tensors, reverse)
    return results


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allgather`; return its handle."""
    return submit(call(Kind.ALLGATHER, tensors, name, process_set, whole))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of the root, a rank of the job; its gradient is the ranks' average."""

    def reverse(gradient: torch.Tensor) -> list[torch.Tensor]:
        reduced = _average([gradient], process_set)
        return reduced if rank() == root_rank else [x.zero_() for x in reduced]

    begun = _broadcast(tensor, root_rank, name, process_set, False, first)
    result: torch.Tensor = differentiable(begun, [tensor], reverse)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast`; return its handle."""
    return submit(_broadcast(tensor, root_rank, name, process_set, False, first))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with the root's; return it."""
    run(_broadcast(tensor, root_rank, name, process_set, True, first))
    return tensor


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast_`; return its handle."""
    return submit(_broadcast(tensor, root_rank, name, process_set, True, lambda request: tensor))


def alltoall(
    tensor: torch.Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank, and return those from every rank, in the order of ranks.

    Parameters
    ----------
    splits : tensor of int32 or sequence of int, optional
        How many rows each rank gets; equally many by default. If given, the result has a second
        part: how many rows each rank has sent.
    """
    received: list[int] = []

    def reverse(gradient: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        back = run(_all_to_all(gradient, received, None, process_set, first))
        missing = tensor.shape[0] - back.shape[0]  # rows that no rank was sent
        return [torch.cat([back, back.new_zeros(missing, *back.shape[1:])]) if missing else back]

    def result(request: Request) -> Any:
        received.extend(request.received_splits or ())
        both = _both(request, splits)
        return both[0] if splits is None else both

    begun = _all_to_all(tensor, splits, name, process_set, result)
    results: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    results = differentiable(begun, [tensor], reverse)
    return results


def alltoall_async(
    tensor: torch.Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall`; return its handle, whose result always has both parts."""
    return submit(
        _all_to_all(tensor, splits, name, process_set, lambda request: _both(request, splits))
    )


def join(device: int = -1) -> int:
    """Take part in the reductions of the other ranks, with zeros, until all have called this.

    Parameters
    ----------
    device : int
        The GPU for the zeros of tensors on GPUs; by default torch's current one.

    Returns
    -------
    int
        The rank that came last.
    """
    if device >= 0:
        TorchArrays.gpu = device
    engine = engine_of(global_process_set)
    request = Request(Kind.JOIN, "join", TORCH)
    engine.run(request)
    return request.last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    run(call(Kind.BARRIER, [], None, process_set, lambda request: None))


def _average(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> list[torch.Tensor]:
    begun = call(Kind.ALLREDUCE, tensors, None, process_set, whole, ReduceOp.AVERAGE)
    return list(run(begun))


def _own_rows(
    gradients: Sequence[torch.Tensor], n_rows: list[int], process_set: ProcessSet
) -> list[torch.Tensor]:
    """Return what of averaged gradients belongs to the rows that this rank has given."""
    rows = torch.tensor([n_rows])
    every = run(call(Kind.ALLGATHER, [rows], None, process_set, first))
    before = every[: process_set.rank()].sum(0).tolist()
    reduced = _average(gradients, process_set)
    parts = zip(reduced, before, n_rows, strict=True)
    return [gradient.narrow(0, begin, n) for gradient, begin, n in parts]


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    in_place: bool,
    result: Callable[[Request], Any],
) -> Call:
    root = root_of(root_rank, process_set)
    made = call(Kind.BROADCAST, [tensor], name, process_set, result, ReduceOp.SUM, root)
    if in_place:
        made[1].outputs = made[1].arrays
    return made


def _all_to_all(
    tensor: torch.Tensor,
    splits: _Splits,
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Request], Any],
) -> Call:
    given: Sequence[int] | None
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
        if splits.dim() != 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        given = splits.tolist()
    else:
        given = splits
    made = call(Kind.ALLTOALL, [tensor], name, process_set, result)
    if tensor.dim() == 0:
        return made  # the engine refuses it on every rank
    rows = made[1].splits = rows_for_each(given, tensor.shape[0], process_set)
    if rows is not None and sum(rows) < tensor.shape[0]:
        made[1].arrays = [x[: sum(rows)] for x in made[1].arrays]
    return made


def _both(request: Request, splits: _Splits) -> tuple[torch.Tensor, torch.Tensor]:
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    received = torch.tensor(request.received_splits, dtype=torch.int32, device=device)
    return first(request), received
