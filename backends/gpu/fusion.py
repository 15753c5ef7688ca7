"""Lists of arrays: small ones are packed into one buffer, moved by one call, and unpacked.

One launch packs, one unpacks. Large arrays are moved by calls of their own, in one group of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.gpu import rank_order
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Place, Step, on_its_stream
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Flow
from gpucoll.kernels.gpu.pack import load_kernels, prepare_pack, prepare_unpack

FUSED_BYTES = 1 << 20
"""Arrays up to this size are packed.

Not measured: no GPU was at hand. Packing reads and writes an array twice more: 1.3 us for 1 MiB at
the 3.3 TB/s of an H100's memory. One more call in a group costs the host about a microsecond, and
the GPU a few, whatever its size. `tools/gpu_check.py` times both ways.
"""
BUFFER_BYTES = 64 << 20
"""Size of the buffer; longer lists fill it several times."""
_ALIGNMENT_BYTES = 16

Pair = tuple[Buffer, "Buffer | None"]


class _Batch(NamedTuple):
    """Arrays that one call moves in packed form."""

    pairs: Sequence[Pair]
    offsets: Sequence[int]


def compose(
    request: Request, place: Place, device: str, *, by_kernels: bool = False
) -> Composed | None:
    """Return the steps for a list; None if nothing of it is worth packing.

    The kernels are compiled by then.

    Parameters
    ----------
    request : Request
        All_reduce, reduce or broadcast of a list, for a backend that can do it with a single
        array.
    place : Place
    device : str
        The GPU: ``"cuda:0"``.
    by_kernels : bool
        Whether arrays are reduced as in `rank_order` instead of by requests.
    """
    pairs = [pair for pair in request.parts if pair[0].count]
    small = [pair for pair in pairs if pair[0].size_bytes <= FUSED_BYTES]
    if len(small) < 2 or place.world_size == 1:
        return None
    load_kernels(replace(small[0][0], device=device))
    large = tuple(pair for pair in pairs if pair[0].size_bytes > FUSED_BYTES)
    batches = list(_batches(small))
    collective = request.collective
    packs, unpacks = (has(place.rank, request.root) for has in (collective.gives, collective.gets))
    if collective.flow == Flow.FROM_ROOT and packs:  # the root has what it gives, maybe in place
        unpacks = any(out is not None and x.address != out.address for x, out in small)
    area = max(batch.offsets[-1] for batch in batches)
    requests = [_packed(request, batch, 0) for batch in batches]
    if large:
        rest = request._replace(source=large[0][0], destination=large[0][1], parts=large)
        requests.append(rest)

    def moved(request: Request) -> Composed:
        if by_kernels:
            return rank_order.compose(request, place, device)
        return Composed(lambda *_: (request,), 0)

    def steps(scratch: int, stream: int) -> Iterator[Step | Request]:
        beyond = scratch + area  # for the reductions themselves
        if large:
            yield from moved(rest).steps(beyond, stream)
        for batch in batches:
            whole = _packed(request, batch, scratch)
            buffer = whole.data
            if packs:
                sources = [x for x, _ in batch.pairs]
                yield on_its_stream(prepare_pack(sources, buffer, batch.offsets, stream=stream))
            yield from moved(whole).steps(beyond, stream)
            if unpacks:
                outs = [out for _, out in batch.pairs if out is not None]
                yield on_its_stream(prepare_unpack(outs, buffer, batch.offsets, stream=stream))

    return Composed(steps, area + max(moved(each).scratch_bytes for each in requests))


def _packed(request: Request, batch: _Batch, address: int) -> Request:
    """Return the request for a batch packed into a buffer."""
    like = batch.pairs[0][0]
    count = batch.offsets[-1] // like.item_bytes
    buffer = replace(like, address=address, shape=(count,), owner=None)
    collective = request.collective.of_one
    return request._replace(collective=collective, source=buffer, destination=buffer, parts=())


def _batches(pairs: Sequence[Pair]) -> Iterator[_Batch]:
    """Yield batches of arrays that fit into the buffer, each at a multiple of 16 bytes."""
    taken: list[Pair] = []
    offsets = [0]
    for pair in pairs:
        size_bytes = -(-pair[0].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if taken and offsets[-1] + size_bytes > BUFFER_BYTES:
            yield _Batch(taken, offsets)
            taken, offsets = [], [0]
        taken.append(pair)
        offsets.append(offsets[-1] + size_bytes)
    yield _Batch(taken, offsets)
