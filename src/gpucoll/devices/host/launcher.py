"""GPU kernels on Host devices: the same arguments for the CPU's kernels, in the stream's order.

The results are those of the GPU's kernels, to the bit. Nothing is compiled except the CPU's
kernels.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

from gpucoll import devices
from gpucoll.devices.host.device import HostDevice, opened
from gpucoll.devices.host.quantise import block_calls
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import addresses
from gpucoll.kernels.cpu.addresses import CopyKind
from gpucoll.kernels.gpu import pack
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.reduce import reduce_kernel
from gpucoll.kernels.gpu.source import Kernel
from gpucoll.types import BUILT_IN, DTYPES, OPERATIONS, ReduceOp

__all__ = ["HostLauncher", "Table"]

_COPY = CopyKind("read", "write")
_COPY_AHEAD_BYTES = 2048
_INTO_BUFFER, _HAS_SCALE = 1, 2
_ARRAY_ALIGNMENT = 16


class Calls(NamedTuple):
    """The content of a kernel: functions with their words, and objects that they use."""

    calls: list[tuple[int, ...]]
    keep: Any


class Table:
    """A table that was copied to a device: its memory, and its content for launches."""

    def __init__(self, device: HostDevice, content: npt.NDArray[Any], stream: int) -> None:
        self.content = content.copy()
        self.address = device.allocate(content.nbytes)
        # Freed without a wait: every launch keeps the table until it is done.
        self._free = weakref.finalize(self, device.leave_unused, self.address)
        self._free.atexit = False
        with device:
            device.copy(self.address, self.content.ctypes.data, content.nbytes, stream)


class HostLauncher:
    """The `gpucoll.kernels.gpu.launcher.Launcher` of Host devices."""

    def __init__(self) -> None:
        self._tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()

    def multiprocessors(self, number: int) -> int:
        """Return how many multiprocessors a device emulates."""
        return _device(number).attribute("multiprocessor_count") or 1

    def compute_capability(self, number: int) -> NoReturn:
        """Raise ArgumentTypeError: kernels for CUDA devices cannot be compiled for these."""
        raise ArgumentTypeError("a Host device has no compute capability")

    def load(self, kernel: Kernel | CompiledKernel, number: int) -> None:
        """Compile the CPU's kernel, if a launch would otherwise have to wait for that."""
        if isinstance(kernel, Kernel) and kernel.file == "reduce.cu":
            operation, dtype, _ = _reductions()[kernel.name]
            addresses.reduce_kernel(dtype, operation)

    def launch(
        self,
        kernel: Kernel | CompiledKernel,
        blocks: int,
        arguments: Sequence[Any],
        number: int,
        stream: int,
    ) -> None:
        """Enqueue a kernel."""
        if isinstance(kernel, CompiledKernel):
            raise ArgumentTypeError(f"{kernel.name} is PTX, which a Host device cannot run")
        made = self._calls_of(kernel, arguments[0])
        self._put(_device(number), stream, made, kernel.name)

    def prepare_custom(
        self,
        op: ReduceOp,
        dtype: str,
        destinations: Sequence[int],
        sources: Sequence[int],
        count: int,
        number: int,
    ) -> Callable[[int], None]:
        """Return a function that enqueues a reduction by a user's function, run on the CPU."""
        from gpucoll.kernels.cpu.custom import custom_kernel

        kernel = custom_kernel(op, dtype)
        tables = [np.array(group, np.int64) for group in (destinations, sources)]
        words = (
            kernel.address,
            tables[0].ctypes.data,
            len(destinations),
            tables[1].ctypes.data,
            len(sources),
            count,
            0,
            0,
        )
        made, device = Calls([words], (kernel, tables)), _device(number)
        return lambda stream: self._put(device, stream, made, str(op))

    def upload(self, table: npt.NDArray[Any], number: int, stream: int) -> tuple[int, Any]:
        """Copy a table to the device, in the stream's order."""
        made = Table(_device(number), table, stream)
        self._tables[made.address] = made
        return made.address, made

    def _put(self, device: HostDevice, stream: int, made: Calls, name: str) -> None:
        with device:
            device.call(stream, made.calls, made.keep, f"launch {name}")

    def _calls_of(self, kernel: Kernel, given: npt.NDArray[Any]) -> Calls:
        arguments = given.copy()  # the caller may change the arguments after a launch has returned
        if kernel.file == "reduce.cu":
            return _reduce_calls(kernel.name, arguments)
        if kernel.file == "pack.cu":
            return self._pack_calls(kernel.name, arguments)
        if kernel.file == "quantise.cu":
            return Calls(*block_calls(kernel.name, arguments))
        raise ArgumentTypeError(f"a Host device has no kernel {kernel.name}")

    def _pack_calls(self, name: str, arguments: npt.NDArray[Any]) -> Calls:
        held = arguments[0]
        table, n_segments = int(held["table"]), int(held["n_segments"])
        owner: Table | None = None
        segments = arguments["only"]
        if n_segments > 1:
            owner = self._tables.get(table)
            if owner is None:
                raise ArgumentTypeError(
                    f"{name}: no table of `upload` lies at {table:#x}; a Host device reads tables "
                    "when a kernel is launched"
                )
            segments = owner.content.view(pack.SEGMENT)[:n_segments]
        rows = [_row(name, arguments, segment) for segment in segments]
        made = np.array(rows, np.int64)
        words = addresses.address_of(addresses.PACK), made.ctypes.data, len(rows)
        return Calls([words], (made, arguments, owner))


