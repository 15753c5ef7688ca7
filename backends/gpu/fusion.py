"""Lists of arrays: small ones are packed into one buffer, moved by one call, and unpacked.

One launch packs, one unpacks. Large arrays are moved by calls of their own, in one group of calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
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
    is_root = request.root in (place.rank, -1)
    packs, unpacks = request.collective.gives(place.rank, request.root), is_root
    if request.collective.flow == Flow.FROM_ROOT:
        unpacks = any(out is not None and x.address != out.address for x, out in small)
        unpacks = unpacks or not is_root

    area = max(batch.offsets[-1] for batch in batches)
    beyond = 0
    """Size of the scratch memory for the reductions themselves, after the buffer."""
    requests = [_packed(request, batch, 0) for batch in batches]
    if large:
        rest = replace(request, source=large[0][0], destination=large[0][1], parts=large)
        requests.append(rest)
    if by_kernels:
        needs = (rank_order.compose(each, place, device).scratch_bytes for each in requests)
        beyond = max(needs)

    def reduced(request: Request, scratch: int, stream: int) -> Iterable[Step | Request]:
        if not by_kernels:
            return (request,)
        return rank_order.compose(request, place, device).steps(scratch + area, stream)

    def steps(scratch: int, stream: int) -> Iterator[Step | Request]:
        if large:
            yield from reduced(rest, scratch, stream)
        for batch in batches:
            whole = _packed(request, batch, scratch)
            buffer = whole.data
            outs = [out for _, out in batch.pairs if out is not None]
            if packs:
                sources = [x for x, _ in batch.pairs]
                yield on_its_stream(prepare_pack(sources, buffer, batch.offsets, stream=stream))
            yield from reduced(whole, scratch, stream)
            if unpacks:
                yield on_its_stream(prepare_unpack(outs, buffer, batch.offsets, stream=stream))

    return Composed(steps, area + beyond)


def _packed(request: Request, batch: _Batch, address: int) -> Request:
    """Return the request for a batch packed into a buffer."""
    like = batch.pairs[0][0]
    count = batch.offsets[-1] // like.item_bytes
    buffer = replace(like, address=address, shape=(count,), owner=None)
    collective = request.collective.of_one
    return replace(request, collective=collective, source=buffer, destination=buffer, parts=())


def _batches(pairs: Sequence[Pair]) -> Iterator[_Batch]:
    """Yield batches of arrays that fit into the buffer, each at a multiple of 16 bytes."""
    start = total = 0
    sizes = [-(-x.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for x, _ in pairs]
    for place, size in enumerate(sizes):
        if total + size > BUFFER_BYTES and total:
            yield _Batch(pairs[start:place], [0, *accumulate(sizes[start:place])])
            start, total = place, 0
        total += size
    yield _Batch(pairs[start:], [0, *accumulate(sizes[start:])])
