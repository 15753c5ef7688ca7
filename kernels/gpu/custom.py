"""A user's operation on a GPU: a reduce kernel around a function, compiled by Numba to PTX.

Elements are loaded, converted and stored one by one, by the same code as on the CPU; the rest of a
launch is as for the built-in operations. This works for NVIDIA GPUs only, because Numba supports no
others.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentTypeError, BackendUnavailableError
from gpucoll.kernels.gpu.launch import Target
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.source import TILE_ELEMENTS
from gpucoll.types import ReduceOp

if TYPE_CHECKING:
    from gpucoll.kernels.cpu.jit import NumbaSignature

_compile_lock = threading.Lock()
_KEPT = 256
"""How many kernels are kept; some programs make a new function for every call."""


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
        An op of `ReduceOp.custom`.
    dtype : str
        One of `gpucoll.types.DTYPES`.
    n_destinations, n_sources : int
    is_aligned : bool
        Whether every address is a multiple of the dtype's size.
    compute_capability : tuple of int
        The device's compute capability.

    Raises
    ------
    ArgumentTypeError
        The function cannot be compiled for this dtype, or returns another type.
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
    if importlib.util.find_spec("numba_cuda") is None:  # Numba's own, older version lacks functions
        raise BackendUnavailableError(
            f"{op} on a GPU needs Numba's CUDA compiler, numba-cuda, which is not installed"
        )
    from numba import cuda, types

    from gpucoll.kernels.cpu import cast, custom
    from gpucoll.kernels.gpu.numba_kernel import make_kernel

    custom.checked_function(op, dtype)  # refuses what the CPU refuses, in the same words
    kernel = make_kernel(
        cast.load_element(dtype, is_aligned),
        cast.store_element(dtype, is_aligned),
        cast.convert_to(cast.accumulator_of(dtype)),
        cuda.jit(device=True)(op.function),
    )
    addresses = [types.UniTuple(types.int64, count) for count in (n_destinations, n_sources)]
    try:
        ptx = _ptx_of(kernel, types.void(types.int64, *addresses), compute_capability)
    except (AttributeError, ImportError) as error:  # not the user's: Numba wraps errors of those
        versions = " with ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("numba-cuda", "numpy")
        )
        raise BackendUnavailableError(
            f"{op} on a GPU: Numba's CUDA compiler does not work here ({versions}): "
            f"{custom.gist(error)}. Install versions that are compatible with each other"
        ) from error
    except Exception as error:
        raise ArgumentTypeError(
            f"{op} of {dtype}: Numba cannot compile it for the GPU: {custom.gist(error)}"
        ) from error
    found = re.search(r"\.visible \.entry (\w+)", ptx)
    assert found, "Numba made no entry"
    return CompiledKernel(found[1], ptx)


def _ptx_of(
    kernel: Callable[..., None], signature: NumbaSignature, compute_capability: tuple[int, int]
) -> str:
    """Return the PTX of a Python function, with each multiplication and addition rounded."""
    from numba import cuda
    from numba.cuda.cudadrv import nvvm

    whole = nvvm.compile_ir
    # NVIDIA's compiler has this option, but Numba does not pass it on. A compilation in another
    # thread at the same time gets it, too, which does no harm.
    nvvm.compile_ir = functools.partial(whole, fma=False)
    try:
        ptx, _ = cuda.compile_ptx(kernel, signature, cc=compute_capability)
    finally:
        nvvm.compile_ir = whole
    return str(ptx)


def prepare_custom(
    op: ReduceOp, destinations: Sequence[Buffer], sources: Sequence[Buffer], target: Target
) -> Callable[[int], None]:
    """Return a function that reduces by a user's function, left to right, into all destinations.

    Raises
    ------
    ArgumentTypeError
        The device is not NVIDIA's, or `custom_kernel` refuses the function.
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
