"""Wrong arguments: a clear error before anything moves, and the group works on."""

from __future__ import annotations

from typing import Any

import pytest

import gpucoll


def cases():
    """Return wrong calls, by name, with what their errors say."""
    import torch
    from torch import distributed as dist

    size = dist.get_world_size()
    ones, twos = torch.ones(4), torch.ones(4, dtype=torch.float64)
    sparse = torch.eye(4).to_sparse()
    meta = torch.ones(4, device="meta")
    group = dist.group.WORLD
    blocks = [torch.ones(4) for _ in range(size)]
    return {
        "meta": (lambda: dist.all_reduce(meta), "meta device"),
        "meta moved": (lambda: dist.broadcast(meta, 0), "meta device"),
        "mixed devices": (lambda: group.allgather([[ones, meta]], [ones]), "one device"),
        "mixed dtypes": (lambda: group.allgather([[ones, twos]], [ones]), "float64 on cpu"),
        "mixed coalesced": (lambda: group.allreduce_coalesced([ones, meta]), "one device"),
        "too few blocks": (lambda: dist.all_gather(blocks[:1], ones), "2 output tensors.* got 1"),
        "too many blocks": (lambda: dist.all_to_all([*blocks, ones], blocks), "got 3"),
        "sizes": (lambda: dist.all_gather_into_tensor(torch.ones(7), ones), "got 7 and 4"),
        "parts": (lambda: dist.reduce_scatter_tensor(ones, torch.ones(9)), "got 9 and 4"),
        "splits": (
            lambda: dist.all_to_all_single(ones, ones, [1, 2], [2, 2]),
            r"output_split_sizes must be 2 numbers of rows whose sum is 4; got \[1, 2\]",
        ),
        "indivisible": (
            lambda: dist.all_to_all_single(ones, torch.ones(3), [2, 2], None),
            "3 rows of input cannot be divided",
        ),
        "sparse moved": (lambda: dist.broadcast(sparse, 0), "to_dense"),
        "sparse op": (lambda: dist.all_reduce(sparse.clone(), dist.ReduceOp.MAX), "op 'max'"),
        "sparse layout": (lambda: dist.all_reduce(torch.eye(4).to_sparse_csr()), "to_sparse_coo"),
        "bitwise": (lambda: dist.all_reduce(ones, dist.ReduceOp.BAND), "band is not defined"),
        "product of pairs": (
            lambda: dist.reduce_scatter_tensor(
                torch.ones(1, dtype=torch.complex32),
                torch.ones(size, dtype=torch.complex32),
                dist.ReduceOp.PRODUCT,
            ),
            r"prod is not supported for complex32: .*x.to\(torch.complex64\)",
        ),
        "largest of pairs": (
            lambda: dist.reduce(torch.ones(2, dtype=torch.complex32), 0, dist.ReduceOp.MAX),
            "max is not supported for complex32",
        ),
        "bool": (
            lambda: dist.all_reduce(ones.bool(), dist.ReduceOp.AVG),
            "avg is not defined for bool",
        ),
        "quantized": (
            lambda: dist.all_reduce(torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)),
            "quantized",
        ),
        "no tensor": (lambda: group.allreduce(["text"]), "got builtins.str"),
        "two tensors": (lambda: group.allreduce([ones, ones]), "list of 2"),
        "outputs": (lambda: group.all_gather_single_coalesced([ones], []), "got 1 and 0"),
        "device": (lambda: group._get_backend(torch.device("mps")), "not mps"),
    }


def make_wrong_calls():
    import torch
    from torch import distributed as dist

    found = {}
    for name, (call, _) in cases().items():
        try:
            call()
        except Exception as error:
            found[name] = str(error), isinstance(error, dist.DistBackendError), type(error).__name__
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2.0, name
    return found, {name: text for name, (_, text) in cases().items()}


