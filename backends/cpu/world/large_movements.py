"""Movements of large arrays between hosts: through the leaders, only to those who need the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gpucoll.algorithms import choice, pairwise
from gpucoll.algorithms.table import Algorithm, named
from gpucoll.backends.cpu.world.phases import LEADER, Bytes, Run, cut, joined
from gpucoll.backends.cpu.world.sizes import (
    block_sizes,
    host_edges,
    in_host_order,
    pieces_of,
    sections_of,
)
from gpucoll.collectives import Collective
from gpucoll.group.world.schedules import Section
from gpucoll.transport.tcp.streams import ALL

_NOTHING: Final = np.empty(0, np.uint8)


def _broadcast(run: Run) -> None:
    run.agree()
    root, output = run.request.root, run.output()
    is_here, leads = root in run.here, run.here[0] == root
    mine = run.input() if run.group.rank == root else output
    pieces = pieces_of(output.size, 1)
    moving = run.begin(
        choice.choose(Collective.BROADCAST, output.size, run.hosts.count).function,
        sections_of(pieces, 1, 1),
        output.ctypes.data,
        root=root,
        ready=0 if is_here else ALL,
    )
    for number, piece in enumerate(pieces):
        if not is_here:
            moving.finish_sections(number + 1)
        elif mine.ctypes.data != output.ctypes.data:
            output[piece] = mine[piece]
        if leads:
            moving.let(number + 1)
        run.spread(output[piece], run.hosts.place_of(root) if is_here else LEADER)
        if is_here:
            moving.let(number + 1)
    moving.finish()


def _all_gather(run: Run) -> None:
    run.agree()
    mine, output = run.input(), run.output()
    sizes = block_sizes(run.request, run.group.world_size, mine.size * run.group.world_size)
    edges, here, count = host_edges(run, sizes), run.group.here, run.hosts.count
    work = None
    if run.leads:
        work = output if run.hosts.is_in_order else np.empty(edges[-1], np.uint8)
    own = None if work is None else work[edges[here] : edges[here + 1]]
    run.gather_into(own, mine, [sizes[rank] for rank in run.here])
    algorithm = choice.choose(Collective.ALL_GATHER, edges[-1], count)
    work = output if work is None else work
    moving = run.begin(algorithm.function, [Section.of(edges)], work.ctypes.data)
    moving.let(ALL)
    if algorithm.name == "ring" and run.hosts.is_in_order:
        for step in range(count):  # what a step brings is spread during the next step
            if step > 0:
                moving.finish(step)
            block = (here - step) % count
            run.spread(output[edges[block] : edges[block + 1]])
            moving.let(ALL)
        moving.finish()
    else:
        moving.finish()
        if run.leads:
            _write_in_rank_order(run, work, output, sizes)
        run.spread(output)
    run.put(output)


def _write_in_rank_order(run: Run, work: Bytes, output: Bytes, sizes: Sequence[int]) -> None:
    """Write data that is ordered by host into a result that is ordered by rank."""
    if work.ctypes.data == output.ctypes.data:
        return
    order = run.hosts.order
    blocks = dict(zip(order, cut(work, [sizes[rank] for rank in order]), strict=True))
    at = 0
    for rank, size in enumerate(sizes):
        output[at : at + size] = blocks[rank]
        at += size


def _own_edges(run: Run, edges: Sequence[int]) -> list[int]:
    """Return the edges of a working buffer that only has this host's block."""
    here = run.group.here
    size = edges[here + 1] - edges[here]
    return [0 if host <= here else size for host in range(len(edges))]


def _gather(run: Run) -> None:
    run.agree()
    root, mine = run.request.root, run.input()
    sizes = block_sizes(run.request, run.group.world_size, mine.size * run.group.world_size)
    edges, here = host_edges(run, sizes), run.group.here
    is_here, is_root = root in run.here, run.group.rank == root
    algorithm = choice.choose(Collective.GATHER, edges[-1], run.hosts.count)
    output = run.output() if is_root else _NOTHING
    own = work = None
    if run.leads:
        if not is_here and algorithm.name == "direct":  # no other host's blocks pass through here
            edges = _own_edges(run, edges)
        is_place = is_root and run.hosts.is_in_order
        work = output if is_place else np.empty(edges[-1], np.uint8)
        own = work[edges[here] : edges[here + 1]]
    run.gather_into(own, mine, [sizes[rank] for rank in run.here])
    if work is not None:
        run.transfer(algorithm.function, edges, work, root=root)
    if not is_here:
        return
    if run.here[0] == root:
        if work is not None:
            _write_in_rank_order(run, work, output, sizes)
    else:
        parts = None
        if work is not None:
            parts = [np.empty(work.size, np.uint8)]
            _write_in_rank_order(run, work, parts[0], sizes)
        run.scatter(parts, output, [sum(sizes) if rank == root else 0 for rank in run.here])
    if is_root:
        run.put(output)


def _scatter(run: Run) -> None:
    run.agree()
    root, is_root = run.request.root, run.group.rank == run.request.root
    mine = run.input() if is_root else _NOTHING
    output = run.output()
    sizes = block_sizes(run.request, run.group.world_size, _whole_bytes(run, mine, output))
    edges, here = host_edges(run, sizes), run.group.here
    whole = mine
    if root in run.here and run.here[0] != root:
        found = run.gather(mine, [sum(sizes) if rank == root else 0 for rank in run.here])
        whole = joined(found)
    parts = None
    if run.leads:
        algorithm = choice.choose(Collective.SCATTER, edges[-1], run.hosts.count)
        if root in run.here:
            work = in_host_order(run, whole, sizes)
        else:
            if algorithm.name == "direct":
                edges = _own_edges(run, edges)
            work = np.empty(edges[-1], np.uint8)
        run.transfer(algorithm.function, edges, work, root=root)
        own = work[edges[here] : edges[here + 1]]
        parts = cut(own, [sizes[rank] for rank in run.here])
    run.scatter(parts, output, [sizes[rank] for rank in run.here])


