"""Published with arrays of PyTorch and JAX: each rank reads those of its own library."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll import ArgumentError
from gpucoll.tables import Published


@pytest.mark.ranks(2)
def test_a_module_of_torch_and_arrays_of_numpy(comm):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 2)
    weights = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    like = module.state_dict() if comm.rank == 0 else weights
    with Published(comm, like) as shared:
        if comm.rank == 0:
            with torch.no_grad():
                module.weight[:] = torch.arange(6.0).reshape(2, 3)
                module.bias[:] = -1
            shared.publish(dict(module.named_parameters()))
        _, found = shared.latest(wait=True)
        assert type(found["bias"]) is (torch.Tensor if comm.rank == 0 else np.ndarray)
        assert np.asarray(found["weight"]).tolist() == [[0, 1, 2], [3, 4, 5]]
        other = torch.nn.Linear(3, 2)
        before = [*other.parameters()]
        shared.latest(out=dict(other.named_parameters()))
        assert other.bias.tolist() == [-1, -1]
        assert all(one is two for one, two in zip(before, other.parameters(), strict=True))
        other(torch.zeros(1, 3)).sum().backward()
        comm.barrier()


TORCH_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "float8_e4m3fn"),
]


@pytest.mark.ranks(2)
def test_dtypes_of_torch(comm):
    torch = pytest.importorskip("torch")
    values = torch.arange(6).reshape(2, 3) % 2
    arrays = {name: values.to(getattr(torch, name)) for name in TORCH_DTYPES}
    arrays["0-d"] = torch.tensor(3.0, dtype=torch.bfloat16)
    arrays["transposed"] = torch.arange(6.0).reshape(2, 3).t()
    arrays["none"] = torch.zeros(0, 4)
    zeros = {name: torch.zeros_like(array) for name, array in arrays.items()}
    with Published(comm, zeros) as shared:
        if comm.rank == 0:
            shared.publish(arrays)
        _, found = shared.latest(wait=True, out=zeros if comm.rank else None)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert found[name].tolist() == array.tolist(), name
        comm.barrier()


@pytest.mark.ranks(2)
def test_arrays_of_jax(comm):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    arrays = (jnp.arange(6.0).reshape(2, 3), [jnp.ones(3, jnp.bfloat16)])
    zeros = jax.tree.map(jnp.zeros_like, arrays)
    with Published(comm, zeros) as shared:
        if comm.rank == 0:
            shared.publish(arrays)
        _, found = shared.latest(wait=True)
        assert jax.tree.structure(found) == jax.tree.structure(arrays)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(arrays), strict=True):
            assert (one.dtype, one.sharding) == (two.dtype, two.sharding)
            assert (one == two).all()
        with pytest.raises(ArgumentError, match=r"out\[0\] cannot be written: leave out= out"):
            shared.latest(out=zeros)
        comm.barrier()
        if comm.rank == 0:
            shared.publish(zeros)
        shared.latest(1, wait=True)
        assert (found[0] == arrays[0]).all()  # what was read before has not changed
        comm.barrier()


@pytest.mark.ranks(2)
def test_a_bfloat16_of_torch_is_one_of_jax(comm):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    values = [0.5, -2.0, 3.0]
    if comm.rank == 0:
        like = torch.tensor(values, dtype=torch.bfloat16)
    else:
        like = jax.numpy.zeros(3, jax.numpy.bfloat16)
    with Published(comm, like) as shared:
        if comm.rank == 0:
            shared.publish(like)
        assert shared.latest(wait=True)[1].tolist() == values
        comm.barrier()
