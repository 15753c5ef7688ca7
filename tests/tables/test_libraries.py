"""Tables with ids, values and results of PyTorch and JAX."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.tables import Table

START = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.ranks(1)
def test_torch(comm):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with Table(comm, 4, 3, torch.float32, init=torch.arange(12.0).reshape(4, 3)) as table:
        ids = torch.tensor([[3, 0], [1, 1]])
        rows = table.pull(ids)
        assert isinstance(rows, torch.Tensor)
        assert rows.dtype == torch.float32
        assert rows.tolist() == START[ids.numpy()].tolist()
        assert table.pull(ids.to(torch.int32).T).tolist() == START[ids.numpy().T].tolist()
        out = torch.zeros(2, 2, 3)
        assert table.pull(ids, out=out) is out
        assert out.tolist() == rows.tolist()
        table.push(ids, torch.ones(2, 2, 3))
        table.push(ids.numpy(), torch.ones(2, 3, 2).transpose(1, 2))
        table.push(torch.tensor(0), np.ones(3, "f4"))
        assert (table.snapshot() - START)[:, 0].tolist() == [3, 4, 0, 2]
        with pytest.raises(ArgumentTypeError, match="out must be of x's library"):
            table.pull(ids, out=np.ones((2, 2, 3), "f4"))
        with pytest.raises(ArgumentTypeError, match="ids must be integers; got float32"):
            table.pull(torch.ones(2))


@pytest.mark.ranks(1)
def test_torchs_bfloat16(comm):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with Table(comm, 4, 3, torch.bfloat16, update="adagrad", init=1) as table:
        table.push(torch.tensor([1]), torch.ones(1, 3, dtype=torch.bfloat16))
        rows = table.pull(torch.tensor([1, 2]))
        assert rows.dtype == torch.bfloat16
        assert rows[1].tolist() == [1] * 3
        assert rows[0].tolist() == torch.full((3,), 0.99).to(torch.bfloat16).tolist()


@pytest.mark.ranks(1)
def test_tensors_that_are_not_in_host_memory(comm):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with Table(comm, 4, 3) as table:
        ids = torch.zeros(2, dtype=torch.int64, device="meta")
        with pytest.raises((ArgumentError, ArgumentTypeError), match="meta"):
            table.pull(ids)


@pytest.mark.ranks(1)
def test_jax(comm):
    numpy = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    with Table(comm, 4, 3, init=START) as table:
        ids = numpy.array([3, 1])
        rows = table.pull(ids)
        assert isinstance(rows, type(ids))
        assert rows.tolist() == START[[3, 1]].tolist()
        table.push(ids, rows)
        assert table.pull(ids).tolist() == (2 * START[[3, 1]]).tolist()
