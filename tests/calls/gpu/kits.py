"""Arrays on a GPU, whichever library they are of: what tests of GPU arrays are written with.

Memory is asked for as bytes and seen as whatever dtype a test needs, so that the same tests run on
the look-alike of CuPy over a double, on CuPy itself and on PyTorch.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
from tests.calls.gpu import real

GUARD_BYTES = 256
GUARD = 0xA5
POISON = 0x5A


class CupyKit:
    """CuPy's arrays, or those of its look-alike."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def use(self, number: int) -> None:
        self.cupy.cuda.Device(number).use()

    def knows(self, dtype: str) -> bool:
        """Return whether the library has such arrays."""
        try:
            self.seen_as(self.bytes_of(np.zeros(16, np.uint8)), (-1,), dtype)
        except (TypeError, ValueError):
            return False
        return True

    def bytes_of(self, values: np.ndarray) -> Any:
        """Return these bytes on the GPU, once they are there: other streams do not wait for it."""
        return self.cupy.asarray(values, blocking=True)

    def seen_as(self, memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return bytes on the GPU as an array."""
        return memory.view(np.dtype(dtype)).reshape(shape)

    def read(self, x: Any) -> np.ndarray:
        """Return an array's values, once the current stream is done."""
        return np.asarray(x.get())

    def write(self, x: Any, values: np.ndarray) -> None:
        """Overwrite an array; it is done when this returns, for other streams too."""
        x.set(np.asarray(values, order="C"))
        self.cupy.cuda.get_current_stream().synchronize()

    def stream(self, non_blocking: bool = True) -> Any:
        """Return a new stream; a context manager that makes it the current one."""
        return self.cupy.cuda.Stream(non_blocking=non_blocking)

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def current(self) -> int:
        """Return the current stream."""
        return int(self.cupy.cuda.get_current_stream().ptr)

    def copy(self, destination: Any, source: Any) -> None:
        """Enqueue a copy on the current stream."""
        destination.copy_from(source)


class RealCupyKit(CupyKit):
    """CuPy's arrays on a GPU, for what the look-alike has another way."""

    def copy(self, destination: Any, source: Any) -> None:
        # Not [...] =, whose kernel would be compiled and loaded, which may wait for the whole GPU.
        destination.data.copy_from_device_async(source.data, source.nbytes)

    def captured(self, stream: Any) -> real.CupyGraph:
        """Capture what the block enqueues on a stream."""
        return real.CupyGraph(stream)


class TorchKit:
    """PyTorch's tensors."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def use(self, number: int) -> None:
        self.torch.cuda.set_device(number)

    def knows(self, dtype: str) -> bool:
        return hasattr(self.torch, dtype)

    def bytes_of(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values.copy()).cuda()

    def seen_as(self, memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return memory.view(getattr(self.torch, np.dtype(dtype).name)).reshape(shape)

    def read(self, x: Any) -> np.ndarray:
        dtype = np.dtype(str(x.dtype).removeprefix("torch."))
        flat = x.contiguous().reshape(-1).view(self.torch.uint8).cpu().numpy()
        return flat.view(dtype).reshape(tuple(x.shape))

    def write(self, x: Any, values: np.ndarray) -> None:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        x.view(-1).view(self.torch.uint8).copy_(self.torch.from_numpy(flat.copy()))

    def stream(self) -> Any:
        return _TorchStream(self.torch)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def current(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def copy(self, destination: Any, source: Any) -> None:
        destination.copy_(source)

    def captured(self, stream: Any) -> real.TorchGraph:
        return real.TorchGraph(self.torch)


KITS: dict[str, Any] = {"cupy": RealCupyKit, "torch": TorchKit}
"""Libraries whose arrays can lie on a real GPU."""


class _TorchStream:
    """A stream that is its own context manager."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._stream = torch, torch.cuda.Stream()
        self.cuda_stream = self._stream.cuda_stream

    def __enter__(self) -> _TorchStream:
        self._context = self._torch.cuda.stream(self._stream)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)

    def synchronize(self) -> None:
        self._stream.synchronize()


class Guarded:
    """An array on the GPU between two guards that must not change."""

    def __init__(self, kit: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> None:
        self._kit = kit
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._start, self._stop = GUARD_BYTES + offset, GUARD_BYTES + offset + size_bytes
        image = np.full(self._stop + GUARD_BYTES, GUARD, np.uint8)
        image[self._start : self._stop] = POISON
        self._memory = kit.bytes_of(image)
        self.array = kit.seen_as(self._memory[self._start : self._stop], shape, dtype)

    def check(self, where: object = "") -> None:
        image = self._kit.read(self._memory)
        outside = np.concatenate([image[: self._start], image[self._stop :]])
        changed = int(np.count_nonzero(outside != GUARD))
        assert not changed, f"{where}: {changed} bytes beside the array were written"


class HostDeviceKit:
    """Arrays of Host devices."""

    name = "host-device"

    def __init__(self, device_arrays: Any) -> None:
        self.arrays = device_arrays

    def use(self, number: int) -> None:
        self.arrays.use(number)

    def knows(self, dtype: str) -> bool:
        return True

    def bytes_of(self, values: np.ndarray) -> Any:
        """Return these bytes on the device, once they are there: other streams do not wait."""
        made = self.arrays.asarray(values)
        made.get()
        return made

    def seen_as(self, memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return memory.view(np.dtype(dtype)).reshape(shape)

    def read(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def write(self, x: Any, values: np.ndarray) -> None:
        x.set(np.asarray(values))
        x.get()

    def stream(self) -> Any:
        return self.arrays.Stream()

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def current(self) -> int:
        return int(self.arrays.current_stream())

    def copy(self, destination: Any, source: Any) -> None:
        destination[...] = source
