"""Reductions in rank order, by gpucoll's kernels and a library that only moves bytes.

They serve what a vendor's library cannot reduce. An all_to_all brings each rank the elements of its
share from all ranks. One kernel combines them in the order 0 to P-1. The results are then collected
(all_gather, gather) or sent back (scans). Half types are accumulated in float32 and rounded once,
which gives the same bits as on the host.

| collective | steps |
|---|---|
| all_reduce | all_to_all, kernel, all_gather |
| reduce | all_to_all, kernel, gather |
| reduce_scatter | all_to_all, kernel |
| scan, exclusive_scan | all_to_all, a kernel for each rank's result, all_to_all |

Arrays that are too large for the scratch memory are reduced in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Copy, Fill, Place, Run, Step
from gpucoll.backends.protocol import Request, row_of
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu.identities import exact_identity, identity_of
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.kernels.gpu.source import MAX_RANKS
from gpucoll.types import ReduceOp

SCRATCH_BYTES = 64 << 20
"""How much scratch memory a call may use; larger arrays are reduced in pieces."""
_UNIT_BYTES = 16
"""Shares begin at multiples of it, for the kernels' vector accesses."""
_ROUNDED_ONCE = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_FAR_ADDRESS = 1 << 20
"""Stands in for the scratch memory's address while kernels are only compiled and loaded."""


class _Call(NamedTuple):
    """Values that all steps of a call share."""

    op: ReduceOp
    place: Place
    like: Buffer
    """A buffer of one element; every other buffer has its dtype and device."""

    def memory(self, address: int, count: int) -> Buffer:
        """Return a buffer of `count` elements at an address."""
        return replace(self.like, address=address, shape=(count,))

    def fold(
        self, destination: int, sources: Sequence[int], count: int, divisor: int = 0
    ) -> Iterator[Run]:
        """Yield the kernels that combine these sources, first to last, into the destination.

        An average is divided by the number of ranks, or by `divisor`. If there are more sources
        than one kernel takes, several kernels combine them, with exact intermediate results: see
        `_check_number`.
        """
        if not count:
            return
        to, first = self.memory(destination, count), list(sources[:MAX_RANKS])
        rest = list(sources[MAX_RANKS:])
        while True:
            is_last = not rest
            op = self.op if is_last or self.op.name != "avg" else ReduceOp.parse("sum")
            given = [self.memory(address, count) for address in first]
            yield Run(prepare_reduce(op, [to], given, divisor=divisor or self.place.world_size))
            if is_last:
                return
            first, rest = [destination, *rest[: MAX_RANKS - 1]], rest[MAX_RANKS - 1 :]


def compose(request: Request, place: Place, device: str) -> Composed:
    """Return the steps of a reduction; its kernels are compiled by then.

    Parameters
    ----------
    request : Request
        A reduction, for a backend with all_to_all, all_gather and gather of any dtype.
    place : Place
    device : str
        The GPU: ``"cuda:0"``.

    Raises
    ------
    ArgumentTypeError
        No kernel exists for it; the text gives the reason and a remedy.
    BackendUnavailableError
        No compiler for the kernel is available.
    """
    assert request.op is not None
    like = replace(request.data, shape=(1,), owner=None, device=device)
    call = _Call(request.op, place, like)
    _check_number(call)
    _make_ready(call, request)
    maker = row_of(MAKERS, request.collective, "in rank order on GPUs")
    return maker(request, call)


def _check_number(call: _Call) -> None:
    """Refuse reductions that would have to be rounded, or scaled, more than once."""
    if call.place.world_size <= MAX_RANKS:
        return
    if call.like.dtype in _ROUNDED_ONCE or call.op.name == "scaled_sum":
        raise ArgumentTypeError(
            f"{call.op} of {call.like.dtype} on GPUs: gpucoll's kernels combine {MAX_RANKS} ranks "
            f"at once, here are {call.place.world_size}; convert to float32 first, or copy to the "
            "host, where it works"
        )


def _make_ready(call: _Call, request: Request) -> None:
    """Compile and load the kernels, before the other ranks see the call."""
    world_size = call.place.world_size
    numbers = [world_size]
    if call.op.function is not None and request.collective.is_scan:
        # A kernel for each number of sources; the built-in kernels take any number.
        numbers = [*range(1, world_size + 1)]
    for number in numbers:
        for _ in call.fold(_FAR_ADDRESS, [_FAR_ADDRESS] * number, 1):
            pass