def _whole_bytes(run: Run, mine: Bytes, output: Bytes) -> int:
    """Return the size of a scatter's input, which only its root has."""
    return mine.size if run.group.rank == run.request.root else output.size * run.group.world_size


# --- from all to all ------------------------------------------------------------------------------


def all_to_all(run: Run, everyone: Sequence[Sequence[int]]) -> None:
    """Exchange blocks of these sizes, by sender and receiver, after all ranks have agreed."""
    mine, output = run.input(), run.output()
    algorithm = _choose_all_to_all(run, everyone)
    is_straight = run.hosts.count == run.group.world_size and algorithm.name == "pairwise"
    if is_straight and not np.may_share_memory(mine, output):
        _exchange_straight(run, mine, output, everyone)
        run.put(output)
        return
    sent = [everyone[rank] for rank in run.here]
    wholes = run.gather(mine, [sum(sizes) for sizes in sent])
    parts = None
    if run.leads:
        blocks = [cut(whole, sizes) for whole, sizes in zip(wholes, sent, strict=True)]
        parts = _exchange(run, algorithm, blocks, everyone)
    received = [sum(sizes[rank] for sizes in everyone) for rank in run.here]
    run.scatter(parts, output, received)
    run.put(output)


def _choose_all_to_all(run: Run, everyone: Sequence[Sequence[int]]) -> Algorithm:
    """Return the algorithm for blocks of these sizes, which may differ between hosts."""
    ranks = run.hosts.ranks
    sizes = {
        sum(everyone[sender][receiver] for sender in senders for receiver in receivers)
        for senders in ranks
        for receivers in ranks
    }
    if len(sizes) > 1:
        return named(Collective.ALL_TO_ALL, "pairwise")
    return choice.choose(Collective.ALL_TO_ALL, sizes.pop() * len(ranks), len(ranks))


def _exchange_straight(
    run: Run, mine: Bytes, output: Bytes, everyone: Sequence[Sequence[int]]
) -> None:
    """Exchange blocks between ranks that are each the only rank of their host."""
    rank, count = run.group.rank, run.group.world_size
    leaving, coming = everyone[rank], [sizes[rank] for sizes in everyone]
    first = min(mine.ctypes.data, output.ctypes.data)
    outgoing = itertools.accumulate(leaving[:-1], initial=mine.ctypes.data - first)
    incoming = itertools.accumulate(coming[:-1], initial=output.ctypes.data - first)
    section = Section((*outgoing, *incoming), (*leaving, *coming), (0,) * (2 * count))
    moving = run.begin(pairwise.all_to_all, [section], first, is_one_step=True)
    moving.let(ALL)
    at, to, size = section.starts[rank], section.starts[count + rank], leaving[rank]
    at, to = at + first - mine.ctypes.data, to + first - output.ctypes.data
    output[to : to + size] = mine[at : at + size]
    moving.finish()


def _exchange(
    run: Run, algorithm: Algorithm, blocks: list[list[Bytes]], everyone: Sequence[Sequence[int]]
) -> list[Bytes]:
    """Return the blocks for each rank here, given the blocks that each rank here sends."""
    hosts, here, count = run.hosts, run.group.here, run.hosts.count
    leaving = [
        [mine[receiver] for mine in blocks for receiver in hosts.ranks[host]]
        for host in range(count)
    ]
    coming = [
        [everyone[sender][receiver] for sender in hosts.ranks[host] for receiver in run.here]
        for host in range(count)
    ]
    numbering = algorithm.numbering
    assert numbering is not None
    outgoing = [numbering.outgoing(here, count, host) for host in range(count)]
    incoming = [numbering.incoming(here, count, host) for host in range(count)]
    of_blocks = [0] * (2 * count)  # blocks in which nothing begins or ends are as large as all
    for host in range(count):
        of_blocks[outgoing[host]] = sum(piece.size for piece in leaving[host])
        of_blocks[incoming[host]] = sum(coming[host])
    if algorithm.equal_blocks:
        of_blocks = [max(of_blocks)] * (2 * count)
    edges = [0, *itertools.accumulate(of_blocks)]
    work = np.empty(edges[-1], np.uint8)
    places = cut(work, of_blocks)
    for host, pieces in enumerate(leaving):
        np.concatenate([*pieces, _NOTHING], out=places[outgoing[host]])
    if outgoing[here] != incoming[here]:
        places[incoming[here]][:] = places[outgoing[here]]
    run.transfer(algorithm.function, edges, work)
    came: dict[int, list[Bytes]] = {}
    for host, sizes in enumerate(coming):
        pieces = cut(places[incoming[host]], sizes)
        n_here = len(run.here)
        for place, sender in enumerate(hosts.ranks[host]):
            came[sender] = pieces[place * n_here : (place + 1) * n_here]
    return [
        joined([came[sender][place] for sender in range(run.group.world_size)])
        for place in range(len(run.here))
    ]


def _all_to_all(run: Run) -> None:
    run.agree()
    data, n_ranks = run.request.data, run.group.world_size
    all_to_all(run, [block_sizes(run.request, run.group.world_size, data.size_bytes)] * n_ranks)


LARGE_MOVEMENTS: dict[Collective, Callable[[Run], None]] = {
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _all_gather,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
}
