"""Reductions of GPU arrays between hosts: through shared memory inside, around rings between.

The ranks of a host divide the array. Each combines its share of their arrays through the GPU memory
that they share, and then goes around a ring with the ranks that have the same share on the other
hosts. At last the ranks of a host collect the shares. So each byte leaves a host as often as in a
ring of hosts, over as many connections as a host has rings, and only GPUs reduce.

All hosts have as many rings as the smallest of them has ranks; further ranks have empty shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpucoll.algorithms.shares import edges_of, equal_edges, pieces, sizes_of
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct import peer_memory
from gpucoll.backends.direct.inner import Inner, meet, new_token, tell
from gpucoll.backends.direct.messages import MessageEngine
from gpucoll.backends.direct.peer import PeerLaunch, PeerPath, buffer_at, may_go_around
from gpucoll.backends.direct.rounds import ALIGNMENT_BYTES, Part, segments_of
from gpucoll.backends.direct.wires import Wires
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.rank_order import SCRATCH_BYTES
from gpucoll.backends.gpu.steps import Copy, Run
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.devices import Device
from gpucoll.errors import BackendUnavailableError, GpucollError
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.types import ReduceOp

LEAST_BYTES: Final = 1 << 20
"""Smaller reductions are staged in one piece: they wait for fewer hand-overs between threads."""
MOST_HOSTS: Final = 64
"""A ring of more hosts waits for longer than its bytes take."""
CLOSING_S: Final = 1.0
"""How long memory that no call has used waits for other ranks to let go of it."""


@dataclass(frozen=True)
class Layout:
    """Where the ranks are.

    Attributes
    ----------
    rank : int
        This rank.
    hosts : sequence of sequences of int
        The ranks of each host.
    """

    rank: int
    hosts: Sequence[Sequence[int]]

    @property
    def mates(self) -> Sequence[int]:
        """The ranks of this host."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def place(self) -> int:
        """This rank's place among the ranks of its host."""
        return self.mates.index(self.rank)

    @property
    def n_rings(self) -> int:
        """The number of rings between the hosts."""
        return min(map(len, self.hosts))

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks of this rank's ring; empty if it is in none."""
        if self.place >= self.n_rings:
            return ()
        return tuple(ranks[self.place] for ranks in self.hosts)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    def shares(self, count: int, unit: int) -> list[int]:
        """Return how many of `count` elements each rank of this host takes around its ring.

        Shares begin at multiples of `unit`. Ranks without a ring have none.
        """
        sizes = sizes_of(equal_edges(count, self.n_rings, unit))
        return sizes + [0] * (len(self.mates) - self.n_rings)


