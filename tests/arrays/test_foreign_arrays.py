"""Arrays seen through ``__array_interface__``, ``__cuda_array_interface__`` or DLPack alone."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from tests.moving import move

from gpucoll.arrays import dlpack
from gpucoll.arrays.operands import (
    destination_of,
    ensure_served,
    prepare,
    source_of,
    template_like,
    template_of,
)
from gpucoll.errors import ArgumentError, ArgumentTypeError


class WithInterface:
    """Says where a NumPy array lies, as many image and sensor libraries do."""

    def __init__(self, array, **more):
        self.array = array
        self.more = more

    @property
    def __array_interface__(self):
        return {**self.array.__array_interface__, **self.more}


class WithDlpack:
    """Says where an array lies through DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **version):
        return self.array.__dlpack__(**version)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class WithOldDlpack(WithDlpack):
    """The same, as before version 1 of DLPack."""

    def __dlpack__(self, *, stream=None):  # type: ignore[override]
        return self.array.__dlpack__()


WRAPPERS = [WithInterface, WithDlpack, WithOldDlpack]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
def test_host_arrays(wrap, dtype):
    array = np.array([[1, 0, 1], [0, 1, 1]], dtype)

    template = template_of(wrap(array))
    assert template[:3] == ((2, 3), dtype, array.itemsize)
    assert source_of(wrap(array)).buffer.address == array.ctypes.data
    for x in (array, array.T, array[::2, ::2], array[:, ::-1], array[:0]):
        same = move(wrap(x))
        assert type(same) is np.ndarray
        assert np.array_equal(same, x)
        assert same.dtype == dtype


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_out(wrap):
    x, whole = wrap(np.arange(6.0)), np.zeros((4, 6))

    out = wrap(whole[::2, 1:4])
    assert move(x, out) is out
    assert out.array.flatten().tolist() == x.array.tolist()
    assert whole.sum() == 15
    assert move(x, x) is x
    with pytest.raises(ArgumentError, match="out overlaps x"):
        prepare(wrap(whole[:2]), wrap(whole[1:3]))
    with pytest.raises(ArgumentTypeError, match="out must be of x's library"):
        prepare(x, np.zeros(6))


@pytest.mark.parametrize("wrap", [WithInterface, WithDlpack])
def test_read_only(wrap):
    array = np.zeros(3)
    array.flags.writeable = False
    if wrap is WithDlpack and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy before 2.1 shows no read-only array through DLPack")

    assert move(wrap(array)).tolist() == [0, 0, 0]
    with pytest.raises(ArgumentError, match="out is read-only"):
        prepare(wrap(np.ones(3)), wrap(array))


def test_an_out_that_hands_over_a_copy_is_refused():
    class Copying(WithDlpack):
        def __dlpack__(self, **how):
            return self.array.__dlpack__(**how, copy=True)

    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy before 2.1 hands over no copies through DLPack")
    assert move(Copying(np.ones(3))).tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match="out hands over a copy of its memory by DLPack"):
        prepare(Copying(np.ones(3)), Copying(np.zeros(3)))


@pytest.mark.parametrize("name", ["__array_interface__", "__cuda_array_interface__"])
def test_an_object_may_say_where_it_lies_though_its_class_does_not(name):
    x, array = SimpleNamespace(), np.arange(3.0)
    setattr(x, name, array.__array_interface__)

    assert source_of(x).buffer.address == array.ctypes.data
    with pytest.raises(ArgumentTypeError, match="must be an array"):
        template_of(type("Bare", (), {name: None})())
    with pytest.raises(ArgumentTypeError, match=r"must be an array.*got builtins.type"):
        template_of(type("Class", (), {name: array.__array_interface__}))


def test_a_dimension_of_one_element_may_have_any_stride():
    x = np.zeros((1, 5))[:, :2]

    assert dlpack.is_contiguous((1, 2), (40, 8), 8)
    assert not dlpack.is_contiguous((2, 2), (40, 8), 8)
    assert source_of(WithInterface(x)).buffer.address == x.ctypes.data


def test_interfaces_that_cannot_serve():
    with pytest.raises(ArgumentTypeError, match="byte order"):
        prepare(WithInterface(np.zeros(2, ">i4")))
    with pytest.raises(ArgumentTypeError, match="masked"):
        prepare(WithInterface(np.zeros(2), mask=WithInterface(np.zeros(2, bool))))
    with pytest.raises(ArgumentTypeError, match="dtype '<z4' is not known to NumPy"):
        prepare(WithInterface(np.zeros(2), typestr="<z4"))


def test_an_interface_may_hand_its_data_over_as_bytes():
    x = WithInterface(np.zeros(3, np.uint8), data=b"abc")

    assert move(x).tolist() == list(b"abc")


def test_an_interface_without_data_is_of_the_object_s_own_bytes():
    class Packed(bytearray):
        @property
        def __array_interface__(self):
            return {"version": 3, "shape": (3,), "typestr": "<f8"}

    assert move(Packed(np.arange(3.0).tobytes())).tolist() == [0, 1, 2]


