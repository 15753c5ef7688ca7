"""Asynchronous calls and messages of PyTorch tensors: by compiled code, as NumPy shows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.dtypes import assert_same

from gpucoll.calls.begun_message import BegunMessage
from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError, MismatchError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

CALLS: dict[str, Any] = {
    "all_reduce": lambda comm, x, **how: comm.all_reduce(x, **how),
    "broadcast": lambda comm, x, **how: comm.broadcast(x, **how),
    "scan": lambda comm, x, **how: comm.scan(x, **how),
    "all_gather": lambda comm, x, **how: comm.all_gather(x, **how),
    "reduce_scatter": lambda comm, x, **how: comm.reduce_scatter(x, **how),
    "all_to_all": lambda comm, x, **how: comm.all_to_all(x, **how),
}
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]


def values(rank, dtype):
    return (torch.arange(24).reshape(12, 2) % 5 + rank).to(getattr(torch, dtype))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(1, 2, 3)
def test_as_blocking_ones(comm, name, dtype):
    call, x = CALLS[name], values(comm.rank, dtype)
    how: dict[str, Any] = {"op": "max"} if name in ("all_reduce", "scan", "reduce_scatter") else {}
    wanted = call(comm, x, **how)
    for _ in range(3):  # the first is learned from
        work = call(comm, x, async_op=True, **how)
        got = work.wait()
        assert type(got) is torch.Tensor
        assert got.dtype == x.dtype
        assert torch.equal(got, wanted)
        out = torch.zeros_like(wanted)
        version = out._version
        assert call(comm, x, out=out, async_op=True, **how).wait() is out
        assert torch.equal(out, wanted)
        assert out._version > version
    if wanted.shape == x.shape:
        assert call(comm, x, out=x, async_op=True, **how).wait() is x
        assert torch.equal(x, wanted)


@pytest.mark.ranks(2)
def test_large_ones(comm):
    x = torch.full((1_000_000,), comm.rank + 1.0)
    for _ in range(2):
        works = [comm.all_reduce(x, async_op=True), comm.all_gather(x[:500_000], async_op=True)]
        assert float(works[0].wait().sum()) == 3e6
        assert float(works[1].wait().sum()) == 1.5e6


@pytest.mark.ranks(2)
def test_what_cannot_serve(comm):
    learned = comm.all_reduce(torch.ones(4), async_op=True).wait()
    assert learned.tolist() == [2] * 4
    followed = torch.ones(4, requires_grad=True)
    assert comm.all_reduce(followed.detach(), async_op=True).wait().tolist() == [2] * 4
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        comm.all_reduce(torch.ones(4), out=followed, async_op=True)
    with pytest.raises(ArgumentError):
        comm.all_reduce(torch.ones(4), out=torch.ones(3), async_op=True)
    with pytest.raises(GpucollError):
        comm.all_reduce(torch.ones(4), out=torch.ones(4, dtype=torch.int64), async_op=True)
    strided = torch.arange(8.0)[::2]
    assert comm.all_reduce(strided, async_op=True).wait().tolist() == [0, 4, 8, 12]
    comm.all_reduce(torch.ones(4), out=strided, async_op=True).wait()
    assert strided.tolist() == [2] * 4
    with pytest.raises(ArgumentTypeError, match="conjugate"):
        comm.all_reduce(torch.tensor([1 + 2j]).conj(), async_op=True)
    assert comm.all_reduce(torch.tensor(3), async_op=True).wait() == 6
    with torch.inference_mode():
        x = torch.ones(4)
        assert comm.all_reduce(x, out=x, async_op=True).wait().tolist() == [2] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(2, 3)
def test_messages(comm, dtype):
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    x, wanted = values(comm.rank, dtype), values(left, dtype)
    for round_number in range(3):
        out = torch.zeros_like(x)
        version = out._version
        work = comm.recv(out, left, async_op=True)
        comm.send(x, right, async_op=True).wait()
        assert work.wait() is out
        assert work.message.count == 24
        assert out._version > version
        assert torch.equal(out, wanted)

        out = torch.zeros_like(x)
        comm.send(x, right)
        version = out._version
        assert comm.recv(out, left) is out
        assert out._version > version
        assert torch.equal(out, wanted)

        comm.send(x, right, 3, synchronous=True, async_op=True)
        got, message = comm.recv(torch.zeros_like(x), left, 3, info=True)
        assert torch.equal(got, wanted)
        assert message.source == left
        if dtype != "bfloat16":
            assert isinstance(work, BegunMessage) or not round_number  # the first is learned from
            comm.send(x, right)
            assert_same(comm.recv(np.zeros((12, 2), dtype), left), wanted.numpy())


@pytest.mark.ranks(2)
def test_messages_that_do_not_fit(comm):
    x, peer = torch.ones(4), 1 - comm.rank
    for _ in range(2):
        comm.send(x, peer)
        for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.int32)):
            with pytest.raises(MismatchError):
                comm.recv(wrong, peer)
            work = comm.recv(wrong, peer, async_op=True)
            with pytest.raises(MismatchError):
                work.wait()
        strided = torch.zeros(8)[::2]
        assert comm.recv(strided, peer).tolist() == [1] * 4
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            comm.recv(torch.zeros(4, requires_grad=True), peer)
        comm.send(x[::2], peer)
        assert comm.recv(torch.zeros(2), peer, timeout_s=10).tolist() == [1, 1]
