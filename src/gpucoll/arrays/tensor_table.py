"""The table with which compiled code reads PyTorch tensors: by PyTorch's own C functions.

A C++ compiler decides the offsets of a tensor's fields. But since 2.10 PyTorch publishes a table of
C functions (``__dlpack_c_exchange_api__``, of DLPack 1.3), one of which returns a tensor's address
and shape in 50 ns, without owning it. Facts that DLPack lacks (autograd, lazy negation and
conjugation) are read through Python's C API. With older versions, calls on tensors go through
Python.
Source: include/dlpack/dlpack.h, version 1.3; torch/csrc/autograd/python_variable.cpp, 2.13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.arrays import numpy_struct
from gpucoll.arrays.dlpack_codes import CODES
from gpucoll.blocks import Block, Field, Words

if TYPE_CHECKING:
    import torch

    Increment: TypeAlias = Callable[[tuple[torch.Tensor, ...]], None]

MAJOR_VERSION = 1
CPU = 1
"""DLDeviceType of host memory."""


class TensorView(Block):
    """A ``DLTensor``."""

    data: int
    device: int  # the device type is in the lower half
    n_dimensions: int  # in the lower half; code, bits and lanes of the elements are above
    shape: Field[Words]
    strides: Field[Words]  # in elements
    byte_offset: int


class TensorTable(Block):
    """The table."""

    tensor_type: int
    parameter_type: int
    read: int  # address of a function (tensor object, DLTensor) -> 0, or an error is set
    false: int
    increment: int  # a function that increments tensors' versions, by which autograd sees writes
    is_neg: int  # methods
    is_conj: int
    is_inference: int
    storage_offset: int
    dtype: int  # names of attributes
    requires_grad: int
    int8: int  # dtypes: in DLPack, these and int4 have the same code and bits
    uint8: int
    empty_like: int


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


_made: list[tuple[npt.NDArray[np.int64], list[Any]]] = []
"""The table, and the objects that it points to."""


def table() -> npt.NDArray[np.int64] | None:
    """Return the table for the loaded PyTorch; None if compiled code cannot read its tensors.

    None may be temporary, while the user has changed what PyTorch's functions make.
    """
    import torch

    if _made:
        return _made[0][0]
    read = _read_function(torch.Tensor)
    if read == 0 or not numpy_struct.matches():
        return None
    with torch.inference_mode(False):
        increment = _increment_function()
        if increment is None or not _reads_as_expected(read):
            return None
    words, objects = _filled(read, increment)
    _made.append((words, objects))
    return words


def _filled(read: int, increment: Increment) -> tuple[npt.NDArray[np.int64], list[object]]:
    import torch

    tensor: Any = torch.Tensor
    objects = {
        TensorTable.tensor_type: tensor,
        TensorTable.parameter_type: torch.nn.Parameter,
        TensorTable.false: False,
        TensorTable.increment: increment,
        TensorTable.is_neg: tensor.is_neg,
        TensorTable.is_conj: tensor.is_conj,
        TensorTable.is_inference: tensor.is_inference,
        TensorTable.storage_offset: tensor.storage_offset,
        TensorTable.dtype: "dtype",
        TensorTable.requires_grad: "requires_grad",
        TensorTable.int8: torch.int8,
        TensorTable.uint8: torch.uint8,
        TensorTable.empty_like: torch.empty_like,
    }
    words = np.zeros(TensorTable.n_words, np.int64)
    words[TensorTable.read] = read
    for word, each in objects.items():
        words[word] = id(each)
    return words, [*objects.values()]


def key_of(dtype: str) -> int:
    """Return the key of a tensor's dtype in entries; 0 if DLPack has no code for it.

    Keys are negative, so that none is the address of an object.
    """
    if dtype not in CODES:
        return 0
    code, bits = CODES[dtype]
    return -(1 << 16 | bits << 8 | code)


def _read_function(kind: type) -> int:
    """Return the address of the function that reads a tensor; 0 if there is none."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if "dlpack_exchange_api" not in repr(capsule):
        return 0
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    exchange = _Exchange.from_address(pointer_of(capsule, b"dlpack_exchange_api"))
    return int(exchange.view or 0) if exchange.major == MAJOR_VERSION else 0


def _increment_function() -> Increment | None:
    """Return a function that increments tensors' versions: the faster one, if it works."""
    import torch

    for owner in (torch._C, torch.autograd.graph):
        name = "_increment_version" if owner is torch._C else "increment_version"
        increment: Any = getattr(owner, name, None)
        tensor = torch.zeros(1, device="cpu")
        try:
            increment((tensor, tensor))
        except (TypeError, RuntimeError):
            continue
        if tensor._version == 2:
            faster: Increment = increment
            return faster
    return None


def _reads_as_expected(read: int) -> bool:
    """Return whether the function agrees with PyTorch's methods on an example."""
    import torch

    function: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(read)
    tensor = torch.zeros(3, 7, dtype=torch.float32, device="cpu")[:, 2:]
    view = np.zeros(TensorView.n_words, np.int64)
    if function(tensor, view.ctypes.data) != 0:
        return False
    numbers = [int(view[field]) for field in (TensorView.shape, TensorView.strides)]
    shape, strides = ((ctypes.c_int64 * 2).from_address(number) for number in numbers)
    return (
        int(view[TensorView.data] + view[TensorView.byte_offset]) == tensor.data_ptr()
        and int(view[TensorView.device]) & 0xFFFFFFFF == CPU
        and int(view[TensorView.n_dimensions]) == (1 << 48 | 32 << 40 | 2 << 32 | 2)
        and (tuple(shape), tuple(strides)) == ((3, 5), (7, 1))
    )
