"""A user's operation on a GPU: a reduce kernel around a function, compiled by Numba to PTX.

Elements are loaded, converted and stored as on the CPU, by the same code, one by one; everything
else of a launch is that of the built-in operations. For NVIDIA GPUs only: Numba has no other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentTypeError, BackendUnavailableError
from gpucoll.kernels.gpu.launch import Target
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.source import TILE_ELEMENTS
from gpucoll.types import ReduceOp

_compile_lock = threading.Lock()
_KEPT = 256
"""Of kernels; some programs make a new function for every call."""


@functools.lru_cache(maxsize=_KEPT)
def custom_kernel(
    op: ReduceOp,
    dtype: str,
    n_destinations: int,
    n_sources: int,
    is_aligned: bool,
    compute_capability: tuple[int, int],
) -> CompiledKernel:
    """Return the kernel of an operation, dtype and number of arrays, compiled on first need.

    Cost: 0.5 to 1 s once per process. No GPU is needed.

    Parameters
    ----------
    op : ReduceOp
        Of `ReduceOp.custom`.
    dtype : str
        One of `gpucoll.types.DTYPES`.
    n_destinations, n_sources : int
    is_aligned : bool
        Whether every address is a multiple of the dtype's size.
    compute_capability : tuple of int
        Of the device.

    Raises
    ------
    ArgumentTypeError
        The function cannot be compiled for this dtype, or gives another type.
    BackendUnavailableError
        numba-cuda is not installed, or does not work with this NumPy.
    """
    with _compile_lock:
        return _compiled(op, dtype, n_destinations, n_sources, is_aligned, compute_capability)


def _compiled(
    op: ReduceOp,
    dtype: str,
    n_destinations: int,
    n_sources: int,
    is_aligned: bool,
    compute_capability: tuple[int, int],
) -> CompiledKernel:
    if importlib.util.find_spec("numba_cuda") is None:  # Numba's own, older one lacks functions
        raise BackendUnavailableError(
            f"{op} on a GPU needs Numba's CUDA compiler, numba-cuda, which is not installed"
        )
    from numba import cuda, types

    from gpucoll.kernels.cpu import cast, custom
    from gpucoll.kernels.gpu.numba_kernel import make_kernel

    custom.checked_function(op, dtype)  # what the CPU refuses is refused here, in the same words
    kernel = make_kernel(
        cast.load_element(dtype, is_aligned),
        cast.store_element(dtype, is_aligned),
        cast.convert_to(cast.accumulator_of(dtype)),
        cuda.jit(device=True)(op.function),
    )
    addresses = [types.UniTuple(types.int64, count) for count in (n_destinations, n_sources)]
    try:
        ptx = _ptx_of(kernel, types.void(types.int64, *addresses), compute_capability)
    except (AttributeError, ImportError) as error:  # not the user's: Numba has its own for those
        versions = " with ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("numba-cuda", "numpy")
        )
        raise BackendUnavailableError(
            f"{op} on a GPU: Numba's CUDA compiler does not work here ({versions}): "
            f"{custom.gist(error)}. Install versions that know each other"
        ) from error
    except Exception as error:
        raise ArgumentTypeError(
            f"{op} of {dtype}: Numba cannot compile it for the GPU: {custom.gist(error)}"
        ) from error
    found = re.search(r"\.visible \.entry (\w+)", ptx)
    assert found, "Numba made no entry"
    return CompiledKernel(found[1], ptx)


def _ptx_of(kernel: Any, signature: Any, compute_capability: tuple[int, int]) -> str:
    """Return the PTX of a Python function; multiplications and additions are rounded each."""
    from numba import cuda
    from numba.cuda.cudadrv import nvvm

    whole = nvvm.compile_ir
    # Numba has no option for that, NVIDIA's compiler behind it has. Whoever compiles in another
    # thread just now gets it too: no harm done.
    nvvm.compile_ir = functools.partial(whole, fma=False)
    try:
        ptx, _ = cuda.compile_ptx(kernel, signature, cc=compute_capability)
    finally:
        nvvm.compile_ir = whole
    return str(ptx)


def prepare_custom(
    op: ReduceOp, destinations: Sequence[Buffer], sources: Sequence[Buffer], target: Target
) -> Callable[[int], None]:
    """Return what reduces by a user's function, left to right, into every destination.

    Raises
    ------
    ArgumentTypeError
        The device is not NVIDIA's, or what `custom_kernel` refuses.
    """
    own: Any = getattr(target.launcher, "prepare_custom", None)
    if own is not None:  # a Host device, whose functions Numba compiles for the CPU
        places = ([buffer.address for buffer in group] for group in (destinations, sources))
        made: Callable[[int], None]
        made = own(op, sources[0].dtype, *places, sources[0].count, target.number)
        return made
    item_bytes = sources[0].item_bytes
    is_aligned = all(buffer.address % item_bytes == 0 for buffer in (*destinations, *sources))
    kernel = custom_kernel(
        op,
        sources[0].dtype,
        len(destinations),
        len(sources),
        is_aligned,
        target.launcher.compute_capability(target.number),
    )
    count = sources[0].count
    words = [count, *(buffer.address for buffer in (*destinations, *sources))]
    return target.prepared(kernel, -(-count // TILE_ELEMENTS), words)
