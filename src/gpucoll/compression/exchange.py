"""A compressed all_reduce: codes travel, and float32 values are added.

Each rank quantises its input into one message for each rank's share of the array (all_to_all). It
adds what it received for its own share, in rank order, and quantises the sum; then every rank gets
all shares (all_gather). There are two quantisations, whatever the number of ranks.
`docs/compression.md` has the formats and the error bound.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray
from gpucoll.arrays.operands import Operands
from gpucoll.backends.protocol import HostBackend, PartOf, Request
from gpucoll.calls.in_one_piece import in_one_piece
from gpucoll.collectives import Collective
from gpucoll.compression.options import Compression
from gpucoll.group.protocol import Group
from gpucoll.kernels.block_message import BLOCK
from gpucoll.types import COMPRESSIONS, ReduceOp, dtype_code

_BLOCK_BYTES = 4 * BLOCK
_LEAST_TIMEOUT_S = 1e-3

Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


@dataclass
class _Side:
    """Inputs, results or residuals, as one array of float32.

    A single float32 array is used directly. Other arrays are fused into a new one, each beginning
    with a block, so that no two share a scale.
    """

    array: Float32s
    pack: Callable[[], None]
    unpack: Callable[[], None]


def _side(buffers: Sequence[Buffer], shared: Float32s | None = None) -> _Side:
    """Return buffers as one side of a call. `shared` is memory into which they may be fused."""
    from gpucoll.kernels.cpu.pack import layout, prepare_pack, prepare_unpack

    if len(buffers) == 1 and buffers[0].dtype == "float32":
        return _Side(_view(buffers[0]), _nothing, _nothing)
    offsets = layout([4 * buffer.count for buffer in buffers], _BLOCK_BYTES)
    if buffers:
        offsets[-1] = offsets[-2] + 4 * buffers[-1].count  # the last array needs no padding
    array = np.empty(offsets[-1] // 4, np.float32) if shared is None else shared
    pack, unpack = (
        prepare(buffers, array.ctypes.data, offsets, dtype="float32")
        for prepare in (prepare_pack, prepare_unpack)
    )
    return _Side(array, pack, unpack)


def _nothing() -> None:
    """Do nothing: the array is already in place."""


def _view(buffer: Buffer) -> Float32s:
    memory = (ctypes.c_float * buffer.count).from_address(buffer.address)
    return np.ctypeslib.as_array(memory) if buffer.count else np.empty(0, np.float32)


def _memory(backend: HostBackend, shape: tuple[int, ...], dtype: str) -> AnyArray:
    """Return memory that the backend moves without a copy, if it has any left.

    It is kept from call to call, because new memory from the system costs as much as quantising.
    """
    try:
        return backend.empty(shape, dtype)
    except MemoryError:
        return np.empty(shape, dtype)


def _buffer(array: Bytes) -> Buffer:
    return Buffer(array.ctypes.data, (array.size,), "uint8", 1, array)


class Exchange:
    """One compressed all_reduce.

    Parameters
    ----------
    backend : HostBackend
        Runs all_to_all and all_gather of bytes.
    rank, world_size : int
        This rank, and the number of ranks.
    made : sequence of Operands
        The arrays, on the host: float32, or a dtype that widens to it.
    residuals : list of Buffer, optional
        One for each array, float32.
    op : ReduceOp
        "sum" or "avg".
    how : Compression
        The format.
    """

    def __init__(
        self,
        backend: HostBackend,
        rank: int,
        world_size: int,
        made: Sequence[Operands],
        residuals: Sequence[Buffer] | None,
        op: ReduceOp,
        how: Compression,
    ) -> None:
        from gpucoll.kernels.cpu import quantise  # only compressed calls need these kernels

        self._kernels = quantise
        self._rank, self._world_size = rank, world_size
        self._made = made  # keeps the memory alive
        self._how = how
        self._divisor = world_size if op.name == "avg" else None
        self._inputs = _side([arrays.source for arrays in made])
        count = self._inputs.array.size
        self._results = _side([arrays.destination for arrays in made], self._inputs.array)
        self._residuals = None if residuals is None else _side(residuals)
        self._blocks = -(-count // (BLOCK * world_size))
        self._fed, self._known = self._inputs.array, np.empty(0, np.float32)
        if residuals is not None:
            self._fed = np.empty(count, np.float32)
            self._known = np.empty(self._blocks * BLOCK, np.float32)
        message_bytes = quantise.message_bytes(self._blocks, how.wire_format)
        self._sent = _memory(backend, (world_size, message_bytes), "uint8")
        self._received = _memory(backend, (world_size, message_bytes), "uint8")
        self._sum = _memory(backend, (self._share(self._fed, rank).size,), "float32")
        quantise.prepare_kernels(
            how.wire_format, by_chance=how.seed is not None, divides=self._divisor is not None
        )
        whole_call = part_of(made, op, how)
        whole, mine = _buffer(self._received), _buffer(self._received[rank])
        requests = (
            Request(Collective.ALL_TO_ALL, _buffer(self._sent), whole, part_of=whole_call),
            Request(Collective.ALL_GATHER, mine, whole, part_of=whole_call),
        )
        self._all_to_all, self._all_gather = map(backend.prepare, requests)

    def run(self, group: Group, timeout_s: float | None = None) -> None:
        """Run the call. Outputs and residuals are written last, after all ranks did their part."""
        start = time.monotonic()
        self._quantise_inputs()
        self._all_to_all.run(timeout_s)
        with in_one_piece(group):
            self._reduce()
            if timeout_s is not None:
                timeout_s = max(timeout_s - (time.monotonic() - start), _LEAST_TIMEOUT_S)
            self._all_gather.run(timeout_s)
        if self._residuals is not None:
            self._keep_errors(self._residuals)
        for rank in range(self._world_size):
            self._dequantise(self._received[rank], self._share(self._results.array, rank))
        self._results.unpack()

    def _share(self, array: Float32s, rank: int) -> Float32s:
        """Return the share of an array that a rank adds."""
        length = self._blocks * BLOCK
        return array[rank * length : (rank + 1) * length]

    def _quantise_inputs(self) -> None:
        self._inputs.pack()
        if self._residuals is not None:
            self._residuals.pack()
            with np.errstate(all="ignore"):
                np.add(self._inputs.array, self._residuals.array, out=self._fed)
        for rank in range(self._world_size):
            self._quantise(self._share(self._fed, rank), self._sent[rank], rank, 0)

    def _reduce(self) -> None:
        """Add this rank's share, and put the quantised sum where all_gather reads it."""
        self._dequantise(self._received, self._sum, self._world_size, self._divisor)
        self._quantise(self._sum, self._received[self._rank], self._rank, 1)

    def _quantise(self, source: Float32s, message: Bytes, share: int, turn: int) -> None:
        self._kernels.quantise(
            source,
            message,
            self._how.wire_format,
            blocks=self._blocks,
            seed=self._how.seed,
            sequence=2 * self._rank + turn,
            first_block=share * self._blocks,
        )

    def _dequantise(
        self, messages: Bytes, to: Float32s, sources: int = 1, divisor: int | None = None
    ) -> None:
        wire_format, blocks = self._how.wire_format, self._blocks
        self._kernels.dequantise(
            messages, to, wire_format, blocks=blocks, sources=sources, divisor=divisor
        )

    def _keep_errors(self, residuals: _Side) -> None:
        """Store the errors of this rank's two quantisations in the residuals.

        The error of a sum belongs to all ranks; the rank that quantised it adds it to its next
        input.
        """
        with np.errstate(all="ignore"):
            for rank in range(self._world_size):
                share = self._share(self._fed, rank)
                known = self._known[: share.size]
                self._dequantise(self._sent[rank], known)
                _clear_what_is_not_finite(np.subtract(share, known, out=share))
            known = self._known[: self._sum.size]
            self._dequantise(self._received[self._rank], known)
            np.subtract(self._sum, known, out=known)
            if self._divisor is not None:
                known *= np.float32(self._divisor)
            mine = self._share(self._fed, self._rank)
            _clear_what_is_not_finite(np.add(mine, known, out=mine))
        np.copyto(residuals.array, self._fed)
        residuals.unpack()


def _clear_what_is_not_finite(x: Float32s) -> None:
    """Set infinities and NaN to zero, because they would return with every later call."""
    x[~np.isfinite(x)] = 0


def part_of(made: Sequence[Operands], op: ReduceOp, how: Compression) -> PartOf:
    """Return the call in the form in which ranks compare it."""
    buffers = [arrays.source for arrays in made]
    shape = buffers[0].shape if len(made) == 1 else (sum(buffer.count for buffer in buffers),)
    numbers = [len(made)]
    for buffer in buffers:
        numbers += [dtype_code(buffer.dtype), len(buffer.shape), *buffer.shape]
    dtype = buffers[0].dtype if buffers else "float32"
    code = COMPRESSIONS.index(how.name)
    return PartOf(Collective.COMPRESSED_ALL_REDUCE, op, dtype, code, shape, tuple(numbers))
