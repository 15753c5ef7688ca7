"""TensorFlow's C API by ctypes: the functions that ops and kernels need (tensorflow/c/*.h)."""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import tensorflow

__all__ = [
    "ASYNC_COMPUTE",
    "COMPUTE",
    "CREATE",
    "DELETE",
    "SHAPES",
    "Buffer",
    "Code",
    "Done",
    "OperationError",
    "Status",
    "api",
    "symbol",
]


class Code(enum.IntEnum):
    """What is wrong, as TensorFlow's classes of errors know it (`tf.errors`)."""

    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13


class OperationError(Exception):
    """An op failed; the program gets the class of `tf.errors` that belongs to the code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Buffer(Structure):
    """A TF_Buffer."""

    _fields_ = (("data", c_void_p), ("length", c_size_t), ("deallocator", c_void_p))


CREATE = CFUNCTYPE(c_void_p, c_void_p)
COMPUTE = CFUNCTYPE(None, c_void_p, c_void_p)
ASYNC_COMPUTE = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)
DELETE = CFUNCTYPE(None, c_void_p)
SHAPES = CFUNCTYPE(None, c_void_p, c_void_p)

_P = c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # name without TF_: result, arguments
    "NewStatus": (_P,),
    "DeleteStatus": (None, _P),
    "SetStatus": (None, _P, c_int, c_char_p),
    "GetCode": (c_int, _P),
    "Message": (c_char_p, _P),
    "NewOpDefinitionBuilder": (_P, c_char_p),
    "OpDefinitionBuilderAddInput": (None, _P, c_char_p),
    "OpDefinitionBuilderAddOutput": (None, _P, c_char_p),
    "OpDefinitionBuilderAddAttr": (None, _P, c_char_p),
    "OpDefinitionBuilderSetIsStateful": (None, _P, c_bool),
    "OpDefinitionBuilderSetShapeInferenceFunction": (None, _P, SHAPES),
    "RegisterOpDefinition": (None, _P, _P),
    "ShapeInferenceContextNumInputs": (c_int64, _P),
    "NewShapeHandle": (_P,),
    "DeleteShapeHandle": (None, _P),
    "ShapeInferenceContextGetInput": (None, _P, c_int, _P, _P),
    "ShapeInferenceContextSetOutput": (None, _P, c_int, _P, _P),
    "ShapeInferenceContextRank": (c_int64, _P, _P),
    "ShapeInferenceContextRankKnown": (c_int, _P, _P),
    "ShapeInferenceContextScalar": (_P, _P),
    "ShapeInferenceContextVectorFromSize": (_P, _P, c_size_t),
    "ShapeInferenceContextSubshape": (None, _P, _P, c_int64, c_int64, _P, _P),
    "ShapeInferenceContextConcatenateShapes": (None, _P, _P, _P, _P, _P),
    "NewKernelBuilder": (_P, c_char_p, c_char_p, CREATE, COMPUTE, DELETE),
    "NewAsyncKernelBuilder": (_P, c_char_p, c_char_p, CREATE, ASYNC_COMPUTE, DELETE),
    "RegisterKernelBuilder": (None, c_char_p, _P, _P),
    "OpKernelConstruction_GetNodeDef": (POINTER(Buffer), _P, _P),
    "OpKernelConstruction_Failure": (None, _P, _P),
    "DeleteBuffer": (None, _P),
    "NumInputs": (c_int, _P),
    "GetInput": (None, _P, c_int, _P, _P),
    "AllocateOutput": (_P, _P, c_int, c_int, _P, c_int, c_size_t, _P),
    "SetOutput": (None, _P, c_int, _P, _P),
    "OpKernelContext_Failure": (None, _P, _P),
    "RunAsyncOpKernelDoneCallback": (None, _P),
    "TensorData": (_P, _P),
    "TensorByteSize": (c_size_t, _P),
    "TensorType": (c_int, _P),
    "NumDims": (c_int, _P),
    "Dim": (c_int64, _P, c_int),
    "DeleteTensor": (None, _P),
}


_NAMES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")


@functools.cache
def _libraries() -> list[ctypes.CDLL]:
    folder = Path(tensorflow.__file__).parent
    return [ctypes.CDLL(str(folder / x)) for x in _NAMES if (folder / x).exists()]


def symbol(name: str) -> Any:
    """Return a function of TensorFlow's libraries; raise AttributeError if there is none."""
    for library in _libraries():
        if (function := getattr(library, name, None)) is not None:
            return function
    raise AttributeError(name)


class _Api:
    """The functions, by their names without ``TF_``."""

    def __init__(self) -> None:
        libraries = _libraries()
        # Most read or write a word or two: cheaper with the GIL held. What comes next may run long.
        quick = [ctypes.PyDLL(library._name) for library in libraries]
        for name, (result, *arguments) in _FUNCTIONS.items():
            for library in libraries if name.startswith("Run") else quick:
                function = getattr(library, f"TF_{name}", None)
                if function is not None:
                    break
            else:
                raise ImportError(
                    f"TensorFlow {tensorflow.__version__} has no TF_{name} in "
                    f"{' or '.join(_NAMES)}; gpucoll's ops need its C API for ops and kernels"
                )
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        """Tell type checkers that the table has names."""
        raise AttributeError(f"TF_{name} is not in the table")


api = _Api()


class Status:
    """A TF_Status; `check` raises what it says."""

    __slots__ = ("address",)

    def __init__(self) -> None:
        self.address = api.NewStatus()

    def check(self) -> None:
        """Raise what it says, if that is an error."""
        if api.GetCode(self.address):
            raise OperationError(Code.INTERNAL, api.Message(self.address).decode(errors="replace"))

    def set(self, code: Code, message: str) -> None:
        """Make it an error."""
        api.SetStatus(self.address, code, message.encode())

    def __del__(self, delete: Any = api.DeleteStatus) -> None:
        delete(self.address)


_manager = functools.cache(ctypes.PYFUNCTYPE(c_bool, c_void_p, c_void_p, c_int))
_CLONE, _DESTROY = 2, 3


class Done:
    """What an asynchronous kernel calls in the end: a copy of TensorFlow's callback.

    TensorFlow hands out the address of a ``std::function`` that is on its stack, and gone when the
    kernel returns. The copy is made as C++ makes it, by the function's manager: the third of the
    four words (libstdc++, which TensorFlow's Linux wheels are built with).
    """

    __slots__ = ("_manager", "_words")

    def __init__(self, callback: int) -> None:
        there = (c_uint64 * 4).from_address(callback)
        self._words = (c_uint64 * 4)()
        self._manager = _manager(there[2])
        self._manager(ctypes.addressof(self._words), callback, _CLONE)
        for word in (2, 3):
            self._words[word] = there[word]

    def __call__(self) -> None:
        """Call it, once."""
        address = ctypes.addressof(self._words)
        api.RunAsyncOpKernelDoneCallback(address)
        self._manager(address, address, _DESTROY)
