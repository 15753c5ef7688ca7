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
from typing import NamedTuple

from gpucoll.algorithms.shares import edges_of, equal_edges, pieces, sizes_of
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

    @property
    def unit(self) -> int:
        return max(_UNIT_BYTES // self.like.item_bytes, 1)

    def memory(self, address: int, count: int) -> Buffer:
        """Return a buffer of `count` elements at an address."""
        return replace(self.like, address=address, shape=(count,))

    def shares(self, count: int) -> list[int]:
        """Return how many of `count` elements each rank combines; equal shares if possible."""
        world_size = self.place.world_size
        return sizes_of(equal_edges(count, world_size, self.unit if count % world_size else 1))

    def piece(self, areas: int) -> int:
        """Return the elements in a piece, so that `areas` of them fit into the scratch memory."""
        whole = self.place.world_size * self.unit
        # The shares of the remainder are rounded up.
        return max(SCRATCH_BYTES // (areas * self.like.item_bytes) // whole - 1, 1) * whole

    def exchange(
        self, source: int, destination: int, shares: Sequence[int], *, is_back: bool = False
    ) -> Request:
        """Return the all_to_all that brings this rank the elements of its share from all ranks.

        With `is_back` it brings each rank the shares of its own result.
        """
        own = (shares[self.place.rank],) * len(shares)
        sent, received = (own, tuple(shares)) if is_back else (tuple(shares), own)
        given, to = self.memory(source, sum(sent)), self.memory(destination, sum(received))
        if sent == received:
            return Request(Collective.ALL_TO_ALL, given, to)
        return Request(Collective.ALL_TO_ALL, given, to, counts=sent, receive_counts=received)

    def fold(self, destination: int, sources: int, count: int, n_ranks: int) -> Iterator[Run]:
        """Yield the kernels that combine the arrays of the first ranks, which lie side by side.

        An average is divided by the number of these ranks. If there are more of them than one
        kernel takes, several kernels combine them, with exact intermediate results: see
        `_check_number`.
        """
        if not count:
            return
        to, stride = self.memory(destination, count), count * self.like.item_bytes
        rest = [self.memory(sources + rank * stride, count) for rank in range(n_ranks)]
        while rest:
            given, rest = rest[:MAX_RANKS], rest[MAX_RANKS:]
            op = ReduceOp.SUM if rest and self.op.name == "avg" else self.op
            yield Run(prepare_reduce(op, [to], given, divisor=n_ranks))
            rest = rest and [to, *rest]


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
        for _ in call.fold(_FAR_ADDRESS, _FAR_ADDRESS, 1, number):
            pass


def _whole(request: Request, call: _Call) -> Composed:
    """Return the steps of an all_reduce or a reduce, of one array or a list."""
    (rank, world_size), item_bytes = call.place, call.like.item_bytes
    has_root, gets = request.collective.has_root, request.collective.gets(rank, request.root)
    collect = Collective.GATHER if has_root else Collective.ALL_GATHER
    areas = 1 + has_root  # the root's result has an area of its own
    most = call.piece(areas)
    largest = max(min(x.count, most) for x, _ in request.pairs)
    room = max(call.shares(largest)) * world_size * item_bytes

    def steps(scratch: int, _: int) -> Iterator[Step | Request]:
        for x, out in request.pairs:
            for start, count in pieces(x.count, most):
                at, to = start * item_bytes, None
                if gets:
                    assert out is not None
                    to = call.memory(out.address + at, count)
                if world_size == 1:
                    assert to is not None
                    yield from call.fold(to.address, x.address + at, count, 1)
                    continue
                shares = call.shares(count)
                mine = shares[rank]
                yield call.exchange(x.address + at, scratch, shares)
                result = scratch + mine * world_size * item_bytes
                if not has_root:
                    assert to is not None
                    result = to.address + edges_of(shares)[rank] * item_bytes
                yield from call.fold(result, scratch, mine, world_size)
                counts = None if len({*shares}) == 1 else tuple(shares)
                share = call.memory(result, mine)
                yield Request(collect, share, to, root=request.root, counts=counts)

    return Composed(steps, areas * room if world_size > 1 else 0)


def _reduce_scatter(request: Request, call: _Call) -> Composed:
    x, out = request.both
    (rank, world_size), item_bytes = call.place, call.like.item_bytes
    counts = [x.count // world_size] * world_size
    if request.counts is not None:
        counts = [rows * request.row_count for rows in request.counts]
    if world_size == 1:
        return Composed(lambda *_: call.fold(out.address, x.address, out.count, 1), 0)
    most, scratch_bytes = max(*counts, 1), out.size_bytes * world_size
    # A criterion that all ranks share: they must divide the array in the same way.
    is_cut = most * world_size * item_bytes > SCRATCH_BYTES
    if is_cut:
        most = max(call.piece(2) // world_size, 1)
        scratch_bytes = 2 * most * world_size * item_bytes
    starts = edges_of(counts)

    def steps(scratch: int, _: int) -> Iterator[Step | Request]:
        for start, length in pieces(max(counts), most):
            sizes = [max(min(length, count - start), 0) for count in counts]
            source = x.address
            if is_cut:
                source = to = scratch + scratch_bytes // 2
                for block, size in zip(starts, sizes, strict=False):
                    if size:
                        yield Copy(to, x.address + (block + start) * item_bytes, size * item_bytes)
                        to += size * item_bytes
            yield call.exchange(source, scratch, sizes)
            landing = out.address + start * item_bytes
            yield from call.fold(landing, scratch, sizes[rank], world_size)

    return Composed(steps, scratch_bytes)


def _scan(request: Request, call: _Call) -> Composed:
    (x, out), collective = request.both, request.collective
    (rank, world_size), item_bytes = call.place, call.like.item_bytes
    identity = _identity(call.op, x.dtype) if collective.excludes_own else b""
    most = call.piece(2)
    area = max(call.shares(min(x.count, most))) * world_size * item_bytes

    def steps(scratch: int, _: int) -> Iterator[Step | Request]:
        for start, count in pieces(x.count, most):
            shares, at = call.shares(count), start * item_bytes
            mine = shares[rank]
            yield call.exchange(x.address + at, scratch, shares)
            for other in range(world_size):
                result = scratch + area + other * mine * item_bytes
                if n_ranks := collective.n_operands(other, world_size):
                    yield from call.fold(result, scratch, mine, n_ranks)
                elif mine:
                    yield Fill(result, identity, mine)
            yield call.exchange(scratch + area, out.address + at, shares, is_back=True)

    return Composed(steps, 2 * area)


def _identity(op: ReduceOp, dtype: str) -> bytes:
    if op.function is not None:
        return exact_identity(op.identity, dtype, op.name).tobytes()
    return identity_of(dtype, op.name).tobytes()


MAKERS: dict[Collective, Callable[[Request, _Call], Composed]] = {
    Collective.ALL_REDUCE: _whole,
    Collective.ALL_REDUCE_LIST: _whole,
    Collective.REDUCE: _whole,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
