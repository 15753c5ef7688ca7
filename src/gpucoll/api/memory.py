"""Memory that needs no copy, as users ask for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gpucoll.api.front import Front
from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.operands import template_of
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.calls.gpu.memory import Registration
from gpucoll.calls.shapes import parse_shape
from gpucoll.errors import ArgumentTypeError

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpucoll.api.call_types import A, N, Shape
    from gpucoll.arrays.device_array import DeviceArray


class Memory(Front):
    """What `Communicator` can do for arrays before they are used."""

    @overload
    def empty(
        self, shape: Shape, dtype: Any = "float32", *, like: A, symmetric: bool = False
    ) -> A: ...
    @overload
    def empty(
        self, shape: Shape, dtype: Any = "float32", *, like: str, symmetric: bool = False
    ) -> DeviceArray: ...
    @overload
    def empty(
        self, shape: Shape, dtype: type[N] | np.dtype[N] = ..., *, symmetric: bool = False
    ) -> npt.NDArray[N]: ...
    @overload
    def empty(
        self, shape: Shape, dtype: Any = "float32", *, like: None = None, symmetric: bool = False
    ) -> npt.NDArray[Any]: ...
    def empty(
        self,
        shape: Shape,
        dtype: Any = "float32",
        *,
        like: Any = None,
        symmetric: bool = False,
    ) -> Any:
        """Return a new array, values undefined, in memory that the backend uses without a copy.

        On the CPU it lies in memory that all ranks of the host share. Collectives on such arrays,
        and on views of them, run at the memory's own speed where every rank's array is one. On a
        GPU it is memory of the vendor's library, registered with it, which its fastest ways
        (NVLink SHARP, GPUDirect RDMA) can use without a copy.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype
            Of any fixed size.
        like : array, or "cuda" or "rocm", optional
            A GPU array, of whose library and device the new one is. For a device alone it is a
            `gpucoll.arrays.device_array.DeviceArray`, which libraries take over through DLPack or
            ``__cuda_array_interface__``. Default: a NumPy array.
        symmetric : bool
            On a GPU: whether the ranks' arrays make a symmetric window together (NCCL 2.27 and
            newer; registered memory before). Then every rank makes this call, for as many bytes.
            On the CPU every such array is symmetric, and nobody waits for the others.

        Raises
        ------
        MemoryError
            The arena (``GPUCOLL_ARENA_BYTES``), or the GPU, is full.
        MismatchError
            Symmetric, and the ranks ask for different numbers of bytes.
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
                f"empty: like is {template.library.NAME} in host memory, where the new array is "
                "NumPy's: leave like out, and wrap the result, as torch.from_numpy does"
            )
        dispatch.check_host("the array to make")
        return self._backend.empty(whole, dtype)

    def register(self, array: Any) -> Registration:
        """Make an array's memory known to the vendor's library, which then uses it without a copy.

        For arrays that take part in many calls and were not made by `empty`. Does nothing where the
        library has no use for it.

        Parameters
        ----------
        array : array
            C-contiguous, on this communicator's GPU. It is kept alive until the registration ends.

        Returns
        -------
        Registration
            ``close`` ends it; also a context manager. It ends with the communicator, too.

        Raises
        ------
        BackendUnavailableError
            The array lies in host memory, where only `empty` and `shared_arrays` make such memory.
        StateError
            The ranks' GPUs are not connected yet.
        """
        self._group.check_open()
        return self._gpu.register(array)

    def shared_arrays(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every new NumPy array is like one of `empty`.

        ``np.zeros``, copies, results of operators and functions, what a library makes inside: all
        of 1 KiB and more lie in memory that the ranks of the host share, where there is room; else
        in ordinary memory, without an error. They stay there after the context and after `close`.

        Returns
        -------
        context manager
            For this thread or asyncio task. May be nested.

        Raises
        ------
        BackendUnavailableError
            This NumPy cannot be told where to put arrays.

        Notes
        -----
        - Threads that start inside begin outside of it (free-threaded Python: inside).
        - Unpickled arrays are ordinary ones, inside too: they stay where the pickle was. Copy them.
        - Arrays keep where they are: ``x += 1`` works in place, ``x = x + 1`` outside makes an
          ordinary array.
        - After a fork, parent and child see the *same* memory of such arrays, where others are
          copied. What the child makes is ordinary, and it frees nothing of its parent.
        - Do not ``yield`` inside: a generator's caller would run within the context, too.
        - Cost: 2 us for the context; an array as without it. The first touch of memory is slower
          than usual, of memory used before faster; 256 MiB of freed memory are kept.

        Examples
        --------
        >>> with comm.shared_arrays():
        ...     gradient = np.zeros(1_000_000)
        >>> comm.all_reduce(gradient, out=gradient)  # no copy
        """
        self._group.check_open()
        return self._backend.shared_arrays()
