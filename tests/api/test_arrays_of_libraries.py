"""Collectives on arrays of other libraries: the oracle's result, as an array of that library."""

from __future__ import annotations

import array
import importlib
import importlib.util

import numpy as np
import pytest
from tests import oracle
from tests.dtypes import assert_same, dtype_of, small_values

from gpucoll.errors import ArgumentTypeError


def numpy_of(x) -> np.ndarray:
    """Return the elements of an array of any library."""
    if type(x).__module__ == "torch":
        import torch

        packed = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        name = str(x.dtype).removeprefix("torch.")
        return packed.view(torch.uint8).numpy().view(dtype_of(name))
    return np.asarray(x)


def make_numpy(values):
    return values


def make_torch(values):
    import torch

    return torch.frombuffer(
        bytearray(values.tobytes()), dtype=getattr(torch, values.dtype.name)
    ).reshape(values.shape)


def make_torch_view(values):
    return make_torch(np.repeat(values, 2))[::2].reshape(values.shape)


def make_jax(values):
    import jax.numpy

    return jax.numpy.asarray(values)


def make_strict(values):
    return importlib.import_module("array_api_strict").asarray(values)


def make_array(values):
    return array.array(values.dtype.char, values.tobytes())


def make_memoryview(values):
    return memoryview(values)


# name -> (how to make one, the package that must be there, dtypes)
KINDS = {
    "numpy": (make_numpy, "numpy", ["float32", "bfloat16", "int64"]),
    "torch": (make_torch, "torch", ["float32", "bfloat16", "float8_e5m2", "int64", "bool"]),
    "torch view": (make_torch_view, "torch", ["float32", "complex64"]),
    "jax": (make_jax, "jax", ["float32", "bfloat16", "int32"]),
    "array API": (make_strict, "array_api_strict", ["float64", "int16"]),
    "array.array": (make_array, "array", ["float32", "int8"]),
    "memoryview": (make_memoryview, "builtins", ["float64", "uint16"]),
}

# name -> (the call, what the oracle says); a collective that is added here is tested on every kind
COLLECTIVES = {
    "all_reduce": (lambda comm, x, **how: comm.all_reduce(x, **how), oracle.all_reduce),
    "broadcast": (
        lambda comm, x, **how: comm.broadcast(x, 1, **how),
        lambda inputs: oracle.broadcast(inputs, 1),
    ),
}

CASES = [(kind, name, dtype) for kind in KINDS for name in COLLECTIVES for dtype in KINDS[kind][2]]


def call_on(comm, kind, name, dtype, count):
    """Call as users do, and again as a work, and on what has an `out`."""
    make = KINDS[kind][0]
    collective, expected_of = COLLECTIVES[name]
    inputs = [small_values(dtype, count, 17 + rank) for rank in range(comm.world_size)]
    expected = expected_of(inputs)[comm.rank]
    x = make(inputs[comm.rank].copy())
    results = [collective(comm, x), collective(comm, x, async_op=True).wait()]
    assert_same(numpy_of(x), inputs[comm.rank], "the input")
    if kind != "jax" and kind != "array API":
        out = make(np.zeros_like(expected))
        given = collective(comm, x, out=out)
        assert given is out
        results += [given, collective(comm, x, out=x)]
        assert results[-1] is x
    for result in results:
        assert type(result) is type(x)
        assert_same(numpy_of(result), expected)
    return True


@pytest.mark.soak(quick=28)
@pytest.mark.parametrize(("kind", "name", "dtype"), CASES)
def test_results_are_of_the_input_s_kind(ranks, kind, name, dtype):
    package = KINDS[kind][1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for count in (1, 1000, 40_000):
        assert ranks.call(2, call_on, kind, name, dtype, count) == [True, True]


def mix_libraries(comm):
    """Each rank has its own library; the call is the same."""
    import torch

    x = np.arange(5, dtype=np.float32)
    if comm.rank == 0:
        x = torch.from_numpy(x)
    return type(comm.all_reduce(x)).__name__, numpy_of(comm.all_reduce(x)).tolist()


def test_ranks_may_use_different_libraries(ranks):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    expected = [0.0, 2.0, 4.0, 6.0, 8.0]

    assert ranks.call(2, mix_libraries) == [("Tensor", expected), ("ndarray", expected)]


def keep_a_refused_array(comm):
    with pytest.raises(ArgumentTypeError):
        comm.all_reduce({"a": 1})
    data = bytearray(b"abcd")
    result = comm.broadcast(data, root=1)
    data += b"e"  # the call lets go of its arrays
    result += b"f"
    return bytes(result)


def test_nothing_of_a_call_s_arrays_is_kept(ranks):
    assert ranks.call(2, keep_a_refused_array) == [b"abcdf"] * 2
