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
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.block_message import BLOCK, message_bytes, scales_bytes
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import addresses
from gpucoll.kernels.cpu.addresses import CopyKind
from gpucoll.kernels.gpu import pack
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.reduce import reduce_kernel
from gpucoll.kernels.gpu.source import Kernel
from gpucoll.types import BUILT_IN, DTYPES, OPERATIONS, ReduceOp

_COPY = CopyKind("read", "write")
_COPY_AHEAD_BYTES = 2048
_INTO_BUFFER, _HAS_SCALE = 1, 2


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
            return Calls(*_block_calls(kernel.name, arguments))
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


# --- block quantisation ---------------------------------------------------------------------------

# A last block that is not full is processed in separate memory, as by the CPU's own callers.


_FLOAT_BYTES = 4
_ONE_BITS = 0x3F800000
"""The bits of 1.0 as float32."""


class _QuantiseCalls:
    """Calls in the order in which they run, with the memory that they use."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.keep: list[Any] = []

    def words(self, values: Any, dtype: Any) -> int:
        """Return the address of values that live as long as the calls."""
        held = np.array(values, dtype)
        self.keep.append(held)
        return int(held.ctypes.data)

    def scratch(self, count: int) -> int:
        """Return the address of `count` float32, all zero."""
        return self.words(np.zeros(count, np.float32), np.float32)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy bytes."""
        if size_bytes:
            self.made.append((addresses.copy_kernel(_COPY), destination, source, size_bytes, 0))

    def add(self, total: int, left: int, right: int, count: int) -> None:
        """Add float32 numbers up."""
        to, of = self.words([total], np.int64), self.words([left, right], np.int64)
        self.made.append((addresses.reduce_kernel("float32", "sum"), to, 1, of, 2, count, 0, 0))


def _block_calls(name: str, arguments: npt.NDArray[Any]) -> tuple[list[tuple[int, ...]], Any]:
    """Return the calls of a kernel of `gpucoll.kernels.gpu.quantise`, and objects they use."""
    which, _, rest = name.partition("_")
    given = {field: int(arguments[0][field]) for field in arguments.dtype.names or ()}
    calls = _QuantiseCalls()
    blocks = given["blocks"]
    if which == "dequantise":
        _dequantise(calls, rest, given, given["array"], given["count"])
        return calls.made, calls.keep
    block_format, _, rounding = rest.rpartition("_")
    by_chance = rounding == "stochastic"
    if which == "requantise":
        floats = calls.scratch(BLOCK * blocks)
        _dequantise(calls, block_format, given, floats, BLOCK * blocks)
        _quantise(calls, block_format, given, floats, given["result"], by_chance)
        if given["residual"]:
            _keep_lost(calls, block_format, {**given, "message": given["result"]}, floats, True)
        return calls.made, calls.keep
    floats, count, residual = given["array"], given["count"], given["residual"]
    padded = floats
    if residual or count < BLOCK * blocks:  # missing elements count as zeros
        padded = calls.scratch(BLOCK * blocks)
        if residual:
            calls.add(padded, floats, residual, count)
        else:
            calls.copy(padded, floats, _FLOAT_BYTES * count)
    _quantise(calls, block_format, given, padded, given["message"], by_chance)
    if residual:
        _keep_lost(calls, block_format, given, padded)
    return calls.made, calls.keep


def _quantise(
    calls: _QuantiseCalls,
    block_format: str,
    given: dict[str, int],
    floats: int,
    message: int,
    by_chance: bool,
) -> None:
    """Make a message of whole blocks."""
    blocks, start = given["blocks"], scales_bytes(given["blocks"])
    gap = start - _FLOAT_BYTES * blocks
    calls.copy(message + _FLOAT_BYTES * blocks, calls.words(np.zeros(gap + 1), np.uint8), gap)
    random = calls.words([given[each] for each in ("seed", "sequence", "first_block")], np.uint64)
    kernel = _quantise_kernel(block_format, by_chance)
    calls.made.append((kernel, message, message + start, floats, blocks, random))


def _dequantise(
    calls: _QuantiseCalls, block_format: str, given: dict[str, int], floats: int, count: int
) -> None:
    """Add messages up, divided or not; a last block that is not full is made separately."""
    blocks, messages = given["blocks"], given["message"]
    bits = given["divisor"]
    divisor = calls.words([bits], np.uint64)  # its lower half is the float
    kernel = _dequantise_kernel(block_format, bits != 0)
    start, stride = scales_bytes(blocks), message_bytes(blocks)
    whole, rest = divmod(min(count, BLOCK * blocks), BLOCK)
    sources = given["messages"] or 1
    calls.made.append((kernel, floats, messages, stride, start, sources, whole, divisor))
    if rest:
        # The last block is a message of its own: its scale is where that message begins.
        scale, codes, last = _FLOAT_BYTES * whole, start + BLOCK * whole, calls.scratch(BLOCK)
        first = messages + scale
        calls.made.append((kernel, last, first, stride, codes - scale, sources, 1, divisor))
        calls.copy(floats + _FLOAT_BYTES * BLOCK * whole, last, _FLOAT_BYTES * rest)


def _keep_lost(
    calls: _QuantiseCalls, block_format: str, given: dict[str, int], held: int, of_sum: bool = False
) -> None:
    """Store in the residual what the message has lost of the held values; for a sum, add it."""
    blocks, divisor = given["blocks"], given["divisor"]
    meant = calls.scratch(BLOCK * blocks)
    _dequantise(calls, block_format, {**given, "messages": 1, "divisor": 0}, meant, BLOCK * blocks)
    name = "gpucoll_lost_of_sum" if of_sum else "gpucoll_lost"
    kernel = addresses.address_of(addresses.Kernel(name, ("lost", "emit_lost"), (of_sum,)))
    factor = calls.words([divisor or _ONE_BITS], np.uint64)
    calls.made.append((kernel, given["residual"], held, meant, given["count"], factor))


@functools.cache
def _quantise_kernel(block_format: str, by_chance: bool) -> int:
    name = f"gpucoll_quantise_{block_format}{'_by_chance' if by_chance else ''}"
    emitter = ("quantise_kernels", "emit_quantise")
    return addresses.address_of(addresses.Kernel(name, emitter, (block_format, by_chance)))


@functools.cache
def _dequantise_kernel(block_format: str, divides: bool) -> int:
    name = f"gpucoll_dequantise_{block_format}{'_divided' if divides else ''}"
    emitter = ("quantise_kernels", "emit_dequantise")
    return addresses.address_of(addresses.Kernel(name, emitter, (block_format, divides)))
