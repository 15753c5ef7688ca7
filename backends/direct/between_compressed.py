"""A compressed all_reduce of GPU arrays between hosts whose ranks share GPU memory.

The ranks of a host add their arrays up first, uncompressed: each its share, through shared memory.
Only the sums are quantised, by the steps of `gpucoll.backends.gpu.compressed` among the ranks with
the same share on all hosts. So the bytes that leave a host are those of a ring of hosts, however
many ranks it has, and each element is rounded twice, as ever. The residual of a share is kept by
the rank that has quantised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gpucoll.algorithms.shares import edges_of
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.compressed import FLOAT_BYTES, plan_of
from gpucoll.backends.direct.between import LEAST_BYTES, BetweenHosts, Layout
from gpucoll.backends.direct.peer import buffer_at
from gpucoll.backends.gpu import compressed
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Copy, Fill, Place, Run, on_its_stream
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.collectives import Collective
from gpucoll.compression import Compression
from gpucoll.kernels.block_message import BLOCK
from gpucoll.kernels.gpu import pack
from gpucoll.kernels.gpu.pack import prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.transport.shared.words import Kind
from gpucoll.types import ReduceOp

_FAR_ADDRESS = 1 << 20
"""Stands in for an address of memory while kernels are only compiled and loaded."""


class Exchanged(NamedTuple):
    """Blocks that are sent and received within a call, as messages."""

    requests: tuple[MessageRequest, ...]


def compose(hosts: BetweenHosts, request: Request, device: str) -> Composed | None:
    """Return the steps of a compressed all_reduce; None, on all ranks alike, if it goes otherwise.

    Parameters
    ----------
    hosts : BetweenHosts
    request : Request
        With `parts` and `compression`.
    device : str
        The GPU: ``"cuda:0"``.

    Raises
    ------
    ArgumentTypeError
        No kernels exist for it: see `gpucoll.backends.gpu.compressed.compose`.
    """
    layout, op = hosts.layout, request.op
    plan = plan_of(request, layout.rank, layout.world_size)
    count, residuals = plan.count, request.residuals
    if max(map(len, layout.hosts)) == 1 or FLOAT_BYTES * count < LEAST_BYTES:
        return None
    assert op is not None
    assert request.compression is not None
    # A host's sum may be beyond float16's range although no input, and not the result, is.
    if hosts.keeps_order or request.compression.wire_format == "float16":
        return None
    compressed.check(request, Place(0, len(layout.hosts)))
    data = replace(request.data, dtype="float32", item_bytes=FLOAT_BYTES, owner=None, device=device)
    hosts.try_kernels(op, data)
    xs, outs = [x for x, _ in request.parts], [out for _, out in request.parts]
    pack.load_kernels(data, {x.dtype for x in xs}, "float32")
    pack.load_kernels(data)
    call = hosts.call(op, data)
    # Shares of whole blocks, so that a scale belongs to one share.
    sizes = layout.shares(count, BLOCK)
    mine, start = sizes[layout.place], edges_of(sizes)[layout.place]
    is_moved = plan.is_fused or bool(residuals)
    fused_bytes = -(-FLOAT_BYTES * count // (FLOAT_BYTES * BLOCK)) * FLOAT_BYTES * BLOCK

    among = partial(_among_hosts, layout, request.compression, device)
    some = call.memory(_FAR_ADDRESS, max(mine, 1))
    inner_bytes = among(some, some, some if residuals else None).scratch_bytes if mine else 0

    def steps(scratch: int, stream: int) -> Iterator[Any]:
        floats = scratch if is_moved else outs[0].address
        source = scratch if is_moved else xs[0].address
        kept = scratch + fused_bytes if residuals else 0
        inner = scratch + is_moved * fused_bytes + bool(residuals) * fused_bytes

        def move(prepare: Callable[..., Callable[[], None]], arrays: Any, to: int) -> Run:
            whole = call.memory(to, count)
            return on_its_stream(
                prepare(arrays, whole, plan.offsets, dtype="float32", stream=stream)
            )

        if is_moved:
            yield move(prepare_pack, xs, floats)
        if residuals:
            yield move(prepare_pack, residuals, kept)
            whole, carried = call.memory(floats, count), call.memory(kept, count)
            yield Run(prepare_reduce("sum", [whole], [whole, carried]))
            yield Fill(kept, bytes(FLOAT_BYTES), count)
        share = call.memory(floats + FLOAT_BYTES * start, mine)
        yield from hosts.inside_sum(call, source, share, count, sizes)
        if mine:
            lost = call.memory(kept + FLOAT_BYTES * start, mine) if residuals else None
            given = call.memory(source, count) if hosts.inside is None else share
            for step in among(given, share, lost).steps(inner, stream):
                yield from _sent(hosts, step)
            yield from hosts.averaged(call, share)
        yield from hosts.inside_gather(call, share, floats, count, sizes)
        if is_moved:
            yield move(prepare_unpack, outs, floats)
        if residuals:
            yield move(prepare_unpack, residuals, kept)

    return Composed(steps, (is_moved + bool(residuals)) * fused_bytes + inner_bytes)


def _among_hosts(
    layout: Layout,
    compression: Compression,
    device: str,
    given: Buffer,
    share: Buffer,
    lost: Buffer | None,
) -> Composed:
    """Return the steps of the compressed all_reduce of a share among this rank's ring."""
    if compression.seed is not None:  # other random bits on each ring
        seed = (compression.seed + (layout.place << 32)) % (1 << 64)
        compression = replace(compression, seed=seed)
    request = Request(
        Collective.ALL_REDUCE,
        given,
        share,
        ReduceOp.SUM,
        parts=((given, share),),
        compression=compression,
        residuals=() if lost is None else (lost,),
    )
    place = Place(layout.ring.index(layout.rank), len(layout.ring))
    return compressed.compose(request, place, device)


def _sent(hosts: BetweenHosts, step: Any) -> Iterator[Any]:
    """Yield what moves bytes between hosts, in place of a request; other steps as they are."""
    if not isinstance(step, Request):
        yield step
    elif step.collective is Collective.ALL_GATHER:
        assert hosts.wires is not None
        yield hosts.wires.prepare(step)
    else:
        (x, out), ring = step.both, hosts.layout.ring
        size = x.size_bytes // len(ring)
        requests = []
        for place, rank in enumerate(ring):
            given, to = (buffer_at(each.address + place * size, size, each) for each in (x, out))
            if rank == hosts.layout.rank:
                yield Copy(to.address, given.address, size)
                continue
            requests.append(MessageRequest(Kind.SEND, rank, 0, given))
            requests.append(MessageRequest(Kind.RECV, rank, 0, to))
        yield Exchanged(tuple(requests))
