"""Launching through CuPy, which compiles at first use and keeps the result on disk."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy.typing as npt

from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.source import THREADS, Kernel, source_of

CUDA_OPTIONS = ("-std=c++17", "--fmad=false")
HIP_OPTIONS = ("-std=c++17", "-ffp-contract=off")


@contextlib.contextmanager
def _on(number: int, stream: int) -> Iterator[None]:
    """Make a device and a stream CuPy's current ones."""
    null = cupy.cuda.Stream.null
    used = cupy.cuda.ExternalStream(stream, number) if stream else null
    with cupy.cuda.Device(number), used:
        yield


@functools.lru_cache(maxsize=4096)
def _compiled(kernel: Kernel | CompiledKernel, number: int) -> Any:
    """Return a kernel loaded on the current device, which is `number`."""
    if isinstance(kernel, Kernel):
        options = HIP_OPTIONS if cupy.cuda.runtime.is_hip else CUDA_OPTIONS
        module = cupy.RawModule(code=source_of([kernel]), options=options)
        return module.get_function(kernel.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.ptx, encoding="ascii")
        made = cupy.RawModule(path=str(path)).get_function(kernel.name)
        made.compile()  # now: the file goes
    return made


class CupyLauncher:
    """CUDA and HIP devices."""

    @functools.cache  # noqa: B019 (there is one launcher, which lives as long as the process)
    def multiprocessors(self, number: int) -> int:
        """Return how many multiprocessors (compute units) a device has."""
        return int(cupy.cuda.Device(number).attributes["MultiProcessorCount"])

    def compute_capability(self, number: int) -> tuple[int, int]:
        """Return a CUDA device's compute capability."""
        if cupy.cuda.runtime.is_hip:
            raise ArgumentTypeError(
                "a user's operation cannot run on AMD GPUs: Numba compiles for NVIDIA's only; use "
                "a built-in operation, or reduce on the host"
            )
        text = cupy.cuda.Device(number).compute_capability
        return int(text[:-1]), int(text[-1])

    def launch(
        self,
        kernel: Kernel | CompiledKernel,
        blocks: int,
        arguments: Sequence[Any],
        number: int,
        stream: int,
    ) -> None:
        """Enqueue a kernel."""
        with _on(number, stream):
            _compiled(kernel, number)((blocks,), (THREADS,), tuple(arguments))

    def upload(self, table: npt.NDArray[Any], number: int, stream: int) -> tuple[int, Any]:
        """Copy a table to the device, in the stream's order."""
        with _on(number, stream):
            made = cupy.asarray(table.view("u8"))
        return made.data.ptr, made
