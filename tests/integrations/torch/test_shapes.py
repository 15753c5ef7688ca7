"""Tensors of different shapes on the ranks, and tensors that are not contiguous.

gloo and NCCL compare numbers of elements, and programs rely on it: DeepSpeed's pipeline adds up
norms of shape () on one rank and (1,) on another.
"""

from __future__ import annotations

import pytest

SHAPES = [((), (1,)), ((1, 1), ()), ((2, 3), (6,)), ((2, 3), (3, 2)), ((0,), (0, 3))]
CALLS = ("all_reduce", "all_reduce, asynchronous", "coalesced", "reduce", "broadcast")


def in_another_layout(x):
    """Return a tensor of the same shape and elements that is not contiguous."""
    import torch

    wide = torch.full((*x.shape, 2), -9.0)
    wide[..., 0] = x
    return wide[..., 0]


def call_with(shapes, name, as_views):
    """Call on a tensor of this rank's shape; return its elements, and what lies between them."""
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    start = torch.empty(shapes[rank])
    start.copy_(torch.arange(start.numel()).view(start.shape) + 10.0 * rank)
    x = in_another_layout(start) if rank in as_views else start
    if name == "all_reduce":
        dist.all_reduce(x)
    elif name == "all_reduce, asynchronous":
        dist.all_reduce(x, async_op=True).wait()
    elif name == "coalesced":
        dist.all_reduce_coalesced([x, torch.ones(3)])
    elif name == "reduce":
        dist.reduce(x, 1)
    else:
        dist.broadcast(x, 1)
    between = x.as_strided((x.numel(),), (2,), 1) if rank in as_views else torch.empty(0)
    return x.shape == start.shape, x.flatten().tolist(), between.tolist()


@pytest.mark.parametrize("as_views", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_agree_on_the_number_of_elements_alone(groups, name, as_views):
    for shapes in SHAPES:
        first, second = groups.call(2, call_with, shapes, name, as_views)

        length = len(second[1])
        own = [[i + 10.0 * rank for i in range(length)] for rank in (0, 1)]
        total = [2 * i + 10.0 for i in range(length)]
        expected = {"reduce": (own[0], total), "broadcast": (own[1], own[1])}
        assert (first[1], second[1]) == expected.get(name, (total, total))
        assert first[0]
        assert second[0]
        assert set(first[2] + second[2]) <= {-9.0}


def different_lengths():
    import torch
    from torch import distributed as dist

    x = torch.ones(2 + dist.get_rank(), 3)
    with pytest.raises(dist.DistBackendError, match=r"shape \(6,\).*shape \(9,\)"):
        dist.all_reduce(x)


def test_another_number_of_elements_is_told_to_every_rank(groups):
    groups.call(2, different_lengths)
