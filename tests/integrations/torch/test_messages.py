"""Messages between ranks of a process group."""

from __future__ import annotations

import pytest


def pass_around():
    """Send in a ring: blocking, asynchronous, in batches; of several dtypes and layouts."""
    import torch
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        for count in (1, 7, 100_000):
            x = (torch.arange(count) + rank).to(dtype)
            expected = (torch.arange(count) + left).to(dtype)
            out = torch.zeros_like(x)
            work = dist.isend(x, right)
            assert dist.recv(out, left) == left
            work.wait()
            assert torch.equal(out, expected)
            wide = torch.zeros(count, 2, dtype=dtype)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.stack([x, x], -1)[..., 1], right),
                    dist.P2POp(dist.irecv, wide[:, 1], left),
                ]
            )
            for one in works:
                one.wait()
            assert torch.equal(wide[:, 1], expected)
            assert not wide[:, 0].any()
    return True


def test_around_a_ring(groups):
    for size in (2, 3):
        assert groups.call(size, pass_around) == [True] * size


def receive_from_anybody():
    import torch
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(torch.full((3,), float(rank)), 0)
        return sorted(range(1, size))
    sources = []
    for _ in range(1, size):
        out = torch.zeros(3)
        source = dist.recv(out)
        assert out.tolist() == [source] * 3
        sources.append(source)
    return sorted(sources)


def test_from_anybody_with_its_source(groups):
    assert groups.call(3, receive_from_anybody) == [[1, 2]] * 3


def use_tags():
    import torch
    from torch import distributed as dist

    if dist.get_rank() == 0:
        for tag in (1, 2, 3):
            dist.send(torch.full((2,), float(tag)), 1, tag=tag)
        return [3.0, 1.0, 2.0]
    found = []
    for tag in (3, 1, 2):
        out = torch.zeros(2)
        dist.recv(out, 0, tag=tag)
        found.append(out[0].item())
    return found


def test_tags(groups):
    assert groups.call(2, use_tags) == [[3.0, 1.0, 2.0]] * 2


def keep_pending():
    """A receive that is posted early holds up no collective."""
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    out = torch.zeros(3)
    work = dist.irecv(out, 1 - rank)
    assert not work.is_completed()
    for _ in range(5):
        dist.barrier()
    dist.send(torch.ones(3), 1 - rank)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    return out.tolist(), work.source_rank()


def test_beside_collectives(groups):
    assert groups.call(2, keep_pending) == [([1.0] * 3, 1), ([1.0] * 3, 0)]


def send_objects():
    from torch import distributed as dist

    if dist.get_rank() == 0:
        dist.send_object_list([{"a": 1}, "text"], 1)
        return None
    got = [None, None]
    dist.recv_object_list(got, 0)
    return got


def test_objects(groups):
    assert groups.call(2, send_objects)[1] == [{"a": 1}, "text"]


def in_a_subgroup():
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    group = dist.new_group([2, 1])
    out = torch.zeros(1)
    if rank == 2:
        dist.send(torch.ones(1), 1, group=group)
    elif rank == 1:
        assert dist.recv(out, None, group=group) == 2
        assert out.item() == 1.0
    return True


def test_global_ranks_in_subgroups(groups):
    assert groups.call(3, in_a_subgroup) == [True] * 3


def send_batches():
    """On a GPU the messages of a batch start together, and only they; here CPU tensors do so."""
    import torch
    from torch import distributed as dist

    from gpucoll.integrations.torch import batches

    rank, comm = dist.get_rank(), dist.group.WORLD.comm
    right, left = (rank + 1) % 3, (rank - 1) % 3
    group, sizes = comm.group, []

    def count_group(**options):
        sizes.append(options)
        return group(**options)

    comm.group = count_group
    batches.BATCHED.add("cpu")
    try:
        for _ in range(2):
            x = [torch.full((400_000,), float(10 * rank + place)) for place in range(3)]
            out = [torch.zeros(400_000) for _ in range(3)]
            pairs = ((0, right, left), (1, rank, rank), (2, left, right))
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x[place], to) for place, to, _ in pairs]
                + [dist.P2POp(dist.irecv, out[place], source) for place, _, source in pairs]
            )
            assert all(work.wait() for work in works)
            found = [float(each[0]) for each in out]
            assert found == [10 * left, 10 * rank + 1, 10 * right + 2]
            with pytest.raises(TypeError, match="sparse"):
                dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, x[0], right),
                        dist.P2POp(dist.isend, torch.eye(3).to_sparse(), right),
                    ]
                )
            work = dist.isend(x[0], right)
            dist.recv(out[0], left)
            assert work.wait()
        functional = torch.ops._c10d_functional
        ends = [right, left], [7, 7], [x[1], out[1]], dist.group.WORLD.group_name
        for each in functional.batch_p2p_ops(["isend", "irecv"], *ends):
            functional.wait_tensor(each)
        assert float(out[1][0]) == 10 * left + 1
    finally:
        batches.BATCHED.discard("cpu")
        del comm.group
    return sizes


def test_batches_start_together(groups):
    assert groups.call(3, send_batches) == [[{"async_op": True}] * 3] * 3