def test_structured_elements():
    x = np.zeros(2, [("a", "i4"), ("b", "f8")])

    assert move(WithInterface(x)).dtype == x.dtype


def test_dlpack_types_that_numpy_does_not_read():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = WithDlpack(torch.ones(3, dtype=torch.bfloat16))

    assert move(x).dtype.name == "bfloat16"


def test_libraries_of_the_array_api_get_their_own_arrays_back():
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    x = strict.asarray([[1.0, 2.0], [3.0, 4.0]])

    for one in (x, x.T):
        same = move(one)
        assert type(same) is type(x)
        assert strict.all(same == one)
    assert template_like((2,), "int8", like=x).dtype == "int8"


# --- GPUs, by doubles that have the same attributes -----------------------------------------------


class OnCuda:
    """Device memory by its interface; the address is host memory that nobody reads."""

    device = "gpu seven"

    def __init__(self, array, **more):
        self.array = array
        self.dtype = array.dtype
        self.more = more

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__array_interface__, "version": 3, **self.more}


class OnCudaSeven(OnCuda):
    def __dlpack_device__(self):
        return 2, 7

    def __array_namespace__(self):
        def empty(shape, dtype, device):
            assert device == self.device
            return OnCudaSeven(np.empty(shape, dtype))

        return SimpleNamespace(empty=empty)


def test_cuda_interface():
    array = np.zeros((2, 3), np.float32)

    source = source_of(OnCuda(array, stream=1)).buffer
    assert (source.address, source.shape, source.dtype) == (array.ctypes.data, (2, 3), "float32")
    assert (source.device, source.stream) == ("cuda", 1)
    assert template_of(OnCudaSeven(array)).device == "cuda:7"
    arguments = prepare(OnCudaSeven(array), shape=(5,))
    assert arguments.destination.device == "cuda:7"
    assert type(arguments.finish()) is OnCudaSeven
    ensure_served(arguments.template)


def test_cuda_arrays_that_cannot_serve():
    array = np.zeros((2, 3), np.float32)

    with pytest.raises(ArgumentError, match=r"new .*OnCuda is not known: give out="):
        prepare(OnCuda(array))
    assert prepare(OnCuda(array), OnCuda(array)).destination.device == "cuda"
    with pytest.raises(ArgumentError, match="is not contiguous"):
        source_of(OnCuda(array.T))
    with pytest.raises(ArgumentError, match="out overlaps x"):
        prepare(OnCuda(array[:1]), OnCuda(array[:, 1:].T), shape=(4,))
    with pytest.raises(ArgumentError, match="out lies on cuda, but x on cuda:7"):
        prepare(OnCudaSeven(array), OnCuda(array))


class DlpackDouble:
    """Any device and dtype through DLPack, the old way."""

    def __init__(self, device, code=2, bits=32, lanes=1):
        self.kind = device
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.tensor = dlpack._Tensor(0x1000, *device, 2, code, bits, lanes, self.shape, None, 16)

    def __dlpack__(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return self.kind


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ((1, 0), "cpu"),
        ((2, 3), "cuda:3"),
        ((3, 0), "cpu"),
        ((10, 1), "rocm:1"),
        ((13, 0), "cuda:0"),
    ],
)
def test_dlpack_devices(device, name):
    buffer = source_of(DlpackDouble(device)).buffer

    assert (buffer.address, buffer.shape, buffer.dtype) == (0x1010, (2, 3), "float32")
    assert (buffer.device, buffer.stream) == (name, 0)


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [(4, 16, "bfloat16"), (10, 8, "float8_e4m3fn"), (12, 8, "float8_e5m2"), (6, 8, "bool"),
     (5, 64, "complex64"), (1, 16, "uint16")],
)  # fmt: skip
def test_dlpack_dtypes(code, bits, name):
    template = template_of(DlpackDouble((2, 0), code, bits))

    assert (template.dtype, template.item_bytes) == (name, bits // 8)


@pytest.mark.parametrize(("code", "bits", "lanes"), [(2, 32, 4), (3, 64, 1), (17, 4, 1)])
def test_dlpack_dtypes_without_a_name(code, bits, lanes):
    with pytest.raises(ArgumentTypeError, match="has no name here"):
        template_of(DlpackDouble((2, 0), code, bits, lanes))


def test_a_new_array_without_an_input_is_numpy_s():
    template = template_like((2,), like=WithInterface(np.zeros(3)))

    assert type(destination_of(template, (2,)).finish()) is np.ndarray


@pytest.mark.parametrize(
    ("kind", "name"),
    [(1, "cpu"), (2, "cuda:3"), (3, "cpu"), (8, "metal:3"), (9, "vpi:3"), (10, "rocm:3")],
)
def test_devices_have_our_names(kind, name):
    assert dlpack.device_of(SimpleNamespace(__dlpack_device__=lambda: (kind, 3))) == name
