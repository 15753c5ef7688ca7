"""Types of arguments and results. Only static type checkers import this module."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Generic, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Required, TypedDict, TypeVar

from gpucoll.arrays.library import AnyStream
from gpucoll.types import ReduceOp

Op: TypeAlias = str | ReduceOp
Shape: TypeAlias = int | Sequence[int]
Rows: TypeAlias = Sequence[int] | npt.NDArray[Any] | None
Counts: TypeAlias = Rows | Literal["auto"]

# --- inputs: the arrays that `gpucoll.arrays.libraries` recognises --------------------------------


class _Buffer(Sized, Protocol):  # the length excludes NumPy's scalars, which also have a buffer
    def __buffer__(self, flags: int, /) -> memoryview: ...


class _ArrayInterface(Sized, Protocol):
    @property
    def __array_interface__(self) -> object: ...


class _CudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> object: ...


class _SyclArrayInterface(Protocol):
    @property
    def __sycl_usm_array_interface__(self) -> object: ...


class _Dlpack(Protocol):
    # Only Any accepts every signature, of old and new versions of DLPack.
    def __dlpack__(self, *args: Any, **kwargs: Any) -> object: ...


Array: TypeAlias = _Buffer | _ArrayInterface | _CudaArrayInterface | _SyclArrayInterface | _Dlpack
AnyDevice: TypeAlias = Any
"""A GPU: its number, its name, or a device of CuPy or PyTorch, whose classes may be missing."""
Numbers: TypeAlias = npt.NDArray[Any]
"""The array of every rank's number, which has the dtype that NumPy gives the numbers."""
Number: TypeAlias = complex | np.generic  # for a type checker, complex includes int and float

A = TypeVar("A", bound=Array)
X = TypeVar("X", bound=Array | Number | Sequence[Array | np.generic])
"""The type of x in reductions and broadcast, and of their results: also lists and tuples."""
M = TypeVar("M", bound=Array | Number, default=npt.NDArray[Any])
"""The type of x in scans and messages, and of their results."""
N = TypeVar("N", bound=np.generic, default=np.float32)
V = TypeVar("V", default=Any)
"""Any picklable value."""

# --- options of every call; async_op decides whether the result is R, Work[R], or either ----------


class _Options(TypedDict, total=False):
    timeout_s: float | None
    stream: AnyStream


class Blocking(_Options, total=False):
    """A call that returns its result."""

    async_op: Literal[False]


class Asynchronous(_Options, total=False):
    """A call that returns a `Work`."""

    async_op: Required[Literal[True]]


class Either(_Options, total=False):
    """A call that may return either, because a variable decides."""

    async_op: bool


class _Out(TypedDict, Generic[X], total=False):
    out: X | None


class BlockingInto(_Out[X], Blocking, total=False):
    """A call that returns its result, with `out`."""


class AsynchronousInto(_Out[X], Asynchronous, total=False):
    """A call that returns a `Work`, with `out`."""


class EitherInto(_Out[X], Either, total=False):
    """A call that may return either, with `out`."""
