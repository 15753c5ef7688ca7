"""Each collective as calls of NCCL: its own function if the library has it, else a combination.

| collective | as |
|---|---|
| all_reduce, reduce, broadcast, all_gather, reduce_scatter | itself |
| lists | one group of themselves |
| all_gather with counts | a group of broadcasts |
| reduce_scatter with counts | a group of reductions |
| all_to_all, gather, scatter | itself if available, else a group of sends and receives |
| the same with counts | a group of sends and receives |
| scan, exclusive_scan | reduce_scatter of a row of blocks: block s holds this rank's x if it |
| | counts for rank s, and the op's identity otherwise |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gpucoll.algorithms.shares import pieces
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Copy, Fill, Place, Step
from gpucoll.backends.nccl.elements import BYTES, Reduction, reduction
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.protocol import Request, row_of
from gpucoll.collectives import Collective
from gpucoll.kernels.cpu.identities import identity_of

FunctionArguments = tuple[int | None, ...]
"""Arguments of an NCCL function, without the communicator and the stream, which come last."""
SCAN_SCRATCH_BYTES = 64 << 20
"""How much memory the blocks of one piece of a scan may take."""
_Call = tuple[str, FunctionArguments]


class Phase(NamedTuple):
    """A part of a call that is enqueued together.

    Attributes
    ----------
    calls : sequence of (str, FunctionArguments)
        The functions, by name; several run between one ncclGroupStart and ncclGroupEnd.
    before : sequence of Step
        Steps that are enqueued before the functions.
    """

    calls: tuple[tuple[str, FunctionArguments], ...] = ()
    before: tuple[Step, ...] = ()


class Launch(NamedTuple):
    """One collective with its buffers, ready to be enqueued any number of times.

    Attributes
    ----------
    phases : callable
        Returns the phases, given the address of the scratch memory and the stream. They live until
        they are done.
    scratch_bytes : int
        Size of the scratch memory. A launch that needs any cannot be part of a group of the
        library.
    factor : (bytes, int), optional
        For a premultiplied sum: the element and its type; `OPERATION` stands for the op.
    call : (str, FunctionArguments), optional
        For a launch that consists of one call: that call. Such a launch is the fastest.
    """

    phases: Callable[[int, int], Iterable[Phase]]
    scratch_bytes: int = 0
    factor: tuple[bytes, int] | None = None
    call: tuple[str, FunctionArguments] | None = None


def plain(*calls: tuple[str, FunctionArguments]) -> Launch:
    """Return a launch that consists of these calls."""
    phases = (Phase(calls),) if calls else ()
    return Launch(lambda *_: phases, call=calls[0] if len(calls) == 1 else None)


def _scan(request: Request, place: Place, library: Library, reduced: Reduction | None) -> Launch:
    """Return the launch of a scan or an exclusive scan.

    The row of blocks lies in scratch memory; a large input is processed in pieces.
    """
    x, out = request.both
    assert reduced is not None
    assert request.op is not None
    is_exclusive = request.collective.excludes_own
    identity = identity_of(x.dtype, request.op.name).tobytes()
    type_, operation = reduced.arguments
    row_bytes = x.item_bytes * place.world_size
    piece = max(min(x.count, SCAN_SCRATCH_BYTES // row_bytes), 1)

    def phases(scratch: int, _: int) -> Iterator[Phase]:
        for start, count in pieces(x.count, piece):
            at, size_bytes = start * x.item_bytes, count * x.item_bytes
            first = place.rank + is_exclusive  # the first rank that this one's x counts for
            blocks: list[Copy | Fill] = [
                Copy(scratch + rank * size_bytes, x.address + at, size_bytes)
                for rank in range(first, place.world_size)
            ]
            if first:
                blocks.append(Fill(scratch, identity, first * count))
            arguments = (scratch, out.address + at, count * reduced.parts, type_, operation)
            yield Phase((("ncclReduceScatter", arguments),), tuple(blocks))

    return Launch(phases, piece * row_bytes if x.count else 0)


def launch_of(request: Request, place: Place, library: Library) -> Launch:
    """Return the launch of a request.

    Raises
    ------
    ArgumentTypeError
        The library cannot do it; the text gives the reason and a remedy.
    """
    reduced = None
    if request.op is not None:
        name, version = library.vendor.name, library.version
        reduced = reduction(request.op, request.data.dtype, name, version, place.world_size)
    maker = row_of(MAKERS, request.collective, f"through {library.vendor.name}")
    made = maker(request, place, library, reduced)
    if reduced is not None and reduced.factor is not None:
        made = made._replace(factor=(reduced.factor, reduced.type))
    return made


def put_together(composed: Composed, place: Place, library: Library) -> Launch:
    """Return the launch of a composed call, made of other calls and of kernels."""

    def made(scratch: int, stream: int) -> Iterator[Phase]:
        for step in composed.steps(scratch, stream):
            if isinstance(step, Request):
                yield from launch_of(step, place, library).phases(0, stream)
            else:
                yield Phase((), (step,))

    @functools.lru_cache(maxsize=1)
    def phases(scratch: int, stream: int) -> tuple[Phase, ...]:
        return tuple(made(scratch, stream))  # those of a plan hardly ever change

    return Launch(phases, composed.scratch_bytes)


_Maker = Callable[[Request, Place, Library, Reduction | None], Launch]


# --- the same shape on every rank, of one array or a list -----------------------------------------


def _all_reduce(request: Request, _: Place, library: Library, reduced: Reduction | None) -> Launch:
    assert reduced is not None
    type_, operation = reduced.arguments
    return plain(
        *(
            ("ncclAllReduce", (x.address, out.address, x.count * reduced.parts, type_, operation))
            for x, out in request.pairs
            if out is not None and x.count
        )
    )


def _reduce(request: Request, place: Place, _: Library, reduced: Reduction | None) -> Launch:
    assert reduced is not None
    type_, operation = reduced.arguments
    is_root = place.rank == request.root
    return plain(
        *(
            (
                "ncclReduce",
                (
                    x.address,
                    out.address if is_root and out is not None else None,
                    x.count * reduced.parts,
                    type_,
                    operation,
                    request.root,
                ),
            )
            for x, out in request.pairs
            if x.count
        )
    )


def _broadcast(request: Request, place: Place, _: Library, __: Reduction | None) -> Launch:
    is_root = place.rank == request.root
    return plain(
        *(
            _broadcast_call(x.address if is_root else out.address, out, request.root)
            for x, out in request.pairs
            if out is not None and x.size_bytes
        )
    )


def _broadcast_call(source: int, out: Buffer, root: int) -> _Call:
    return "ncclBroadcast", (source, out.address, out.size_bytes, BYTES, root)


# --- blocks ---------------------------------------------------------------------------------------


def _all_gather(request: Request, place: Place, _: Library, __: Reduction | None) -> Launch:
    x, out = request.both
    if request.counts is None:
        if not x.size_bytes:
            return plain()
        return plain(("ncclAllGather", (x.address, out.address, x.size_bytes, BYTES)))
    starts = request.edges(0, place.world_size)
    calls = []
    for rank in range(place.world_size):
        size_bytes = starts[rank + 1] - starts[rank]
        to = out.address + starts[rank]
        source = x.address if rank == place.rank else to
        if size_bytes:
            calls.append(("ncclBroadcast", (source, to, size_bytes, BYTES, rank)))
    return plain(*calls)


def _reduce_scatter(
    request: Request, place: Place, _: Library, reduced: Reduction | None
) -> Launch:
    x, out = request.both
    assert reduced is not None
    type_, operation = reduced.arguments
    if request.counts is None:
        if not out.count:
            return plain()
        count = out.count * reduced.parts
        return plain(("ncclReduceScatter", (x.address, out.address, count, type_, operation)))
    starts = request.edges(0, place.world_size)
    calls = []
    for rank in range(place.world_size):
        size_bytes = starts[rank + 1] - starts[rank]
        to = out.address if rank == place.rank else None
        count = size_bytes // x.item_bytes * reduced.parts
        if count:
            arguments = (x.address + starts[rank], to, count, type_, operation, rank)
            calls.append(("ncclReduce", arguments))
    return plain(*calls)


def _gather(request: Request, place: Place, library: Library, _: Reduction | None) -> Launch:
    x, out, root = request.source, request.destination, request.root
    assert x is not None
    if request.counts is None and library.has("ncclGather"):
        if not x.size_bytes:
            return plain()
        # Only the root uses it, but NCCL can be configured to check it everywhere.
        to = x.address if out is None else out.address
        return plain(("ncclGather", (x.address, to, x.size_bytes, BYTES, root)))
    if out is None:
        return _exchange(_send(x.address, x.size_bytes, root))
    starts = request.edges(x.size_bytes, place.world_size)
    received = (
        _receive(out.address + starts[rank], starts[rank + 1] - starts[rank], rank)
        for rank in range(place.world_size)
        if rank != root
    )
    return _exchange(*received, own=_own(out.address + starts[root], x.address, x.size_bytes))


def _scatter(request: Request, place: Place, library: Library, _: Reduction | None) -> Launch:
    x, out, root = request.source, request.destination, request.root
    assert out is not None
    if request.counts is None and library.has("ncclScatter"):
        if not out.size_bytes:
            return plain()
        source = out.address if x is None else x.address
        return plain(("ncclScatter", (source, out.address, out.size_bytes, BYTES, root)))
    if x is None:
        return _exchange(_receive(out.address, out.size_bytes, root))
    starts = request.edges(out.size_bytes, place.world_size)
    sent = (
        _send(x.address + starts[rank], starts[rank + 1] - starts[rank], rank)
        for rank in range(place.world_size)
        if rank != root
    )
    return _exchange(*sent, own=_own(out.address, x.address + starts[root], out.size_bytes))


def _all_to_all(request: Request, place: Place, library: Library, _: Reduction | None) -> Launch:
    x, out = request.both
    block_bytes = x.size_bytes // place.world_size
    sent = received = request.edges(block_bytes, place.world_size)
    if request.receive_counts is not None:
        received = request._replace(counts=request.receive_counts).edges(0, place.world_size)
    is_native = request.counts is None and library.has("ncclAlltoAll")
    size_bytes, is_in_place = x.size_bytes, x.address == out.address and x.size_bytes > 0

    def phases(scratch: int, _: int) -> Iterator[Phase]:
        source = scratch if is_in_place else x.address
        before = (Copy(scratch, x.address, size_bytes),) if is_in_place else ()
        if is_native:
            arguments = (source, out.address, block_bytes, BYTES)
            calls: tuple[_Call, ...] = (("ncclAlltoAll", arguments),) if block_bytes else ()
            yield Phase(calls, before)
            return
        pairs = _pairs(source, sent, out.address, received, place)
        me = place.rank
        own = _own(out.address + received[me], source + sent[me], sent[me + 1] - sent[me])
        yield Phase(tuple(pairs), (*before, *own))

    return Launch(phases, size_bytes if is_in_place else 0)


def _pairs(
    source: int, sent: list[int], destination: int, received: list[int], place: Place
) -> Iterator[_Call]:
    """Yield a send to and a receive from each other rank, beginning with the next rank."""
    for step in range(1, place.world_size):
        to, of = (place.rank + step) % place.world_size, (place.rank - step) % place.world_size
        yield from _send(source + sent[to], sent[to + 1] - sent[to], to)
        yield from _receive(destination + received[of], received[of + 1] - received[of], of)


def _send(address: int, size_bytes: int, peer: int) -> tuple[_Call, ...]:
    return (("ncclSend", (address, size_bytes, BYTES, peer)),) if size_bytes else ()


def _receive(address: int, size_bytes: int, peer: int) -> tuple[_Call, ...]:
    return (("ncclRecv", (address, size_bytes, BYTES, peer)),) if size_bytes else ()


def _own(destination: int, source: int, size_bytes: int) -> tuple[Copy, ...]:
    """Return the copy of the block that a rank sends to itself; none if it is in place."""
    return (Copy(destination, source, size_bytes),) if size_bytes and destination != source else ()


def _exchange(*calls: tuple[_Call, ...], own: tuple[Copy, ...] = ()) -> Launch:
    phases = (Phase(tuple(call for group in calls for call in group), own),)
    return Launch(lambda *_: phases)


MAKERS: dict[Collective, _Maker] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _all_gather,
    Collective.GATHER: _gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
