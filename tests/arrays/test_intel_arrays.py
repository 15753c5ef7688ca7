"""Arrays on Intel GPUs, as their attributes describe them: no library of Intel's, and no GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from gpucoll.arrays import dlpack, foreign_arrays, streams
from gpucoll.arrays.device_array import DeviceArray
from gpucoll.arrays.libraries import is_array, library_of
from gpucoll.errors import ArgumentError, ArgumentTypeError

QUEUE = 0x7F0000001000


class Device:
    """dpctl's SyclDevice."""

    def get_device_id(self):
        return 1


class Queue:
    """dpctl's SyclQueue."""

    sycl_device = Device()

    def addressof_ref(self):
        return QUEUE


class Usm:
    """An array of dpctl or dpnp, over host memory."""

    def __init__(self, values, *, offset=0, is_read_only=False, queue=None):
        self.values = values
        self._said = {
            "data": (values.ctypes.data, is_read_only),
            "shape": values.shape,
            "strides": tuple(step // values.itemsize for step in values.strides),
            "typestr": values.dtype.str,
            "offset": offset,
            "version": 1,
            "syclobj": queue or Queue(),
        }

    @property
    def __sycl_usm_array_interface__(self):
        return self._said


def test_usm_arrays():
    x = Usm(np.arange(6, dtype=np.float32).reshape(2, 3), offset=2)
    assert is_array(x)
    assert library_of(x, "x") is foreign_arrays
    view = foreign_arrays.look(x, "x")
    assert view.strides is None
    assert view.address == x.values.ctypes.data + 8
    template = view.template
    assert (template.device, template.dtype, template.stream) == ("sycl:1", "float32", QUEUE)
    assert streams.current_stream(template) == QUEUE


def test_strides_count_elements():
    view = foreign_arrays.look(Usm(np.zeros((4, 6))[:, ::2]), "x")
    assert view.strides == (48, 16)


def test_read_only():
    with pytest.raises(ArgumentError, match="out is read-only"):
        foreign_arrays.look_at_out(Usm(np.zeros(3), is_read_only=True))


def test_without_a_queue():
    with pytest.raises(ArgumentTypeError, match="does not say on which queue"):
        foreign_arrays.look(Usm(np.zeros(3), queue="level_zero:gpu:0"), "x")


def test_dlpack():
    memory = ctypes.create_string_buffer(64)
    x = DeviceArray(ctypes.addressof(memory), (16,), "float32", "sycl:2", memory)
    assert x.__dlpack_device__() == (14, 2)
    assert not hasattr(x, "__cuda_array_interface__")
    assert dlpack.device_of(x) == "sycl:2"
    view = foreign_arrays.look(x, "x")
    assert (view.template.device, view.address) == ("sycl:2", ctypes.addressof(memory))


class XpuStream:
    """PyTorch's torch.xpu.Stream."""

    sycl_queue = QUEUE


@pytest.mark.parametrize("stream", [Queue(), XpuStream(), QUEUE])
def test_streams(stream):
    assert streams.address_of(stream) == QUEUE