def _shares(count: int, item_bytes: int, world_size: int) -> list[int]:
    """Return how many of `count` elements each rank combines; equal shares if possible."""
    if count % world_size == 0:
        return [count // world_size] * world_size
    unit = max(_UNIT_BYTES // item_bytes, 1)
    length = -(-count // (world_size * unit)) * unit
    return [max(min(length, count - rank * length), 0) for rank in range(world_size)]


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _pieces(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the start of each piece, and its number of elements."""
    for start in range(0, count, most):
        yield start, min(most, count - start)


def _piece_of(call: _Call, areas: int) -> int:
    """Return the elements in a piece, so that `areas` of them fit into the scratch memory."""
    world_size, unit = call.place.world_size, max(_UNIT_BYTES // call.like.item_bytes, 1)
    most = SCRATCH_BYTES // (areas * call.like.item_bytes)
    # The shares of the remainder are rounded up.
    return max(most // (world_size * unit) - 1, 1) * world_size * unit


def _exchange(call: _Call, source: int, destination: int, counts: Sequence[int]) -> Request:
    """Return the all_to_all that brings this rank the elements of its share from all ranks."""
    mine, given = counts[call.place.rank], call.memory(source, sum(counts))
    to = call.memory(destination, mine * len(counts))
    if len({*counts}) == 1:
        return Request(Collective.ALL_TO_ALL, given, to)
    received = (mine,) * len(counts)
    return Request(Collective.ALL_TO_ALL, given, to, counts=tuple(counts), receive_counts=received)


def _counted(counts: Sequence[int]) -> tuple[int, ...] | None:
    return None if len({*counts}) == 1 else tuple(counts)


def _pairs(request: Request) -> Sequence[tuple[Buffer, Buffer | None]]:
    if request.parts:
        return request.parts
    assert request.source is not None
    return ((request.source, request.destination),)


def _all_reduce(request: Request, call: _Call) -> Composed:
    return _whole(request, call, _collect_everywhere, areas=1)


def _reduce(request: Request, call: _Call) -> Composed:
    return _whole(request, call, _collect_at_root, areas=2)


_Collect = Callable[[Request, _Call, Buffer | None, int, Sequence[int]], "Iterator[Step | Request]"]


def _whole(request: Request, call: _Call, collect: _Collect, areas: int) -> Composed:
    """Return the steps of an all_reduce or a reduce; `collect` distributes the combined shares."""
    most, largest = _piece_of(call, areas), 0
    pairs = _pairs(request)
    for x, _ in pairs:
        largest = max(largest, min(x.count, most))
    item_bytes, world_size = call.like.item_bytes, call.place.world_size
    gets = request.collective.gets(call.place.rank, request.root)
    room = max(_shares(largest, item_bytes, world_size)) * world_size * item_bytes

    def steps(scratch: int, _: int) -> Iterator[Step | Request]:
        for x, out in pairs:
            for start, count in _pieces(x.count, most):
                counts, at = _shares(count, item_bytes, world_size), start * item_bytes
                if world_size == 1:
                    assert out is not None
                    yield from call.fold(out.address + at, [x.address + at], count)
                    continue
                yield _exchange(call, x.address + at, scratch, counts)
                to = call.memory(out.address + at, count) if gets and out is not None else None
                yield from collect(request, call, to, scratch, counts)

    return Composed(steps, areas * room if world_size > 1 else 0)


def _received(call: _Call, scratch: int, mine: int) -> list[int]:
    """Return the addresses of each rank's elements after `_exchange`."""
    size_bytes = mine * call.like.item_bytes
    return [scratch + rank * size_bytes for rank in range(call.place.world_size)]


def _collect_everywhere(
    request: Request, call: _Call, to: Buffer | None, scratch: int, counts: Sequence[int]
) -> Iterator[Step | Request]:
    assert to is not None
    rank = call.place.rank
    mine = to.address + _starts(counts)[rank] * call.like.item_bytes
    yield from call.fold(mine, _received(call, scratch, counts[rank]), counts[rank])
    share = call.memory(mine, counts[rank])
    yield Request(Collective.ALL_GATHER, share, to, counts=_counted(counts))


def _collect_at_root(
    request: Request, call: _Call, to: Buffer | None, scratch: int, counts: Sequence[int]
) -> Iterator[Step | Request]:
    mine = counts[call.place.rank]
    received = _received(call, scratch, mine)
    result = scratch + mine * call.place.world_size * call.like.item_bytes
    yield from call.fold(result, received, mine)
    share, root = call.memory(result, mine), request.root
    yield Request(Collective.GATHER, share, to, root=root, counts=_counted(counts))


def _reduce_scatter(request: Request, call: _Call) -> Composed:
    x, out, place = request.source, request.destination, call.place
    assert x is not None
    assert out is not None
    item_bytes, world_size = call.like.item_bytes, place.world_size
    counts = [x.count // world_size] * world_size
    if request.counts is not None:
        counts = [rows * request.row_count for rows in request.counts]
    starts = _starts(counts)
    if world_size == 1:
        return Composed(lambda *_: call.fold(out.address, [x.address], out.count), 0)
    # A criterion that all ranks share: they must divide the array in the same way.
    if max(counts) * world_size * item_bytes <= SCRATCH_BYTES:

        def at_once(scratch: int, _: int) -> Iterator[Step | Request]:
            yield _exchange(call, x.address, scratch, counts)
            mine = counts[place.rank]
            yield from call.fold(out.address, _received(call, scratch, mine), mine)

        return Composed(at_once, out.size_bytes * world_size)
    most = max(_piece_of(call, 2) // world_size, 1)
    area = most * world_size * item_bytes

    def in_pieces(scratch: int, _: int) -> Iterator[Step | Request]:
        for start, length in _pieces(max(counts), most):
            sizes = [max(min(length, count - start), 0) for count in counts]
            packed = _starts(sizes)
            for rank in range(world_size):
                source = x.address + (starts[rank] + start) * item_bytes
                if sizes[rank]:
                    to = scratch + area + packed[rank] * item_bytes
                    yield Copy(to, source, sizes[rank] * item_bytes)
            yield _exchange(call, scratch + area, scratch, sizes)
            mine = sizes[place.rank]
            to = out.address + start * item_bytes
            yield from call.fold(to, _received(call, scratch, mine), mine)

    return Composed(in_pieces, 2 * area)


def _scan(request: Request, call: _Call) -> Composed:
    x, out, place = request.source, request.destination, call.place
    assert x is not None
    assert out is not None
    assert request.op is not None
    collective = request.collective
    identity = _identity(request.op, x.dtype) if collective.excludes_own else b""
    item_bytes, most = call.like.item_bytes, _piece_of(call, 2)
    largest = _shares(min(x.count, most), item_bytes, place.world_size)
    area = max(largest) * place.world_size * item_bytes

    def steps(scratch: int, _: int) -> Iterator[Step | Request]:
        for start, count in _pieces(x.count, most):
            counts, at = _shares(count, item_bytes, place.world_size), start * item_bytes
            mine = counts[place.rank]
            yield _exchange(call, x.address + at, scratch, counts)
            received = _received(call, scratch, mine)
            results = _received(call, scratch + area, mine)
            for rank, result in enumerate(results):
                if before := received[: collective.n_operands(rank, place.world_size)]:
                    yield from call.fold(result, before, mine, len(before))
                elif mine:
                    yield Fill(result, identity, mine)
            yield _return(call, scratch + area, out.address + at, counts)

    return Composed(steps, 2 * area)


def _identity(op: ReduceOp, dtype: str) -> bytes:
    if op.function is not None:
        return exact_identity(op.identity, dtype, op.name).tobytes()
    return identity_of(dtype, op.name).tobytes()


def _return(call: _Call, source: int, destination: int, counts: Sequence[int]) -> Request:
    """Return the all_to_all that brings each rank the shares of its result."""
    mine = counts[call.place.rank]
    given, to = call.memory(source, mine * len(counts)), call.memory(destination, sum(counts))
    if len({*counts}) == 1:
        return Request(Collective.ALL_TO_ALL, given, to)
    sent = (mine,) * len(counts)
    return Request(Collective.ALL_TO_ALL, given, to, counts=sent, receive_counts=tuple(counts))


MAKERS: dict[Collective, Callable[[Request, _Call], Composed]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
