"""An array over device memory, taken over by other libraries: here on host memory, as theirs."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from gpucoll.arrays import device_array, dlpack
from gpucoll.arrays.device_array import DeviceArray
from gpucoll.types import DTYPES

ON_HOST = "cpu"


class Owner:
    """Some memory of the host."""

    def __init__(self, size_bytes=64):
        self.memory = (ctypes.c_ubyte * size_bytes)(*range(size_bytes))
        self.address = ctypes.addressof(self.memory)


def made(shape=(2, 3), dtype="float32", device=ON_HOST):
    owner = Owner()
    return DeviceArray(owner.address, shape, dtype, device, owner), weakref.ref(owner)


def handed_over():
    gc.collect()
    return len(device_array._handed_over)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 0, 3), (1, 2, 1)])
def test_numpy_takes_it_over(shape):
    array, owner = made(shape)
    before = handed_over()

    taken = np.from_dlpack(array)
    assert handed_over() == before + 1
    del array
    assert owner() is not None
    assert taken.shape == shape
    assert taken.dtype == np.float32
    assert taken.flags.c_contiguous
    if taken.size:
        assert taken.ctypes.data == owner().address
        assert taken.ravel()[-1] == np.frombuffer(owner().memory, np.float32)[taken.size - 1]
    view = taken[..., None]
    del taken
    assert owner() is not None
    del view
    assert handed_over() == before
    assert owner() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_takes_every_dtype_over(dtype):
    torch = pytest.importorskip("torch")
    known = getattr(torch, dtype, None)
    if known is None:
        pytest.skip(f"this PyTorch has no {dtype}")
    array, owner = made((2, 2), dtype)
    before = handed_over()

    try:
        taken = torch.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        if dtype.startswith(("float8", "uint")):
            pytest.skip(f"this PyTorch takes no {dtype} over: {error}")
        raise
    assert (taken.dtype, taken.data_ptr()) == (known, owner().address)
    assert dlpack.read(taken, "x").dtype == dtype or dtype.startswith("float8")
    del array, taken
    assert (handed_over(), owner()) == (before, None)


@pytest.mark.parametrize("knows_float8", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_adopts_float8(monkeypatch, shape, knows_float8):
    torch = pytest.importorskip("torch")
    from gpucoll.arrays import torch_tensors

    convert = torch.from_dlpack

    def from_dlpack(array):
        if array.dtype.startswith("float8") and not knows_float8:
            raise RuntimeError("Unsupported code 10")
        return convert(array)

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    array, owner = made(shape, "float8_e4m3fn")
    template = torch_tensors.template_of_dtype("float8_e4m3fn")
    before = handed_over()

    taken = torch_tensors.adopt(array, template)
    assert (taken.dtype, tuple(taken.shape)) == (torch.float8_e4m3fn, shape)
    del array
    assert owner() is not None
    assert taken.numel() == 0 or taken.data_ptr() == owner().address
    del taken
    assert (handed_over(), owner()) == (before, None)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1)])
def test_a_capsule_that_nobody_takes(max_version):
    array, owner = made()
    before = handed_over()

    capsule = array.__dlpack__(max_version=max_version, stream=1)
    name = "dltensor_versioned" if max_version and max_version[0] else "dltensor"
    assert f'"{name}"' in repr(capsule)
    assert handed_over() == before + 1
    del array
    assert owner() is not None
    del capsule
    assert (handed_over(), owner()) == (before, None)


def test_our_own_reader_agrees():
    array, _ = made((2, 3), "bfloat16", "cuda:3")
    tensor = dlpack.read(array, "x")

    assert (tensor.address, tensor.shape, tensor.strides) == (array.address, (2, 3), None)
    assert (tensor.dtype, tensor.item_bytes, tensor.device) == ("bfloat16", 2, "cuda:3")
    assert not tensor.is_read_only


@pytest.mark.parametrize(("device", "expected"), [("cuda:3", (2, 3)), ("rocm:1", (10, 1))])
def test_its_device(device, expected):
    array, _ = made(device=device)

    assert array.__dlpack_device__() == expected
    assert repr(array) == f"<DeviceArray float32[2, 3] on {device}>"


def test_the_cuda_array_interface():
    array, _ = made((2, 3), "complex64", "cuda:0")

    assert array.__cuda_array_interface__ == {
        "version": 3,
        "shape": (2, 3),
        "typestr": "<c8",
        "data": (array.address, False),
        "strides": None,
        "stream": None,
    }
    assert array.size_bytes == 48
    assert made((0, 3))[0].__cuda_array_interface__["data"] == (0, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype):
    known = getattr(ml_dtypes, dtype, None) or dtype
    array, _ = made((3,), dtype)

    assert array.size_bytes == 3 * np.dtype(known).itemsize
    assert hasattr(array, "__cuda_array_interface__") == (known is dtype)


def test_what_cannot_be_handed_over():
    array, _ = made(device="cuda:0")

    with pytest.raises(BufferError, match="never copied"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="is on cuda:0"):
        array.__dlpack__(dl_device=(1, 0))
    array.__dlpack__(dl_device=(2, 0), copy=False)


def test_a_taker_that_outlives_the_interpreter():
    """A structure that is still handed over at exit is given back without a call into Python."""
    code = """
import atexit, ctypes
from gpucoll.arrays import device_array
libc = ctypes.CDLL(None)
def last():  # runs after the module's own hook: hooks run in reverse order
    for structure in device_array._handed_over:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        deleter = device_array.ManagedTensor.from_address(structure).deleter
        kind(deleter)(structure)
        print("given back", len(device_array._handed_over))
memory = (ctypes.c_ubyte * 8)()
array = device_array.DeviceArray(ctypes.addressof(memory), (2,), "float32", "cpu", memory)
capsule = array.__dlpack__()
atexit.unregister(device_array._outlive_the_interpreter)
atexit.register(last)
atexit.register(device_array._outlive_the_interpreter)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr, done.returncode) == ("given back 1\n", "", 0)
