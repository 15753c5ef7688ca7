"""A compressed all_reduce of GPU arrays: the steps of `gpucoll.backends.compressed` as kernels.

float16 and bfloat16 are casts: one launch packs all shares, one adds up, one unpacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.compressed import FLOAT_BYTES, CompressedPlan, plan_of
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Place, Run, Step, on_its_stream
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.block_message import BLOCK, HALVES
from gpucoll.kernels.gpu import pack, quantise
from gpucoll.kernels.gpu.pack import prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.kernels.gpu.source import MAX_RANKS
from gpucoll.types import ReduceOp

_ALIGNMENT_BYTES = 256
_HALF_BYTES = 2
_FAR_ADDRESS = 1 << 20
"""Stands in for the scratch memory's address while kernels are only compiled and loaded."""

_Prepare = Callable[..., Callable[[], None]]
"""`prepare_pack` or `prepare_unpack`."""


class _Call(NamedTuple):
    """Values that all steps of a call share."""

    plan: CompressedPlan
    op: ReduceOp
    like: Buffer
    """A buffer of one byte; every other buffer is on its device."""

    @property
    def is_cast(self) -> bool:
        return self.plan.wire_format in HALVES

    def memory(self, address: int, size_bytes: int) -> Buffer:
        return replace(self.like, address=address, shape=(size_bytes,))

    def message(self, messages: int, rank: int) -> Buffer:
        """Return the message of one rank among consecutive messages."""
        size_bytes = self.plan.message_bytes
        return self.memory(messages + rank * size_bytes, size_bytes)

    def halves(self, messages: int, rank: int) -> Buffer:
        """Return a message as an array of float16 or bfloat16."""
        address, shape = self.message(messages, rank).address, (BLOCK * self.plan.blocks,)
        dtype = self.plan.wire_format
        return replace(self.like, address=address, shape=shape, dtype=dtype, item_bytes=_HALF_BYTES)

    def share(self, array: int, rank: int) -> Buffer:
        """Return the part of an array of float32 that a rank adds up."""
        start, end = self.plan.edges[rank : rank + 2]
        return self.floats(array + FLOAT_BYTES * start, end - start)

    def floats(self, address: int, count: int) -> Buffer:
        return replace(
            self.like, address=address, shape=(count,), dtype="float32", item_bytes=FLOAT_BYTES
        )


def compose(request: Request, place: Place, device: str) -> Composed:
    """Return the steps of a compressed all_reduce; its kernels are compiled by then.

    Parameters
    ----------
    request : Request
        With `parts` and `compression`, for a backend with all_to_all and all_gather of bytes.
    place : Place
    device : str
        The GPU: ``"cuda:0"``.

    Raises
    ------
    ArgumentTypeError
        No kernels exist for it: float16 or bfloat16 with residuals, or too many ranks.

    Notes
    -----
    Residuals change while the steps run. After a failure their content is undefined, as is that of
    the results.
    """
    check(request, place)
    assert request.op is not None
    plan = plan_of(request, *place)
    like = replace(request.data, shape=(1,), dtype="uint8", item_bytes=1, owner=None, device=device)
    call = _Call(plan, request.op, like)
    xs, outs = [x for x, _ in request.parts], [out for _, out in request.parts]
    residuals, fuses_residuals = request.residuals, len(request.residuals) > 1
    _load_kernels(call, xs)
    whole = plan.world_size * plan.message_bytes
    exchanged, fused = _aligned(whole), _aligned(plan.offsets[-1])

    def steps(scratch: int, stream: int) -> Iterator[Step | Request]:
        sent, received, at = scratch, scratch + exchanged, scratch + 2 * exchanged
        x, out = (at, at) if plan.is_fused else (xs[0].address, outs[0].address)
        residual = residuals[0].address if residuals else 0
        if plan.is_fused:
            yield from _move(call, prepare_pack, xs, at, stream)
        if fuses_residuals:
            residual = at + fused
            yield from _move(call, prepare_pack, residuals, residual, stream)
        yield from _encode(call, x, residual, sent, stream)
        to = call.memory(received, whole)
        yield Request(Collective.ALL_TO_ALL, call.memory(sent, whole), to)
        yield from _add_up(call, received, residual)
        yield Request(Collective.ALL_GATHER, call.message(received, plan.rank), to)
        yield from _decode(call, received, out, stream)
        if plan.is_fused:
            yield from _move(call, prepare_unpack, outs, at, stream)
        if fuses_residuals:
            yield from _move(call, prepare_unpack, residuals, residual, stream)

    return Composed(steps, 2 * exchanged + (plan.is_fused + fuses_residuals) * fused)


