"""CuPy and Numba arrays, by doubles with the attributes that theirs have."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpucoll import arrays
from gpucoll.arrays import libraries
from gpucoll.arrays.arguments import destination_of, prepare, source_of, template_like, template_of
from gpucoll.errors import ArgumentError, ArgumentTypeError


class DeviceArray:
    """Stands for CuPy's array class: the attributes that are used, and no more."""

    def __init__(self, array):
        self._array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.device = SimpleNamespace(id=2)
        for name in ("shape", "dtype", "strides", "flags"):
            setattr(self, name, getattr(array, name))

    def __setitem__(self, where, value):
        self._array[where] = value._array


DeviceArray.__module__ = "cupy._core.core"


@pytest.fixture(params=[False, True], ids=["cuda", "rocm"])
def cupy(request, monkeypatch):
    made: Any = ModuleType("cupy")
    made.ndarray = DeviceArray
    made.empty = lambda shape, dtype: DeviceArray(np.empty(shape, dtype))
    made.ascontiguousarray = lambda x: DeviceArray(np.ascontiguousarray(x._array))
    made.cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=request.param, getDevice=lambda: 5),
        get_current_stream=lambda device: SimpleNamespace(ptr=1000 + device),
        Device=lambda number: contextlib.nullcontext(),
    )
    monkeypatch.setitem(sys.modules, "cupy", made)
    yield "rocm" if request.param else "cuda"
    del sys.modules["gpucoll.arrays.cupy_arrays"]
    delattr(arrays, "cupy_arrays")
    libraries._library_of_type.cache_clear()


def test_cupy(cupy):
    array = np.arange(6.0).reshape(2, 3)
    x = DeviceArray(array)

    buffer = source_of(x).buffer
    assert (buffer.address, buffer.dtype, buffer.shape) == (array.ctypes.data, "float64", (2, 3))
    assert (buffer.device, buffer.stream) == (f"{cupy}:2", 1002)
    packed = source_of(DeviceArray(array.T)).buffer
    assert packed.shape == (3, 2)
    assert np.array_equal(packed.owner._array, array.T)
    made = prepare(x, shape=(4,))
    assert made.destination.device == f"{cupy}:2"
    assert made.finish() is made.lasting
    assert made.finish().shape == (4,)


def test_cupy_out(cupy):
    whole = np.zeros((4, 3))
    x, out = DeviceArray(np.ones(6)), DeviceArray(whole[::2])

    arguments = prepare(x, out)
    arguments.destination.owner._array[...] = 1
    assert arguments.finish() is out
    assert whole.sum() == 6
    with pytest.raises(ArgumentError, match="out overlaps x"):
        prepare(DeviceArray(whole[:2]), DeviceArray(whole[1:3]))
    with pytest.raises(ArgumentTypeError, match=r"a CuPy array; got numpy.ndarray"):
        prepare(x, whole)


def test_cupy_described(cupy):
    assert template_like((2,), "int8", DeviceArray(np.zeros(3))).device == f"{cupy}:2"


class NumbaDouble:
    """Stands for Numba's device array."""

    def __init__(self, array, stream=0):
        self.array = array
        self.dtype = array.dtype
        self.stream = stream
        self.gpu_data = SimpleNamespace(context=SimpleNamespace(device=SimpleNamespace(id=3)))

    @property
    def __cuda_array_interface__(self):
        stream = {"stream": self.stream} if self.stream else {}
        return {**self.array.__array_interface__, "version": 3, **stream}


NumbaDouble.__module__ = "numba.cuda.cudadrv.devicearray"


def test_numba(monkeypatch):
    cuda = pytest.importorskip("numba.cuda")
    monkeypatch.setattr(
        cuda, "device_array", lambda shape, dtype: NumbaDouble(np.empty(shape, dtype))
    )
    x = NumbaDouble(np.zeros((2, 3), np.int16), stream=99)

    template = template_of(x)
    assert (template.dtype, template.device, template.stream) == ("int16", "cuda:3", 99)
    made = destination_of(template, (4,))
    assert type(made.finish()) is NumbaDouble
    assert made.buffer.device == "cuda:3"
    assert template_like((2,), "int8", x).device == "cuda:3"
    with pytest.raises(ArgumentError, match="Numba cannot pack it"):
        source_of(NumbaDouble(np.zeros((2, 3)).T))


def test_other_things_of_numba():
    from numba import int64

    with pytest.raises(ArgumentTypeError, match="x must be an array"):
        template_of(int64)
