"""The measured arrays: NumPy's on the host, CuPy's, PyTorch's or a test device's on a GPU.

Needs only NumPy and the array library, since the ranks of peers use these arrays, too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gpucoll.bench.rank.inputs import STORAGE, storage

__all__ = ["KINDS", "TEST_ARRAY", "Arrays", "HostArrays", "NoGpuError", "open_arrays"]

Array = Any


class NoGpuError(Exception):
    """There are too few GPUs, or their array library is missing; the message says which."""


class Arrays(Protocol):
    """One-dimensional arrays of one library.

    Attributes
    ----------
    on_gpu : bool
        Whether calls only enqueue work, so that timed loops end with `wait`.
    number : int or None
        The number of the GPU in this process.
    """

    on_gpu: bool
    number: int | None

    def allocate(self, count: int, dtype: str) -> Array:
        """Return an array of `count` elements."""
        ...

    def kept_as(self, dtype: str) -> str:
        """Return the dtype of the arrays: `dtype`, or the bench's storage of it."""
        ...

    def typed(self, array: Array, dtype: str) -> Array:
        """Return a view of the array with its own dtype if it is kept in the bench's storage."""
        ...

    def edit(self, array: Array, change: Callable[[Array], object]) -> None:
        """Make `change` write every element, through a NumPy array in the bench's storage."""
        ...

    def read(self, array: Array) -> Array:
        """Return the elements as a NumPy array in the bench's storage."""
        ...

    def wait(self) -> None:
        """Wait until everything that has been enqueued is done."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the version of the array library and the name of the GPU."""
        ...


class HostArrays:
    """NumPy's arrays, in the bench's storage of their dtype."""

    on_gpu = False
    number: int | None = None

    def allocate(self, count: int, dtype: str) -> Array:
        """Return an ordinary array."""
        return np.empty(count, storage(dtype))

    def kept_as(self, dtype: str) -> str:
        """Return the bench's storage of the dtype."""
        return str(storage(dtype))

    def typed(self, array: Array, dtype: str) -> Array:
        """Return a view with the array's own dtype, which may need ml_dtypes."""
        return array.view(own_dtype(dtype)) if dtype in STORAGE else array

    def edit(self, array: Array, change: Callable[[Array], object]) -> None:
        """Change the array itself."""
        change(array)

    def read(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def wait(self) -> None:
        """Do nothing: a call returns when it is done."""

    def versions(self) -> dict[str, str]:
        """Return an empty dictionary."""
        return {}


class DeviceArrays(HostArrays):
    """Arrays with `set` and `get`, on one GPU."""

    on_gpu = True

    def edit(self, array: Array, change: Callable[[Array], object]) -> None:
        """Let `change` write to a host array, and copy it to the GPU."""
        host = np.empty(len(array), array.dtype)
        change(host)
        array.set(host)
        self.wait()

    def read(self, array: Array) -> Array:
        """Return a copy in host memory."""
        return array.get()


class CupyArrays(DeviceArrays):
    """CuPy's arrays."""

    def __init__(self, rank: int) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.number = own_gpu(rank, self.cupy.cuda.runtime.getDeviceCount(), "CuPy")
        self.cupy.cuda.Device(self.number).use()

    def allocate(self, count: int, dtype: str) -> Array:
        """Return an array on the GPU."""
        return self.cupy.empty(count, storage(dtype))

    def wait(self) -> None:
        """Wait for the whole GPU."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def versions(self) -> dict[str, str]:
        """Return CuPy's version and the GPU's name."""
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.number)
        return {"cupy": self.cupy.__version__, "GPU": properties["name"].decode()}


class TorchArrays:
    """PyTorch's tensors on one GPU, of their own dtype; on Intel's, never executed so far."""

    on_gpu = True

    def __init__(self, rank: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        is_intel = not self.torch.cuda.is_available() and self.torch.xpu.is_available()
        self._kind = "xpu" if is_intel else "cuda"
        self._gpus: Any = getattr(self.torch, self._kind)
        self.number: int | None = own_gpu(rank, self._gpus.device_count(), "PyTorch")
        self._gpus.set_device(self.number)

    def allocate(self, count: int, dtype: str) -> Array:
        """Return a tensor on the GPU."""
        return self.torch.empty(count, dtype=getattr(self.torch, dtype), device=self._kind)

    def kept_as(self, dtype: str) -> str:
        """Return the dtype itself."""
        return dtype

    def typed(self, array: Array, dtype: str) -> Array:
        """Return the tensor, which has its own dtype."""
        return array

    def edit(self, array: Array, change: Callable[[Array], object]) -> None:
        """Let `change` write to a host array, and copy it to the GPU."""
        host = np.empty(len(array), storage(str(array.dtype).removeprefix("torch.")))
        change(host)
        self._bytes(array).copy_(self.torch.from_numpy(host.view(np.uint8)))

    def read(self, array: Array) -> Array:
        """Return a copy in host memory."""
        dtype = storage(str(array.dtype).removeprefix("torch."))
        return self._bytes(array).cpu().numpy().view(dtype)

    def _bytes(self, array: Array) -> Array:
        return array.view(self.torch.uint8)

    def wait(self) -> None:
        """Wait for the whole GPU."""
        self._gpus.synchronize()

    def versions(self) -> dict[str, str]:
        """Return PyTorch's version and the GPU's name."""
        name = self._gpus.get_device_name(self.number)
        return {"torch": str(self.torch.__version__), "GPU": str(name)}


class HostDeviceArrays(DeviceArrays):
    """Arrays on a Host device, gpucoll's test device: one for each rank."""

    def __init__(self, rank: int) -> None:
        config: Any = importlib.import_module("gpucoll.config")
        os.environ.update({config.DEVICE: "host", config.CPU_ONLY: "0"})
        self._arrays: Any = importlib.import_module("gpucoll.testing.device_arrays")
        count = importlib.import_module("gpucoll.devices").device_count("host")
        self.number = own_gpu(rank, count, "gpucoll")
        self._arrays.use(self.number)

    def allocate(self, count: int, dtype: str) -> Array:
        """Return an array on the device."""
        return self._arrays.empty(count, storage(dtype))

    def wait(self) -> None:
        """Wait for the whole device."""
        self._arrays.synchronize()

    def versions(self) -> dict[str, str]:
        """Return a text that there is no GPU."""
        return {"GPU": "none: Host devices, made of host memory and threads"}


TEST_ARRAY = "host-device"
"""The test device's kind of arrays, whose times are meaningless for GPUs."""

KINDS: dict[str, Callable[[int], Arrays]] = {
    "numpy": lambda rank: HostArrays(),
    "cupy": CupyArrays,
    "torch": TorchArrays,
    TEST_ARRAY: HostDeviceArrays,
}
"""Library -> function that returns its arrays for a local rank, on that rank's GPU if possible."""


def open_arrays(library: str, local_rank: int) -> Arrays:
    """Return a library's arrays, on this rank's GPU if it has GPU arrays."""
    return KINDS[library](local_rank)


def own_gpu(rank: int, count: int, library: str) -> int:
    """Return the number of this rank's GPU among those that a library sees."""
    if not count:
        raise NoGpuError(f"{library} finds no GPU: is it a CPU build?")
    return rank % count


def own_dtype(dtype: str) -> Any:
    """Return a dtype that NumPy has through ml_dtypes."""
    return getattr(importlib.import_module("ml_dtypes"), dtype)
