"""Allocation and registration of memory that needs no copy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, overload

import numpy as np

from gpucoll.api.front import Front
from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.operands import template_of
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.calls.shapes import parse_shape
from gpucoll.errors import ArgumentTypeError

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpucoll.api.call_types import A, N, Numbers, Shape
    from gpucoll.arrays.device_array import DeviceArray
    from gpucoll.arrays.library import AnyArray, AnyDtype
    from gpucoll.calls.gpu.memory import Registration


class Memory(Front):
    """The methods of `Communicator` that prepare the memory of arrays."""

    @overload
    def empty(
        self, shape: Shape, dtype: AnyDtype = "float32", *, like: A, symmetric: bool = False
    ) -> A: ...
    @overload
    def empty(
        self, shape: Shape, dtype: AnyDtype = "float32", *, like: str, symmetric: bool = False
    ) -> DeviceArray: ...
    @overload
    def empty(
        self, shape: Shape, dtype: type[N] | np.dtype[N] = ..., *, symmetric: bool = False
    ) -> npt.NDArray[N]: ...
    @overload
    def empty(
        self,
        shape: Shape,
        dtype: AnyDtype = "float32",
        *,
        like: None = None,
        symmetric: bool = False,
    ) -> Numbers: ...
    def empty(
        self,
        shape: Shape,
        dtype: AnyDtype = "float32",
        *,
        like: AnyArray | None = None,
        symmetric: bool = False,
    ) -> AnyArray:
        """Return a new, uninitialised array in memory that the backend uses without a copy.

        On the CPU the memory is shared by all ranks of the host. Collectives on these arrays, and
        on views of them, run at memory speed if every rank passes one. On a GPU it is memory of the
        vendor's library, registered with it; the library's fastest paths (NVLink SHARP, GPUDirect
        RDMA) use it without a copy.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype
            Any dtype of fixed size.
        like : array, or "cuda" or "rocm", optional
            A GPU array: the new array is of its library, on its device. Or the name of a device:
            the result is then a `gpucoll.arrays.device_array.DeviceArray`, which libraries convert
            through DLPack or ``__cuda_array_interface__``. Default: a NumPy array.
        symmetric : bool
            On a GPU: whether the ranks' arrays form a symmetric window (NCCL 2.27 and newer;
            otherwise registered memory). Every rank must then make this call, for the same number
            of bytes. On the CPU every array of `empty` is symmetric, and no rank waits for others.

        Raises
        ------
        MemoryError
            The arena (``GPUCOLL_ARENA_BYTES``), or the GPU, is full.
        MismatchError
            `symmetric` is true, and the ranks ask for different numbers of bytes.
        StateError
            The ranks' GPUs are not connected yet.
        """
        self._group.check_open()
        whole = parse_shape(shape)
        template = None if like is None or isinstance(like, str) else template_of(like, "like")
        dispatch = self._collectives.dispatch
        is_on_gpu = template is not None and template.device != HOST_ARRAYS
        if isinstance(like, str) or is_on_gpu:
            return self._gpu.empty(whole, dtype, template, symmetric)
        if template is not None and template.library is not numpy_arrays:
            raise ArgumentTypeError(
                f"empty: like is {template.library.NAME} in host memory, but the new array would "
                "be a NumPy array: omit like, and wrap the result, as torch.from_numpy does"
            )
        dispatch.check_host("the array to make")
        return self._backend.empty(whole, dtype)

    def register(self, array: AnyArray) -> Registration:
        """Register an array's memory with the vendor's library, which then uses it without a copy.

        For arrays that take part in many calls and were not made by `empty`. Does nothing if the
        library has no use for registration.

        Parameters
        ----------
        array : array
            C-contiguous, on this communicator's GPU. It is kept alive until the registration ends.

        Returns
        -------
        Registration
            Its ``close`` ends the registration; it is also a context manager. The registration ends
            with the communicator, too.

        Raises
        ------
        BackendUnavailableError
            The array is in host memory. There, only `empty` and `shared_arrays` avoid copies.
        StateError
            The ranks' GPUs are not connected yet.
        """
        self._group.check_open()
        return self._gpu.register(array)

    def shared_arrays(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every new NumPy array is like an array of `empty`.

        This includes ``np.zeros``, copies, results of operators and functions, and arrays that
        libraries make. Arrays of 1 KiB and more are placed in memory that the ranks of the host
        share if there is room; otherwise in ordinary memory, without an error. They stay there
        after the context and after `close`.

        Returns
        -------
        context manager
            For this thread or asyncio task. Contexts may be nested.

        Raises
        ------
        BackendUnavailableError
            This NumPy does not let a program choose the memory of its arrays.

        Notes
        -----
        - Threads started inside begin outside of the context (free-threaded Python: inside).
        - Unpickled arrays are ordinary ones even inside: they use the memory of the pickle. Copy
          them.
        - An array stays where it is: ``x += 1`` works in place; ``x = x + 1`` outside of the
          context makes an ordinary array.
        - After a fork, parent and child see the *same* memory of these arrays, while others are
          copied. Arrays that the child makes are ordinary, and it frees nothing of its parent.
        - Do not ``yield`` inside: the generator's caller would run within the context, too.
        - Cost: 2 us for the context; arrays cost the same as without it. The first touch of new
          memory is slower than usual, that of reused memory faster; 256 MiB of freed memory are
          kept.

        Examples
        --------
        >>> with comm.shared_arrays():
        ...     gradient = np.zeros(1_000_000)
        >>> comm.all_reduce(gradient, out=gradient)  # no copy
        """
        self._group.check_open()
        return self._backend.shared_arrays()
