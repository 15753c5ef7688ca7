"""all_reduce of sparse tensors, which may have different elements on each rank."""

from __future__ import annotations

import torch

from gpucoll import Communicator
from gpucoll.integrations.torch.errors import ArgumentError, ArgumentTypeError


def all_reduce(comm: Communicator, x: torch.Tensor, op: object) -> None:
    """Replace x by the sum over all ranks: gather all indices and values, and add them up locally.

    Parameters
    ----------
    comm : Communicator
        The group's communicator.
    x : tensor
        A sparse COO tensor, of the same shape, dtype and numbers of dimensions on every rank.
    op : str
        "sum", or for floating-point tensors "avg".

    Notes
    -----
    Ranks are added in rank order, so the result is bitwise the same on every rank. Cost: three
    calls; every rank receives the elements of all ranks.
    """
    if x.layout != torch.sparse_coo:
        raise ArgumentTypeError(
            f"all_reduce of tensors of layout {x.layout} is not supported: pass x.to_sparse_coo() "
            "or x.to_dense()"
        )
    if op not in ("sum", "avg"):
        raise ArgumentError(
            "sparse tensors support only sum and avg, the latter for floating-point values; got "
            f"op {op!r}: pass x.to_dense()"
        )
    mine = x.detach().coalesce()
    indices = mine.indices().t().contiguous()
    values = mine.values().contiguous()
    counts = comm.all_gather(indices.shape[0])
    everywhere = comm.all_gather(indices, counts=counts)
    everyones = comm.all_gather(values, counts=counts)
    parts = zip(everywhere.split(list(counts)), everyones.split(list(counts)), strict=True)
    total: torch.Tensor | None = None
    for place, value in parts:
        part = torch.sparse_coo_tensor(place.t(), value, x.shape)
        total = part if total is None else (total + part).coalesce()
    assert total is not None
    total = total.coalesce()
    if op == "avg":
        total = total / comm.world_size
    with torch.no_grad():
        x.copy_(total)