def _device(number: int) -> HostDevice:
    return opened(number) or cast(HostDevice, devices.open_device("host", number))


# --- reductions -----------------------------------------------------------------------------------


@functools.cache
def _reductions() -> dict[str, tuple[str, str, int]]:
    """Return each reduce kernel's operation, dtype, and the counted parts of its elements."""
    found: dict[str, tuple[str, str, int]] = {}
    for dtype in DTYPES:
        for operation in OPERATIONS:
            op = BUILT_IN.get(operation) or ReduceOp.scaled_sum(1.0)
            try:
                op.check_dtype(dtype)
            except ArgumentTypeError:
                continue
            kernel, parts = reduce_kernel(operation, dtype)
            # A GPU's kernel of parts counts parts; one of whole complex numbers counts complex
            # numbers.
            factor = addresses.parts_per_element(dtype) // parts
            found.setdefault(kernel.name, (operation, dtype, factor))
    return found


def _reduce_calls(name: str, arguments: npt.NDArray[Any]) -> Calls:
    operation, dtype, factor = _reductions()[name]
    held, start = arguments[0], arguments.ctypes.data
    fields = cast(Any, arguments.dtype.fields)
    words = (
        addresses.reduce_kernel(dtype, operation),
        start + fields["destinations"][1],
        int(held["n_destinations"]),
        start + fields["sources"][1],
        int(held["n_sources"]),
        int(held["count"]) * factor,
        start + fields["parameter"][1],
        0,
    )
    return Calls([words], arguments)


# --- packing --------------------------------------------------------------------------------------


def _row(name: str, arguments: npt.NDArray[Any], segment: Any) -> tuple[int, ...]:
    """Return a row of the pack kernel's table: how one array is moved, and what is cleared."""
    held = arguments[0]
    into_buffer = bool(held["options"] & _INTO_BUFFER)
    array, count = int(segment["array"]), int(segment["count"])
    place = int(held["buffer"]) + int(segment["offset"])
    destination, source = (place, array) if into_buffer else (array, place)
    if name == pack.COPY.name:
        work = addresses.copy_kernel(_COPY), count, _COPY_AHEAD_BYTES
        size_bytes = count
    else:
        dtype = name.partition("_")[2]
        other = dtype if dtype == "float64" else CONVERTIBLE[int(segment["kind"])]
        come, go = (other, dtype) if into_buffer else (dtype, other)
        scales = bool(held["options"] & _HAS_SCALE)
        item_bytes = addresses.element_bytes(dtype)
        size_bytes = count * item_bytes
        if come == go and not scales:
            work = addresses.copy_kernel(_COPY), size_bytes, _COPY_AHEAD_BYTES
        else:
            fields = cast(Any, arguments.dtype.fields)
            scale = arguments.ctypes.data + fields["scale"][1]
            work = addresses.convert_kernel(come, go, scales), count, scale
    gap = place + size_bytes
    padding = int(segment["padding"]) if into_buffer else 0
    return work[0], destination, source, work[1], work[2], gap, padding
