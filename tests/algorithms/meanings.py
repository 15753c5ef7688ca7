"""What each collective must end with, block by block, as symbolic contents."""

from __future__ import annotations

from schedules.contents import Contents
from schedules.initial import initial_blocks
from schedules.simulation import run

from gpucoll.algorithms.table import Algorithm
from gpucoll.collectives import Collective

C = Collective
REDUCES = (C.ALL_REDUCE, C.REDUCE, C.REDUCE_SCATTER, C.SCAN, C.EXCLUSIVE_SCAN)


def ended(algorithm: Algorithm, size: int, root: int = 0) -> tuple[list[list[int]], Contents]:
    contents = Contents()
    held = initial_blocks(algorithm, size, contents, root)
    return run(algorithm.schedules(size, root), held, contents), contents


def check(algorithm: Algorithm, size: int, root: int = 0) -> None:
    """Fail unless the schedules of all ranks do what the collective means."""
    held, contents = ended(algorithm, size, root)
    if algorithm.collective in REDUCES:
        check_reduced(algorithm, size, root, held, contents)
    elif algorithm.collective is not C.BARRIER:
        check_moved(algorithm, size, root, held, contents)


def check_moved(algorithm, size, root, held, contents):
    for rank in range(size):
        for block, (source, number) in expected_blocks(algorithm, rank, size, root).items():
            assert contents.contributions(held[rank][block]) == [(source, number)], (rank, block)


def expected_blocks(algorithm, rank, size, root):
    """Return, of each block that this rank has in the end, what it holds."""
    if algorithm.collective is C.ALL_GATHER or (algorithm.collective is C.GATHER and rank == root):
        return {block: (block, block) for block in range(size)}
    if algorithm.collective is C.BROADCAST:
        return {0: (root, 0)}
    if algorithm.collective is C.SCATTER:
        return {rank: (root, rank)}
    if algorithm.collective is C.ALL_TO_ALL:
        incoming = algorithm.numbering.incoming
        return {incoming(rank, size, peer): (peer, rank) for peer in range(size) if peer != rank}
    return {}


def check_reduced(algorithm, size, root, held, contents):
    """Fail unless each contribution is in exactly once, and in the order that is promised."""
    seen = set()
    for rank in range(size):
        for block, sources in reduced_blocks(algorithm, rank, size, root).items():
            value = held[rank][block]
            if algorithm.collective is C.ALL_REDUCE:
                assert value == held[0][block], "not the same order on all ranks"
            if (value, block) in seen:
                continue
            seen.add((value, block))
            number = 0 if algorithm.collective is C.EXCLUSIVE_SCAN else block
            wanted = [(source, number) for source in sources]
            found = contents.contributions(value)
            assert sorted(found) == wanted, (rank, block)
            if algorithm.order >= 1:
                assert found == wanted, (rank, block)
            if algorithm.order >= 2:
                assert value == in_sequence(contents, wanted), contents.spelled(value)


def reduced_blocks(algorithm, rank, size, root):
    """Return, of each block that this rank has in the end, whose contributions are in it."""
    if algorithm.collective is C.ALL_REDUCE or (algorithm.collective is C.REDUCE and rank == root):
        return dict.fromkeys(range(algorithm.blocks(size)), range(size))
    if algorithm.collective is C.REDUCE_SCATTER:
        return {rank: range(size)}
    if algorithm.collective is C.SCAN:
        return {0: range(rank + 1)}
    if algorithm.collective is C.EXCLUSIVE_SCAN and rank:
        return {1: range(rank)}
    return {}


def in_sequence(contents, names):
    value = contents.leaf(names[0])
    for name in names[1:]:
        value = contents.combine(value, contents.leaf(name))
    return value
