"""Movements between hosts: blocks go to the leader, to the other leaders, and to their ranks.

A leader gets the blocks of all ranks by host and place; the ranks get them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from gpucoll.backends.cpu.world.large_movements import all_to_all
from gpucoll.backends.cpu.world.phases import Bytes, Run, cut, joined
from gpucoll.backends.cpu.world.reductions import combine
from gpucoll.backends.cpu.world.sizes import LARGE_BYTES, block_sizes, is_sealed
from gpucoll.collectives import Collective
from gpucoll.group.world.messages import pack, unpack


def _of(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    return [sizes[rank] for rank in ranks]


def _exchange(run: Run, pieces: Sequence[Bytes]) -> list[list[Bytes]]:
    """Return, on the leader, the pieces that each host's leader gave."""
    found = run.between(lambda: pack([piece.tobytes() for piece in pieces]))
    return [[np.frombuffer(piece, np.uint8) for piece in unpack(part)] for part in found]


T = TypeVar("T")


def _in_rank_order(run: Run, by_host: list[list[T]]) -> list[T]:
    flat = [piece for pieces in by_host for piece in pieces]
    order = sorted(range(len(flat)), key=run.hosts.order.__getitem__)
    return [flat[place] for place in order]


# --- from one rank ------------------------------------------------------------------------------


def _broadcast(run: Run) -> None:
    root = run.request.root
    output = run.output()
    is_here = run.spread_from_root(output)
    found = _exchange(run, [output] if is_here else [])
    if not is_here:
        if run.leads:
            output[:] = found[run.hosts.host_of(root)][0]
        run.spread(output)


def _scatter(run: Run) -> None:
    root, request = run.request.root, run.request
    is_root = run.group.rank == root
    mine = run.input() if is_root else np.empty(0, np.uint8)
    output = run.output()
    is_here = root in run.here
    if request.counts is not None:
        sizes = block_sizes(run, 0)
    else:
        block_bytes = mine.size // run.group.world_size if is_root else output.size
        sizes = [block_bytes] * run.group.world_size
    pieces: list[Bytes] = []
    if is_here:
        at_root = [sum(sizes) if rank == root else 0 for rank in run.here]
        whole = joined(run.gather(mine, at_root))
        pieces = cut(whole, sizes) if run.leads else []
    found = _exchange(run, pieces)
    parts = None
    if run.leads:
        blocks = found[run.hosts.host_of(root)]
        parts = [blocks[rank] for rank in run.here]
    run.scatter(parts, output, _of(sizes, run.here))


# --- to one rank, or all ------------------------------------------------------------------------


def _all_gather(run: Run) -> None:
    mine, output = run.input(), run.output()
    sizes = block_sizes(run, mine.size * run.group.world_size)
    found = _exchange(run, run.gather(mine, _of(sizes, run.here)))
    if run.leads:
        _write(output, _in_rank_order(run, found))
    run.spread(output)
    run.put(output)


def _gather(run: Run) -> None:
    root = run.request.root
    mine = run.input()
    sizes = block_sizes(run, mine.size * run.group.world_size)
    found = _exchange(run, run.gather(mine, _of(sizes, run.here)))
    if root not in run.here:
        return
    is_root = run.group.rank == root
    output = run.output() if is_root else np.empty(0, np.uint8)
    parts = [joined(_in_rank_order(run, found))] if run.leads else None
    run.scatter(parts, output, [sum(sizes) if rank == root else 0 for rank in run.here])
    if is_root:
        run.put(output)


def _write(output: Bytes, pieces: Sequence[Bytes]) -> None:
    at = 0
    for piece in pieces:
        output[at : at + piece.size] = piece
        at += piece.size


# --- from all to all ----------------------------------------------------------------------------


def _all_to_all(run: Run) -> None:
    mine, output = run.input(), run.output()
    n_ranks = run.group.world_size
    sizes = block_sizes(run, mine.size)
    everyone = _all_sizes(run, sizes)
    is_sealed_call = is_sealed(run.request, run.group.is_encrypted)
    is_large = sum(map(sum, everyone)) > LARGE_BYTES and not is_sealed_call
    if run.request.receive_counts is not None and is_large:
        all_to_all(run, everyone)
        return
    sent_here = [everyone[rank] for rank in run.here]
    wholes = run.gather(mine, [sum(sent) for sent in sent_here])
    pieces = [cut(whole, sent) for whole, sent in zip(wholes, sent_here, strict=bool(wholes))]
    found = _exchange(run, [piece for blocks in pieces for piece in blocks])
    parts = None
    if run.leads:
        by_sender = _in_rank_order(run, [_grouped(blocks, n_ranks) for blocks in found])
        parts = [joined([blocks[rank] for blocks in by_sender]) for rank in run.here]
    run.scatter(parts, output, [sum(sent[rank] for sent in everyone) for rank in run.here])
    run.put(output)


def _grouped(pieces: list[Bytes], count: int) -> list[list[Bytes]]:
    return [pieces[at : at + count] for at in range(0, len(pieces), count)]


def _all_sizes(run: Run, mine: list[int]) -> list[list[int]]:
    """Return the sizes that every rank sends to each other; check them against expectations."""
    n_ranks = run.group.world_size
    if run.request.receive_counts is None:
        return [mine] * n_ranks
    row_bytes = run.request.row_count * run.request.data.item_bytes
    expected = [count * row_bytes for count in run.request.receive_counts]
    table = np.array([*mine, *expected], np.int64).view(np.uint8)
    tables = _everyones(run, table)
    sent = [list(map(int, row[:n_ranks])) for row in tables]
    for sender in range(n_ranks):
        for receiver in range(n_ranks):
            is_expected = int(tables[receiver][n_ranks + sender])
            if sent[sender][receiver] != is_expected:
                raise run.disagreement(sender, receiver, sent[sender][receiver], is_expected)
    return sent


def _everyones(run: Run, mine: Bytes) -> list[np.ndarray]:
    """Return, on every rank, the same number of words from all ranks, by rank."""
    found = _exchange(run, run.gather(mine, [mine.size] * len(run.here)))
    whole = np.empty(mine.size * run.group.world_size, np.uint8)
    if run.leads:
        _write(whole, _in_rank_order(run, found))
    run.spread(whole)
    return [piece.view(np.int64) for piece in cut(whole, [mine.size] * run.group.world_size)]


def _reduce_scatter(run: Run) -> None:
    mine, output = run.input(), run.output()
    sizes = block_sizes(run, mine.size)
    wholes = run.gather(mine, [mine.size] * len(run.here))
    found = _exchange(run, wholes)
    parts = None
    if run.leads:
        by_rank = [cut(whole, sizes) for whole in _in_rank_order(run, found)]
        parts = []
        for rank in run.here:
            result = np.empty(sizes[rank], np.uint8)
            combine(run, [blocks[rank] for blocks in by_rank], result, len(by_rank))
            parts.append(result)
    run.scatter(parts, output, _of(sizes, run.here))


MOVEMENTS: dict[Collective, Callable[[Run], None]] = {
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _all_gather,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.REDUCE_SCATTER: _reduce_scatter,
}