class BetweenHosts:
    """One rank's reductions between hosts.

    Parameters
    ----------
    layout : Layout
        Where the ranks are.
    inside : PeerPath or None
        Through memory that this host's ranks share; None: it has one rank.
    wires : PeerPath or None
        Around this rank's ring; None: it is in none.
    keeps_order : bool
        Whether reductions that depend on the order combine the ranks in theirs, and go another way.
    """

    def __init__(
        self, layout: Layout, inside: PeerPath | None, wires: PeerPath | None, *, keeps_order: bool
    ) -> None:
        self.layout, self.inside, self.wires = layout, inside, wires
        self.keeps_order = keeps_order

    @property
    def paths(self) -> list[PeerPath]:
        """What has streams that may wait, and memory."""
        return [path for path in (self.inside, self.wires) if path is not None]

    def describe(self) -> dict[str, str]:
        """Return facts about this path for the user: name -> sentence."""
        layout, within = self.layout, ""
        if self.inside is not None:
            within = f"; inside this host through shared GPU memory, {self.inside.memory.schedule}"
        return {
            "GPU path between hosts": f"reductions from {LEAST_BYTES} bytes on by the GPUs, "
            f"around {layout.n_rings} ring(s) of {len(layout.hosts)} hosts, in chunks through "
            f"page-locked host memory{within}; all else staged",
            "GPU: same bits as the CPU backend": f"yes, of less than {LEAST_BYTES} bytes",
        }

    def compose(self, request: Request) -> Composed | None:
        """Return the steps of a reduction; None, on all ranks alike, if it goes another way."""
        op, maker = request.op, _MAKERS.get(request.collective)
        if op is None or op.function is not None or maker is None:
            return None
        if request.sources or request.destinations:
            return None
        if self.keeps_order and op.depends_on_order(request.data.dtype):
            return None
        if not may_go_around(op, request.data.dtype):
            return None
        if sum(x.size_bytes for x, _ in request.pairs) < LEAST_BYTES:
            return None
        self.try_kernels(op, request.data)
        return maker(self.call(op, request.data), request)

    def try_kernels(self, op: ReduceOp, like: Buffer) -> None:
        """Compile and run kernels before any rank waits for them."""
        for path in self.paths:
            path.try_kernel(op, like)

    def call(self, op: ReduceOp, like: Buffer) -> Call:
        """Return the values that all steps of a call share."""
        return Call(self, op, like)

    def sum(self, call: Call, source: int, target: int, count: int) -> Iterator[Any]:
        """Yield what reduces `count` elements over all ranks, from one address to another."""
        layout = self.layout
        sizes = layout.shares(count, max(ALIGNMENT_BYTES // call.like.item_bytes, 1))
        mine, at = sizes[layout.place], edges_of(sizes)[layout.place]
        share = call.memory(target + at * call.like.item_bytes, mine)
        yield from self.inside_sum(call, source, share, count, sizes)
        given = call.memory(source, count) if self.inside is None else share
        yield from self.around(call, Collective.ALL_REDUCE, given, share)
        yield from self.inside_gather(call, share, target, count, sizes)

    def inside_sum(
        self, call: Call, source: int, share: Buffer, count: int, sizes: Sequence[int]
    ) -> Iterator[Any]:
        """Yield what reduces this rank's share over its host; nothing if it is alone there."""
        if self.inside is not None:
            given = call.memory(source, count)
            yield call.on(self.inside, Collective.REDUCE_SCATTER, given, share, sizes)

    def inside_gather(
        self, call: Call, share: Buffer, target: int, count: int, sizes: Sequence[int]
    ) -> Iterator[Any]:
        """Yield what collects the shares of this host's ranks; nothing if there is one."""
        if self.inside is not None:
            whole = call.memory(target, count)
            yield call.on(self.inside, Collective.ALL_GATHER, share, whole, sizes)

    def around(
        self,
        call: Call,
        collective: Collective,
        given: Buffer,
        to: Buffer,
        counts: Sequence[int] | None = None,
    ) -> Iterator[Any]:
        """Yield what reduces this host's share around the ring, and completes an average."""
        if self.wires and given.count:
            is_scaled = self.inside is not None
            yield call.on(self.wires, collective, given, to, counts, is_scaled=is_scaled)
        yield from self.averaged(call, to)

    def averaged(self, call: Call, to: Buffer) -> Iterator[Run]:
        """Yield what divides the sums of an average; nothing for another operation."""
        if call.op.name == "avg" and to.count:
            yield Run(prepare_reduce(call.op, [to], [to], divisor=self.layout.world_size))


@dataclass(frozen=True)
class Call:
    """Values that all steps of a call share."""

    hosts: BetweenHosts
    op: ReduceOp
    like: Buffer

    def memory(self, address: int, count: int) -> Buffer:
        return buffer_at(address, count, self.like)

    def on(
        self,
        path: PeerPath,
        collective: Collective,
        given: Buffer,
        to: Buffer,
        counts: Sequence[int] | None,
        *,
        is_scaled: bool = False,
    ) -> PeerLaunch:
        """Return a call on one path. Averages are divided at the end, elements scaled once."""
        op = None if collective is Collective.ALL_GATHER else self.op
        if op is not None and (op.name == "avg" or (is_scaled and op.name == "scaled_sum")):
            op = ReduceOp.SUM
        known = None if counts is None else tuple(counts)
        made = path.prepare(Request(collective, given, to, op=op, counts=known))
        assert made is not None
        return made


def _all_reduce(call: Call, request: Request) -> Composed:
    x, out = request.both
    return Composed(lambda *_: call.hosts.sum(call, x.address, out.address, x.count), 0)


def _in_scratch(call: Call, request: Request) -> Composed:
    """Arrays of a list together, and those of ranks that get no result."""
    item_bytes = call.like.item_bytes
    parts = [Part(x.address, out.address if out else 0, x.count) for x, out in request.pairs]
    if not request.collective.gets(call.hosts.layout.rank, request.root):
        parts = [part._replace(destination=0) for part in parts]
    laps = list(segments_of(parts, item_bytes, SCRATCH_BYTES))
    ends = [lap[-1].offset + lap[-1].n_elements * item_bytes for lap in laps]

    def steps(scratch: int, _: int) -> Iterator[Any]:
        for lap, end in zip(laps, ends, strict=True):
            for each in lap:
                yield Copy(scratch + each.offset, each.source, each.n_elements * item_bytes)
            yield from call.hosts.sum(call, scratch, scratch, end // item_bytes)
            for each in lap:
                if each.destination:
                    size_bytes = each.n_elements * item_bytes
                    yield Copy(each.destination, scratch + each.offset, size_bytes)

    return Composed(steps, max(ends, default=0))


def _reduce_scatter(call: Call, request: Request) -> Composed:
    (x, out), layout = request.both, call.hosts.layout
    item_bytes, is_even = call.like.item_bytes, len({*map(len, layout.hosts)}) == 1
    edges = [edge // item_bytes for edge in request.edges(out.size_bytes, layout.world_size)]
    sizes = sizes_of(edges)
    if is_even and call.hosts.inside is None:  # the blocks lie in the order of the ring
        around = call.hosts.around
        return Composed(lambda *_: around(call, Collective.REDUCE_SCATTER, x, out, sizes), 0)
    order = list(range(layout.world_size))
    if is_even:  # the blocks of a ring's ranks side by side
        order = [rank for ranks in zip(*layout.hosts, strict=True) for rank in ranks]
    most = max(SCRATCH_BYTES // item_bytes // layout.world_size, 1)

    def steps(scratch: int, _: int) -> Iterator[Any]:
        for start, longest in pieces(max(sizes), most):
            counts = [max(min(longest, size - start), 0) for size in sizes]
            places = edges_of([counts[rank] * item_bytes for rank in order])
            for rank, at in zip(order, places, strict=False):
                if counts[rank]:
                    block = x.address + (edges[rank] + start) * item_bytes
                    yield Copy(scratch + at, block, counts[rank] * item_bytes)
            to = call.memory(out.address + start * item_bytes, counts[layout.rank])
            if is_even:
                yield from _scattered(call, scratch, counts, to)
                continue
            yield from call.hosts.sum(call, scratch, scratch, sum(counts))
            if to.count:
                yield Copy(to.address, scratch + places[layout.rank], to.size_bytes)

    return Composed(steps, min(x.size_bytes, most * layout.world_size * item_bytes))


def _scattered(call: Call, scratch: int, counts: Sequence[int], to: Buffer) -> Iterator[Any]:
    """Yield what reduces the blocks in the scratch memory, the rings' one after the other."""
    layout, local = call.hosts.layout, call.hosts.inside
    rings = [[counts[rank] for rank in ranks] for ranks in zip(*layout.hosts, strict=True)]
    sizes = [sum(ring) for ring in rings]
    at = edges_of(sizes)[layout.place] * call.like.item_bytes
    share = call.memory(scratch + at, sizes[layout.place])
    assert local is not None
    whole = call.memory(scratch, sum(sizes))
    yield call.on(local, Collective.REDUCE_SCATTER, whole, share, sizes)
    around = call.hosts.around
    yield from around(call, Collective.REDUCE_SCATTER, share, to, rings[layout.place])


_MAKERS = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _in_scratch,
    Collective.REDUCE: _in_scratch,
    Collective.REDUCE_SCATTER: _reduce_scatter,
}


# --- connecting -----------------------------------------------------------------------------------


def connect(
    device: Device,
    inner: Inner,
    engine: MessageEngine,
    schedule: str,
    hosts: Sequence[int],
    timeout_s: float | None,
) -> BetweenHosts:
    """Connect the ranks of several hosts; every rank calls it.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    inner : Inner
        The group of all ranks.
    engine : MessageEngine
        Moves chunks between hosts.
    schedule : {"auto", "shares", "ring"}
        The wish for the way inside a host.
    hosts : sequence of int
        The host of each rank.
    timeout_s : float or None
        Time limit.

    Raises
    ------
    BackendUnavailableError
        It is not possible; all ranks raise the same reason. Nothing is left behind.
    """
    group, distribute = inner.group, tell(inner.channel, timeout_s)
    layout = Layout(
        group.rank,
        [[r for r, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)],
    )
    if len(layout.hosts) > MOST_HOSTS:
        raise BackendUnavailableError(f"{len(layout.hosts)} hosts: rings have {MOST_HOSTS} at most")
    tokens = [each.decode() for each in distribute(new_token().encode())]
    mates = meet(group, inner.channel, layout.mates, tokens[layout.mates[0]], timeout_s)
    assert mates is not None
    paths: list[PeerPath | None] = [None, None]
    try:
        problem = ""
        try:
            if len(layout.mates) > 1:
                place, within = (layout.place, len(layout.mates)), tell(mates.channel, timeout_s)
                memory = peer_memory.connect(device, *place, within, wish=schedule)
                paths[0] = PeerPath(memory, group.keeps_order)
            if layout.ring:
                paths[1] = PeerPath(Wires(device, inner, engine, layout.ring))
        except (MemoryError, GpucollError) as error:
            problem = str(error)
        problems = [each.decode() for each in distribute(problem.encode())]
        for rank, text in enumerate(problems):
            if text:
                raise BackendUnavailableError(f"rank {rank}: {text}")
    except BaseException:
        for path in filter(None, paths):
            path.close(CLOSING_S)
        raise
    finally:
        mates.close()
    return BetweenHosts(layout, *paths, keeps_order=group.keeps_order)
