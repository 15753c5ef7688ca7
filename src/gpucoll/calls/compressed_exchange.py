"""A compressed all_reduce of host arrays: the steps of `gpucoll.backends.compressed`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.compressed import CompressedPlan, plan_of
from gpucoll.backends.protocol import HostBackend, Request
from gpucoll.collectives import Collective
from gpucoll.group.in_one_piece import Deadline, in_one_piece
from gpucoll.group.protocol import Group
from gpucoll.kernels.block_message import BLOCK

Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


class _Fused(NamedTuple):
    """Inputs, results or residuals as one array of float32."""

    array: Float32s
    pack: Callable[[], None]
    unpack: Callable[[], None]


def _fused(buffers: Sequence[Buffer], plan: CompressedPlan, array: Float32s) -> _Fused:
    """Return buffers that are fused into an array, as the plan lays them out."""
    from gpucoll.kernels.cpu.pack import prepare_pack, prepare_unpack

    pack, unpack = (
        prepare(buffers, array.ctypes.data, plan.offsets, dtype="float32")
        for prepare in (prepare_pack, prepare_unpack)
    )
    return _Fused(array, pack, unpack)


def _in_place(buffer: Buffer) -> _Fused:
    """Return a float32 buffer, which is used where it lies."""
    memory = (ctypes.c_float * buffer.count).from_address(buffer.address)
    array = np.ctypeslib.as_array(memory) if buffer.count else np.empty(0, np.float32)
    return _Fused(array, _nothing, _nothing)


def _nothing() -> None:
    """Do nothing: the array is already in place."""


def _memory(backend: HostBackend, shape: tuple[int, ...], dtype: str) -> Any:
    """Return memory that the backend moves without a copy, if it has any left.

    It is kept from call to call, because new memory from the system costs as much as quantising.
    """
    try:
        return backend.empty(shape, dtype)
    except MemoryError:
        return np.empty(shape, dtype)


def _buffer(array: Bytes) -> Buffer:
    return Buffer(array.ctypes.data, (array.size,), "uint8", 1, array)


class CompressedExchange:
    """One compressed all_reduce of host arrays.

    Parameters
    ----------
    backend : HostBackend
        Runs all_to_all and all_gather of bytes.
    group : Group
        The ranks.
    request : Request
        With `parts`, `compression` and `part_of`.
    """

    def __init__(self, backend: HostBackend, group: Group, request: Request) -> None:
        from gpucoll.kernels.cpu import quantise  # only compressed calls need these kernels

        self._group = group
        self._request = request  # keeps the memory alive
        rank, world_size = group.rank, group.world_size
        plan = self._plan = plan_of(request, rank, world_size)
        how = plan.wire_format
        self._quantise = partial(quantise.quantise, wire_format=how)
        self._dequantise = partial(quantise.dequantise, wire_format=how, blocks=plan.blocks)
        xs, outs = [x for x, _ in request.parts], [out for _, out in request.parts]
        if plan.is_fused:
            array = np.empty(plan.count, np.float32)
            self._x, self._out = _fused(xs, plan, array), _fused(outs, plan, array)
        else:
            self._x, self._out = _in_place(xs[0]), _in_place(outs[0])
        self._residual = None
        if request.residuals:
            # In new memory: the user's residuals are written at the end only.
            self._residual = _fused(request.residuals, plan, np.empty(plan.count, np.float32))
            self._known = np.empty(plan.blocks * BLOCK, np.float32)
        self._sent = _memory(backend, (world_size, plan.message_bytes), "uint8")
        self._received = _memory(backend, (world_size, plan.message_bytes), "uint8")
        self._sum = _memory(backend, (plan.edges[rank + 1] - plan.edges[rank],), "float32")
        quantise.prepare_kernels(
            how, by_chance=plan.seed is not None, divides=plan.divisor is not None
        )
        sent, received = _buffer(self._sent), _buffer(self._received)
        mine, call = _buffer(self._received[rank]), request.part_of
        requests = (
            Request(Collective.ALL_TO_ALL, sent, received, part_of=call),
            Request(Collective.ALL_GATHER, mine, received, part_of=call),
        )
        self._all_to_all, self._all_gather = map(backend.prepare, requests)

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call. Outputs and residuals are written last, after all ranks did their part."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        self._encode()
        self._all_to_all.run(timeout_s)
        with in_one_piece(self._group):
            self._add_up()
            self._all_gather.run(None if deadline is None else deadline.left_s)
        if self._residual is not None:
            self._keep_errors(self._residual)
        self._decode()

    def _share(self, array: Float32s, rank: int) -> Float32s:
        """Return the share of an array that a rank adds up."""
        edges = self._plan.edges
        return array[edges[rank] : edges[rank + 1]]

    def _encode(self) -> None:
        """Quantise each rank's share of x, and of the residual added to it, into its message."""
        given = self._x.array
        self._x.pack()
        if self._residual is not None:
            given = self._residual.array
            self._residual.pack()
            with np.errstate(all="ignore"):
                np.add(self._x.array, given, out=given)
        for rank, message in enumerate(self._sent):
            self._quantise(self._share(given, rank), message, **self._plan.quantising(rank, 0))

    def _add_up(self) -> None:
        """Add up this rank's share, and put the quantised sum where all_gather reads it."""
        plan, mine = self._plan, self._received[self._plan.rank]
        self._dequantise(self._received, self._sum, sources=plan.world_size, divisor=plan.divisor)
        self._quantise(self._sum, mine, **plan.quantising(plan.rank, 1))

    def _decode(self) -> None:
        """Dequantise the sums of all shares into the results."""
        for rank, message in enumerate(self._received):
            self._dequantise(message, self._share(self._out.array, rank))
        self._out.unpack()

    def _keep_errors(self, residual: _Fused) -> None:
        """Store the errors of this rank's two quantisations in the residuals.

        The error of a sum belongs to all ranks; the rank that quantised it adds it to its next
        input.
        """
        plan = self._plan
        with np.errstate(all="ignore"):
            for rank, message in enumerate(self._sent):
                share = self._share(residual.array, rank)
                known = self._known[: share.size]
                self._dequantise(message, known)
                _clear_what_is_not_finite(np.subtract(share, known, out=share))
            known = self._known[: self._sum.size]
            self._dequantise(self._received[plan.rank], known)
            np.subtract(self._sum, known, out=known)
            if plan.divisor is not None:
                known *= np.float32(plan.divisor)
            mine = self._share(residual.array, plan.rank)
            _clear_what_is_not_finite(np.add(mine, known, out=mine))
        residual.unpack()


def _clear_what_is_not_finite(x: Float32s) -> None:
    """Set infinities and NaN to zero, because they would return with every later call."""
    x[~np.isfinite(x)] = 0