def check(request: Request, place: Place) -> None:
    """Raise ArgumentTypeError if there are no kernels for the call; alike on all ranks."""
    compression = request.compression
    assert compression is not None
    if compression.wire_format not in HALVES:
        return
    better = "use int8_block or float8_block, or copy the arrays to the host"
    if request.residuals:
        raise ArgumentTypeError(
            f"all_reduce of GPU arrays with compression={compression.name} takes no residual: "
            f"{better}"
        )
    if place.world_size > MAX_RANKS:
        raise ArgumentTypeError(
            f"all_reduce of GPU arrays with compression={compression.name} serves at most "
            f"{MAX_RANKS} ranks; there are {place.world_size}: {better}"
        )


def _load_kernels(call: _Call, xs: Sequence[Buffer]) -> None:
    """Compile and load the kernels, before the other ranks see the call."""
    plan, like = call.plan, call.like
    if plan.is_fused:
        pack.load_kernels(like, {x.dtype for x in xs}, "float32")
        pack.load_kernels(like)  # for residuals
    if not call.is_cast:
        quantise.load_kernels(plan.wire_format, plan.seed is not None, like)
        return
    pack.load_kernels(like, ["float32"], plan.wire_format)
    part = replace(call.halves(_FAR_ADDRESS, 0), shape=(BLOCK,))
    prepare_reduce(call.op, [part], [part] * plan.world_size, divisor=plan.world_size)


def _aligned(size_bytes: int) -> int:
    """Return a size rounded up to the alignment of pieces of scratch memory."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _move(
    call: _Call, prepare: _Prepare, arrays: Sequence[Buffer], fused: int, stream: int
) -> Iterator[Run]:
    """Pack arrays into the fused one, or unpack it."""
    if count := call.plan.count:
        whole, offsets = call.floats(fused, count), call.plan.offsets
        yield on_its_stream(prepare(arrays, whole, offsets, dtype="float32", stream=stream))


def _cast(call: _Call, prepare: _Prepare, array: int, messages: int, stream: int) -> Iterator[Run]:
    """Cast all shares of a fused array into their messages, or back, in one launch."""
    plan = call.plan
    if plan.count:
        shares = [call.share(array, rank) for rank in range(plan.world_size)]
        offsets = [rank * plan.message_bytes for rank in range(plan.world_size + 1)]
        whole, dtype = call.memory(messages, offsets[-1]), plan.wire_format
        yield on_its_stream(prepare(shares, whole, offsets, dtype=dtype, stream=stream))


def _encode(call: _Call, x: int, residual: int, sent: int, stream: int) -> Iterator[Run]:
    """Encode each rank's share of x into its message. `residual` 0: there is none."""
    if call.is_cast:
        yield from _cast(call, prepare_pack, x, sent, stream)
        return
    for rank in range(call.plan.world_size):
        yield Run(
            quantise.prepare_quantise(
                call.share(x, rank),
                call.message(sent, rank),
                call.plan.wire_format,
                residual=call.share(residual, rank) if residual else None,
                **call.plan.quantising(rank, 0),
            )
        )


def _add_up(call: _Call, received: int, residual: int) -> Iterator[Run]:
    """Add up this rank's share, and write it where the all_gather reads it."""
    plan = call.plan
    if call.is_cast:
        if plan.blocks:
            parts = [call.halves(received, rank) for rank in range(plan.world_size)]
            yield Run(prepare_reduce(call.op, [parts[plan.rank]], parts, divisor=plan.world_size))
        return
    yield Run(
        quantise.prepare_requantise(
            call.memory(received, plan.world_size * plan.message_bytes),
            call.message(received, plan.rank),
            plan.wire_format,
            sources=plan.world_size,
            divisor=plan.divisor,
            residual=call.share(residual, plan.rank) if residual else None,
            **plan.quantising(plan.rank, 1),
        )
    )


def _decode(call: _Call, received: int, out: int, stream: int) -> Iterator[Run]:
    """Decode the messages of all shares into the result."""
    if call.is_cast:
        yield from _cast(call, prepare_unpack, out, received, stream)
        return
    for rank in range(call.plan.world_size):
        message, to = call.message(received, rank), call.share(out, rank)
        wire_format, blocks = call.plan.wire_format, call.plan.blocks
        yield Run(quantise.prepare_dequantise(message, to, wire_format, blocks=blocks))
