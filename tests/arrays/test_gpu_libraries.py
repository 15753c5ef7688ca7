"""CuPy and Numba arrays, by doubles with the attributes that theirs have."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from gpucoll import arrays
from gpucoll.arrays import device_array, libraries
from gpucoll.arrays.operands import destination_of, prepare, source_of, template_like, template_of
from gpucoll.errors import ArgumentError, ArgumentTypeError


class DeviceArray:
    """Stands for CuPy's array class: the attributes that are used, and no more."""

    def __init__(self, array, dtype=None, memory=None):
        if memory is not None:
            array = np.ndarray(array, dtype, memory)
        self._array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.device = SimpleNamespace(id=2)
        for name in ("shape", "dtype", "strides", "flags"):
            setattr(self, name, getattr(array, name))

    def __setitem__(self, where, value):
        self._array[where] = served(value._array)

    def view(self, dtype):
        return DeviceArray(self._array.view(dtype))


def served(array):
    """Return an array of a dtype that CuPy's kernels know."""
    if array.dtype.name.startswith("float8"):
        raise ValueError(f"Unsupported dtype {array.dtype}")
    return array


DeviceArray.__module__ = "cupy._core.core"


@pytest.fixture(params=[False, True], ids=["cuda", "rocm"])
def cupy(request, monkeypatch):
    made: Any = ModuleType("cupy")
    made.ndarray = DeviceArray
    made.empty = lambda shape, dtype: DeviceArray(served(np.empty(shape, dtype)))
    made.ascontiguousarray = lambda x: DeviceArray(np.ascontiguousarray(served(x._array)))
    made.cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=request.param, getDevice=lambda: 5),
        get_current_stream=lambda device: SimpleNamespace(ptr=1000 + device),
        Device=lambda number: contextlib.nullcontext(),
        alloc=lambda size_bytes: np.empty(size_bytes, np.uint8),
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


def test_cupy_float8(cupy):
    """CuPy has arrays of float8, and makes, packs and fills none."""
    values = np.arange(12, dtype=np.float32).astype("float8_e4m3fn").reshape(3, 4)
    whole = np.zeros((2, 8), "float8_e4m3fn")
    x, out = DeviceArray(values.T), DeviceArray(whole[:, ::2])

    made, filled = prepare(x), prepare(DeviceArray(values[:2]), out)
    for each, expected in ((made, values.T), (filled, values[:2])):
        assert each.destination.dtype == "float8_e4m3fn"
        each.destination.owner._array[...] = each.source.owner._array
        assert np.array_equal(each.finish()._array, expected)
    assert made.source.owner._array.flags.c_contiguous
    assert np.array_equal(whole[:, ::2], values[:2])


def test_cupy_described(cupy):
    assert template_like((2,), "int8", DeviceArray(np.zeros(3))).device == f"{cupy}:2"


@pytest.fixture
def numba(monkeypatch):
    """Numba's own arrays, over memory of the host: they do not look at it."""
    cuda: Any = pytest.importorskip("numba.cuda")
    from numba.cuda.cudadrv import devicearray, driver

    def wrap(array, stream: Any = 0):
        context = SimpleNamespace(device=SimpleNamespace(id=3))
        pointer = ctypes.c_void_p(array.ctypes.data)
        memory = driver.MemoryPointer(context, pointer, array.nbytes, owner=array)
        return devicearray.DeviceNDArray(array.shape, array.strides, array.dtype, stream, memory)

    entered: list[int] = []

    def device_array(shape, dtype, stream=0):
        return wrap(np.empty(shape, dtype), stream)

    monkeypatch.setattr(cuda, "gpus", Gpus(entered))
    monkeypatch.setattr(cuda, "device_array", device_array)
    return SimpleNamespace(wrap=wrap, entered=entered, cuda=cuda)


class Gpus:
    """Stands for ``numba.cuda.gpus``: notes which GPUs were made the current one."""

    def __init__(self, entered):
        self.entered = entered

    def __getitem__(self, number):
        self.entered.append(number)
        return contextlib.nullcontext()


class Stream:
    """A stream of some library."""

    def __cuda_stream__(self):
        return 0, 99


def test_numba(numba):
    stream = Stream()
    array = np.zeros((2, 3), np.int16)
    x = numba.wrap(array, stream)

    view = template_of(x).library.look(x, "x")
    assert (view.address, view.owner, view.strides) == (array.ctypes.data, x, None)
    template = view.template
    assert (template.dtype, template.device, template.stream) == ("int16", "cuda:3", 99)
    made = destination_of(template, (4,))
    assert type(made.finish()) is type(x)
    assert made.finish().stream is stream
    assert (made.buffer.device, made.buffer.stream, numba.entered) == ("cuda:3", 99, [3])
    other = template_like((2,), "int8", x)
    assert (other.device, other.dtype, other.stream) == ("cuda:3", "int8", 99)
    assert template_of(numba.wrap(array)).stream == 0
    with pytest.raises(ArgumentError, match="x is not contiguous, and Numba cannot pack it"):
        source_of(numba.wrap(np.zeros((2, 3)).T))  # for there is no GPU


def test_numba_arrays_that_its_interface_does_not_tell_apart(numba):
    row = numba.wrap(np.broadcast_to(np.zeros(3), (4, 3)))
    assert row.__cuda_array_interface__["strides"] is None
    assert template_of(row).library.look(row, "x").strides == (0, 8)
    with pytest.raises(ArgumentError, match="share their memory"):
        prepare(numba.wrap(np.zeros((4, 3))), row)
    half = numba.wrap(np.zeros(3, ml_dtypes.bfloat16))
    pairs = numba.wrap(np.zeros(3, [("a", "i4"), ("b", "f4")]))
    assert [template_of(x).dtype for x in (half, pairs)] == [
        "bfloat16",
        "[('a', '<i4'), ('b', '<f4')]",
    ]


def test_numba_over_memory_of_ours(numba, monkeypatch):
    seen: dict[str, Any] = {}

    def take(interface, owner):
        seen.update(interface, dtype=np.dtype(interface["typestr"]), owner=owner)

    monkeypatch.setattr(numba.cuda, "from_cuda_array_interface", take)
    for shape, address in (((2,), 4096), ((0,), 0)):
        template = template_like(shape, "bfloat16", numba.wrap(np.zeros(2)))
        memory = device_array.DeviceArray(4096, shape, "bfloat16", "cuda:3", None)
        cast(Any, template.library).adopt(memory, template)
        assert (seen["dtype"], seen["shape"]) == (ml_dtypes.bfloat16, shape)
        assert (seen["data"], seen["owner"]) == ((address, False), memory)
    assert numba.entered == [3, 3]


def test_other_things_of_numba():
    from numba import int64

    with pytest.raises(ArgumentTypeError, match="x must be an array"):
        template_of(int64)