def test_wrong_calls(groups):
    import re

    for found, expected in groups.call(2, make_wrong_calls):
        assert {*found} == {*expected}
        for name, text in expected.items():
            said, is_torchs, kind = found[name]
            assert re.search(text, said), (name, said)
            assert is_torchs or name == "device", (name, kind)


def differ(call_of):
    """Make another call on each rank; return what the error says, and whether the group works."""
    import torch
    from torch import distributed as dist

    try:
        call_of(dist.get_rank())()
    except dist.DistBackendError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    x = torch.ones(1)
    try:
        dist.all_reduce(x)
    except dist.DistBackendError:
        return text, None
    return text, x.item()


def other_sizes(rank):
    import torch
    from torch import distributed as dist

    return lambda: dist.all_reduce(torch.ones(2 + rank))


def other_dtypes(rank):
    import torch
    from torch import distributed as dist

    return lambda: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int32][rank]))


def other_ops(rank):
    import torch
    from torch import distributed as dist

    ops = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    return lambda: dist.all_reduce(torch.ones(2), ops[rank])


def other_calls(rank):
    import torch
    from torch import distributed as dist

    if rank == 0:
        return lambda: dist.all_reduce(torch.ones(2))
    return lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))


def other_roots(rank):
    import torch
    from torch import distributed as dist

    def call():
        dist.broadcast(torch.ones(3), rank)
        dist.barrier()  # a root need not wait, and is told at its next call

    return call


@pytest.mark.parametrize(
    "call_of", [other_sizes, other_dtypes, other_ops, other_calls, other_roots]
)
def test_ranks_that_call_different_things(groups, call_of):
    for text, total in groups.call(2, differ, call_of):
        assert text.startswith("MismatchError: the ranks did not make the same call")
        assert "rank 0 called" in text
        assert "rank 1 called" in text
        # Of ranks that found it in a later call than others none goes on.
        assert total == (None if call_of is other_roots else 2.0)
        assert ("The communicator is broken" in text) == (call_of is other_roots)


def ask_for_what_is_not_there():
    import torch
    from torch import distributed as dist

    from gpucoll.integrations.torch import Options

    with pytest.raises(
        TypeError, match=r"pg_options .* must be .*Options\(...\); got builtins.dict"
    ):
        dist.new_group([dist.get_rank()], pg_options={"bind": True}, use_local_synchronization=True)
    unknown: dict[str, Any] = {"binding": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'binding'"):
        Options(**unknown)
    with pytest.raises(ValueError, match=r"compression_from_bytes .* got -1"):
        Options(compression_from_bytes=-1)
    with pytest.raises(ValueError, match="deterministic"):
        dist.new_group(
            [dist.get_rank()],
            pg_options=Options(deterministic="yes"),
            use_local_synchronization=True,
        )
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_unknown_options(groups):
    assert groups.call(2, ask_for_what_is_not_there) == [2.0, 2.0]


def reduce_one():
    import torch
    from torch import distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize(
    ("mix", "other"),
    [("cpu:gloo,cuda:gpucoll", "cpu:gloo"), ("cpu:gpucoll,cuda:nccl", "cuda:nccl")],
)
def test_another_backend_for_one_device_is_refused(groups, mix, other):
    text = f'must serve a group alone, .* got "{other}" .*new_group'
    with pytest.raises(gpucoll.ArgumentError, match=rf"rank \d of 2: .*{text}"):
        groups.call(2, reduce_one, backend=mix)

    assert groups.call(2, reduce_one) == [2.0, 2.0]
    assert groups.call(2, reduce_one, backend="cpu:gpucoll,cuda:gpucoll") == [2.0, 2.0]


def reduce_a_dtensor():
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    with pytest.raises((dist.DistBackendError, RuntimeError)):
        dist.group.WORLD.allreduce([x])
    return x.redistribute(mesh, [Replicate()]).to_local().shape


def test_dtensors_move_by_their_own_methods(groups):
    assert [tuple(shape) for shape in groups.call(2, reduce_a_dtensor)] == [(4, 3)] * 2
