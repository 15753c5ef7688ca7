"""What kind of array it is, by a fingerprint: the same only where a look would say the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from gpucoll.arrays import foreign_arrays, numpy_arrays
from gpucoll.arrays.library import fingerprint_of

torch = pytest.importorskip("torch")
torch_tensors = pytest.importorskip("gpucoll.arrays.torch_tensors")


def seen(library: Any, x: Any) -> tuple[Hashable, int]:
    found = fingerprint_of(library)(x)
    assert found is not None
    return found


def test_tensors_of_one_sort():
    x, y = torch.zeros(6), torch.ones(6)
    (sort, address), (same, elsewhere) = seen(torch_tensors, x), seen(torch_tensors, y)
    assert sort == same
    assert hash(sort) == hash(same)
    assert address == x.data_ptr() != elsewhere


def other_sorts():
    complex_ones = torch.ones(6, dtype=torch.complex64)
    return {
        "shape": torch.zeros(3, 2),
        "length": torch.zeros(7),
        "dtype": torch.zeros(6, dtype=torch.float64),
        "strides": torch.zeros(12)[::2],
        "conjugate": complex_ones.conj(),
        "negated": complex_ones.conj().imag,
        "device": torch.zeros(6, device="meta"),
    }


@pytest.mark.parametrize("name", other_sorts())
def test_tensors_of_another_sort(name):
    plain = [torch.zeros(6), torch.ones(6, dtype=torch.complex64), torch.ones(6)]
    other = fingerprint_of(torch_tensors)(other_sorts()[name])
    assert other is None or all(other[0] != seen(torch_tensors, x)[0] for x in plain)


def special():
    yield torch.zeros(6, requires_grad=True)
    yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    yield torch.eye(3).to_sparse()


@pytest.mark.parametrize("place", range(3))
def test_special_tensors_are_left_to_a_look(place):
    assert fingerprint_of(torch_tensors)(list(special())[place]) is None


def test_a_tensor_under_a_transform_is_left_to_a_look():
    found = []

    def inside(x):
        found.append(fingerprint_of(torch_tensors)(x))
        return x

    torch.vmap(inside)(torch.zeros(2, 3))
    assert found == [None]


def test_a_library_without_a_fingerprint_is_looked_at():
    x = np.zeros(6, np.float32)
    sort, address = seen(numpy_arrays, x)
    assert address == x.ctypes.data
    assert sort == seen(numpy_arrays, np.ones(6, np.float32))[0]
    assert sort != seen(numpy_arrays, np.zeros(12, np.float32)[::2])[0]
    x.flags.writeable = False
    assert fingerprint_of(numpy_arrays)(x) is None


class Bound:
    """An array that says on which stream it is used, as Numba's do."""

    def __init__(self, stream):
        self.stream = stream

    @property
    def __cuda_array_interface__(self):
        data = {"data": (4096, False), "version": 3, "stream": self.stream}
        return {"shape": (6,), "typestr": "<f4", **data}


def test_arrays_of_another_stream_are_of_another_sort():
    """For a cached call keeps what tells the stream of the first one."""
    first = seen(foreign_arrays, Bound(5))
    assert first == seen(foreign_arrays, Bound(5)) != seen(foreign_arrays, Bound(6))
