"""What calls take and give, in the words of static type checkers, which alone import this."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Generic, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Required, TypedDict, TypeVar

from gpucoll.types import ReduceOp

Op: TypeAlias = str | ReduceOp
Shape: TypeAlias = int | Sequence[int]
Rows: TypeAlias = Sequence[int] | np.ndarray[Any, Any] | None
Counts: TypeAlias = Rows | Literal["auto"]

# --- inputs: what `gpucoll.arrays.libraries` finds a library for ----------------------------------


class _Buffer(Sized, Protocol):  # NumPy's numbers have a buffer and an interface, but no length
    def __buffer__(self, flags: int, /) -> memoryview: ...


class _ArrayInterface(Sized, Protocol):
    @property
    def __array_interface__(self) -> Any: ...


class _CudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Any: ...


class _Dlpack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


Array: TypeAlias = _Buffer | _ArrayInterface | _CudaArrayInterface | _Dlpack
Number: TypeAlias = complex | np.generic  # for a type checker int and float are complex, too

A = TypeVar("A", bound=Array)
X = TypeVar("X", bound=Array | Number | Sequence[Array | np.generic])
"""What reductions and broadcast take, and give: also lists and tuples of arrays."""
M = TypeVar("M", bound=Array | Number, default=npt.NDArray[Any])
"""What scans and messages take, and give."""
N = TypeVar("N", bound=np.generic, default=np.float32)
V = TypeVar("V", default=Any)
"""Any picklable value."""

# --- what every call takes, and what that makes of its result: R, Work[R], or either --------------


class _Options(TypedDict, total=False):
    timeout_s: float | None
    stream: Any


class Blocking(_Options, total=False):
    """A call that returns its result."""

    async_op: Literal[False]


class Asynchronous(_Options, total=False):
    """A call that returns a `Work`."""

    async_op: Required[Literal[True]]


class Either(_Options, total=False):
    """A call of which a variable decides."""

    async_op: bool


class _Out(TypedDict, Generic[X], total=False):
    out: X | None


class BlockingInto(_Out[X], Blocking, total=False):
    """The same with `out`."""


class AsynchronousInto(_Out[X], Asynchronous, total=False):
    """The same with `out`."""


class EitherInto(_Out[X], Either, total=False):
    """The same with `out`."""
