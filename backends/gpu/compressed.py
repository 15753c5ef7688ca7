"""A compressed all_reduce of GPU arrays: kernels quantise, the backend moves the bytes.

The steps and the resulting bits are those of `gpucoll.compression.exchange` on the host: quantise
each rank's share, all_to_all, add up in rank order and quantise, all_gather, dequantise. float16
and bfloat16 are casts: one launch packs all shares, one adds up, one unpacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Place, Run, Step, on_its_stream
from gpucoll.backends.protocol import Compressed, Request
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.block_message import BLOCK, FORMATS, message_bytes
from gpucoll.kernels.gpu import pack, quantise
from gpucoll.kernels.gpu.pack import prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.kernels.gpu.source import MAX_RANKS
from gpucoll.types import ReduceOp

_ALIGNMENT_BYTES = 256
_FLOAT_BYTES = 4
_HALF_BYTES = 2
_BLOCK_BYTES = _FLOAT_BYTES * BLOCK
_FAR_ADDRESS = 1 << 20
"""Stands in for the scratch memory's address while kernels are only compiled and loaded."""


class _Call(NamedTuple):
    """Values that all steps of a call share."""

    place: Place
    op: ReduceOp
    how: Compressed
    like: Buffer
    """A buffer of one byte; every other buffer is on its device."""
    n_floats: int
    """Number of float32 elements of all arrays together, as one array."""

    @property
    def blocks(self) -> int:
        """Number of blocks that each rank adds up."""
        return -(-self.n_floats // (BLOCK * self.place.world_size))

    @property
    def is_in_blocks(self) -> bool:
        return self.how.wire_format in FORMATS

    @property
    def message_bytes(self) -> int:
        """Size of the message that carries one rank's share."""
        if self.is_in_blocks:
            return message_bytes(self.blocks)
        return _HALF_BYTES * BLOCK * self.blocks

    @property
    def divisor(self) -> int | None:
        return self.place.world_size if self.op.name == "avg" else None

    def memory(self, address: int, size_bytes: int) -> Buffer:
        return replace(self.like, address=address, shape=(size_bytes,))

    def floats(self, address: int, count: int) -> Buffer:
        """Return a buffer of `count` float32 elements at an address."""
        return replace(
            self.like, address=address, shape=(count,), dtype="float32", item_bytes=_FLOAT_BYTES
        )

    def message(self, messages: int, rank: int) -> Buffer:
        """Return the message of one rank among consecutive messages."""
        return self.memory(messages + rank * self.message_bytes, self.message_bytes)

    def share(self, array: int, rank: int) -> Buffer:
        """Return the part of an array that a rank adds up."""
        length = self.blocks * BLOCK
        start = min(rank * length, self.n_floats)
        count = min(length, self.n_floats - start)
        return self.floats(array + _FLOAT_BYTES * start, count)


class _Side(NamedTuple):
    """The inputs, results or residuals; they are packed unless they are one float32 array."""

    buffers: Sequence[Buffer]
    offsets: Sequence[int]
    """Offset of each buffer in the packed array, in bytes, and the end of the last one."""

    @property
    def is_packed(self) -> bool:
        return len(self.buffers) > 1 or self.buffers[0].dtype != "float32"

    def at(self, packed: int) -> int:
        """Return the address of the array: `packed` if the buffers must be packed."""
        return packed if self.is_packed else self.buffers[0].address


def compose(request: Request, place: Place, device: str) -> Composed:
    """Return the steps of a compressed all_reduce; its kernels are compiled by then.

    Parameters
    ----------
    request : Request
        With `parts` and `compressed`, for a backend with all_to_all and all_gather of bytes.
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
    how, op = request.compressed, request.op
    assert how is not None
    assert op is not None
    _check(how, place)
    sources = [source for source, _ in request.parts]
    offsets = _offsets(sources)
    like = replace(request.data, shape=(1,), dtype="uint8", item_bytes=1, owner=None, device=device)
    call = _Call(place, op, how, like, offsets[-1] // _FLOAT_BYTES)
    inputs = _Side(sources, offsets)
    results = _Side([out for _, out in request.parts], offsets)
    residuals = _Side(how.residuals, offsets) if how.residuals else None
    _load_kernels(call, [inputs, results, *([residuals] if residuals else [])])
    exchanged = _aligned(place.world_size * call.message_bytes)
    fused = _aligned(offsets[-1])
    first = inputs.is_packed or results.is_packed
    second = residuals is not None and residuals.is_packed

    def steps(scratch: int, stream: int) -> Iterator[Step | Request]:
        sent, received = scratch, scratch + exchanged
        packed = scratch + 2 * exchanged
        kept = None if residuals is None else residuals.at(packed + first * fused)
        for side, at in ((inputs, packed), (residuals, packed + first * fused)):
            if side is not None:
                yield from _pack(call, side, at, stream)
        yield from _encode(call, inputs.at(packed), kept, sent, stream)
        whole = place.world_size * call.message_bytes
        to = call.memory(received, whole)
        yield Request(Collective.ALL_TO_ALL, call.memory(sent, whole), to)
        yield from _add_up(call, received, kept)
        yield Request(Collective.ALL_GATHER, call.message(received, place.rank), to)
        yield from _decode(call, received, results.at(packed), stream)
        for side, at in ((results, packed), (residuals, packed + first * fused)):
            if side is not None:
                yield from _unpack(call, side, at, stream)

    return Composed(steps, 2 * exchanged + (first + second) * fused)


def _load_kernels(call: _Call, sides: Sequence[_Side]) -> None:
    """Compile and load the kernels, before the other ranks see the call."""
    dtypes = {buffer.dtype for side in sides if side.is_packed for buffer in side.buffers}
    if dtypes:
        pack.load_kernels(call.like, dtypes, "float32")
        pack.load_kernels(call.like)  # for a side that has float32 alone
    wire_format = call.how.wire_format
    if call.is_in_blocks:
        quantise.load_kernels(wire_format, call.how.seed is not None, call.like)
        return
    pack.load_kernels(call.like, ["float32"], wire_format)
    part = _halves(call._replace(n_floats=BLOCK), _FAR_ADDRESS, 0)
    prepare_reduce(call.op, [part], [part] * call.place.world_size, divisor=call.place.world_size)


def _check(how: Compressed, place: Place) -> None:
    if how.wire_format in FORMATS:
        return
    better = "use int8_block or float8_block, or copy the arrays to the host"
    if how.residuals:
        raise ArgumentTypeError(
            f"all_reduce of GPU arrays with compression={how.name} takes no residual: {better}"
        )
    if place.world_size > MAX_RANKS:
        raise ArgumentTypeError(
            f"all_reduce of GPU arrays with compression={how.name} serves at most {MAX_RANKS} "
            f"ranks; there are {place.world_size}: {better}"
        )


def _offsets(buffers: Sequence[Buffer]) -> list[int]:
    """Return each array's offset in the packed one, a multiple of a block; then the last's end."""
    sizes = [_FLOAT_BYTES * buffer.count for buffer in buffers]
    starts = [0, *accumulate(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes[:-1])]
    return [*starts, starts[-1] + sizes[-1]]


def _aligned(size_bytes: int) -> int:
    """Return a size rounded up to the alignment of pieces of scratch memory."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pack(call: _Call, side: _Side, at: int, stream: int) -> Iterator[Run]:
    if side.is_packed and call.n_floats:
        array = call.floats(at, call.n_floats)
        made = prepare_pack(side.buffers, array, side.offsets, dtype="float32", stream=stream)
        yield on_its_stream(made)


def _unpack(call: _Call, side: _Side, at: int, stream: int) -> Iterator[Run]:
    if side.is_packed and call.n_floats:
        array = call.floats(at, call.n_floats)
        made = prepare_unpack(side.buffers, array, side.offsets, dtype="float32", stream=stream)
        yield on_its_stream(made)


def _encode(call: _Call, array: int, residual: int | None, sent: int, stream: int) -> Iterator[Run]:
    """Encode each rank's share into its message."""
    if not call.is_in_blocks:
        yield from _move_halves(call, prepare_pack, array, sent, stream)
        return
    for rank in range(call.place.world_size):
        kept = None if residual is None else call.share(residual, rank)
        made = quantise.prepare_quantise(
            call.share(array, rank),
            call.message(sent, rank),
            call.how.wire_format,
            blocks=call.blocks,
            seed=call.how.seed,
            sequence=2 * call.place.rank,
            first_block=rank * call.blocks,
            residual=kept,
        )
        yield Run(made)


def _add_up(call: _Call, received: int, residual: int | None) -> Iterator[Run]:
    """Add up this rank's share, and write it where the all_gather reads it."""
    rank, world_size = call.place
    if not call.is_in_blocks:
        if call.blocks:
            parts = [_halves(call, received, of) for of in range(world_size)]
            yield Run(prepare_reduce(call.op, [parts[rank]], parts, divisor=world_size))
        return
    made = quantise.prepare_requantise(
        call.memory(received, world_size * call.message_bytes),
        call.message(received, rank),
        call.how.wire_format,
        blocks=call.blocks,
        sources=world_size,
        divisor=call.divisor,
        seed=call.how.seed,
        sequence=2 * rank + 1,
        first_block=rank * call.blocks,
        residual=None if residual is None else call.share(residual, rank),
    )
    yield Run(made)


def _decode(call: _Call, received: int, array: int, stream: int) -> Iterator[Run]:
    """Decode the messages of all shares into the result."""
    if not call.is_in_blocks:
        yield from _move_halves(call, prepare_unpack, array, received, stream)
        return
    for rank in range(call.place.world_size):
        message, to = call.message(received, rank), call.share(array, rank)
        yield Run(
            quantise.prepare_dequantise(message, to, call.how.wire_format, blocks=call.blocks)
        )


# --- float16 and bfloat16 -------------------------------------------------------------------------


def _move_halves(
    call: _Call, prepare: Callable[..., Callable[[], None]], array: int, messages: int, stream: int
) -> Iterator[Run]:
    """Cast all shares into their messages, or back, in one launch."""
    if not call.n_floats:
        return
    world_size = call.place.world_size
    shares = [call.share(array, rank) for rank in range(world_size)]
    offsets = [rank * call.message_bytes for rank in range(world_size + 1)]
    whole = call.memory(messages, offsets[-1])
    cast = partial(prepare, dtype=call.how.wire_format, stream=stream)
    yield on_its_stream(cast(shares, whole, offsets))


def _halves(call: _Call, messages: int, rank: int) -> Buffer:
    address = call.message(messages, rank).address
    shape, dtype = (BLOCK * call.blocks,), call.how.wire_format
    return replace(call.like, address=address, shape=shape, dtype=dtype, item_bytes=_HALF_BYTES)
