"""Pieces of calls on GPU arrays: every byte once, in bounded slots, alike on all ranks."""

from __future__ import annotations

import pytest

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.pieces import pieces_of
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.types import ReduceOp

SUM = ReduceOp.parse("sum")
SLOT_BYTES = 48
X, OUT = 1 << 20, 1 << 21


def buffer(address, count):
    return Buffer(address, (count,), "float32", 4, None)


def covered(copies, base):
    """Return which bytes of an array some copies touch, in order."""
    touched = [copy.address - base + at for copy in copies for at in range(copy.size_bytes)]
    assert len(touched) == len(set(touched))
    return sorted(touched)


def made(request, rank, world_size):
    pieces = pieces_of(request, rank, world_size, SLOT_BYTES)
    return [pieces.piece(number) for number in range(pieces.n_pieces)]


@pytest.mark.parametrize("count", [0, 1, 11, 12, 13, 100])
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.SCAN])
def test_elements(collective, count):
    request = Request(collective, buffer(X, count), buffer(OUT, count), SUM)
    pieces = made(request, 1, 3)
    reads = [copy for piece in pieces for copy in piece.reads]
    writes = [copy for piece in pieces for copy in piece.writes]
    assert covered(reads, X) == covered(writes, OUT) == [*range(4 * count)]
    assert len(pieces) == -(-count // 12)
    for piece in pieces:
        assert sum(copy.size_bytes for copy in piece.reads) <= SLOT_BYTES
        assert piece.request(0, 64).data.size_bytes == sum(copy.size_bytes for copy in piece.reads)


def test_a_list_is_one_run_of_elements():
    sizes = (5, 0, 9, 30)
    parts = tuple(
        (buffer(X + 4096 * place, size), buffer(OUT + 4096 * place, size))
        for place, size in enumerate(sizes)
    )
    request = Request(Collective.ALL_REDUCE_LIST, *parts[0], SUM, parts=parts)
    pieces = made(request, 0, 2)
    assert len(pieces) == 4
    reads = covered([copy for piece in pieces for copy in piece.reads], X)
    assert reads == [4096 * p + at for p, size in enumerate(sizes) for at in range(4 * size)]
    assert {piece.request(0, 64).collective for piece in pieces} == {Collective.ALL_REDUCE}


@pytest.mark.parametrize("counts", [None, (7, 0, 20)])
def test_blocks(counts):
    sizes = counts or (20, 20, 20)
    totals = set()
    for rank, mine in enumerate(sizes):
        request = Request(
            Collective.ALL_GATHER, buffer(X, mine), buffer(OUT, sum(sizes)), counts=counts
        )
        pieces = made(request, rank, 3)
        totals.add(len(pieces))
        assert covered([c for piece in pieces for c in piece.reads], X) == [*range(4 * mine)]
        writes = covered([c for piece in pieces for c in piece.writes], OUT)
        assert writes == [*range(4 * sum(sizes))]
        for piece in pieces:
            assert sum(copy.size_bytes for copy in piece.writes) <= SLOT_BYTES
    assert totals == {5}


def test_only_the_root_reads_or_writes():
    for rank in range(2):
        x, out = buffer(X, 30), buffer(OUT, 30)
        reduced = made(Request(Collective.REDUCE, x, out, SUM, root=1), rank, 2)
        assert bool(reduced[0].writes) == (rank == 1)
        moved = made(Request(Collective.BROADCAST, x, out, root=1), rank, 2)
        assert bool(moved[0].reads) == (rank == 1)
        assert moved[0].writes


def test_ranks_of_an_all_to_all_with_counts_agree_later():
    request = Request(
        Collective.ALL_TO_ALL, buffer(X, 14), buffer(OUT, 3), counts=(0, 14), receive_counts=(3, 0)
    )
    pieces = pieces_of(request, 0, 2, SLOT_BYTES)
    assert pieces.agrees
    assert pieces.n_pieces == 3
    beyond = pieces.piece(7)
    assert not beyond.reads
    assert not beyond.writes
    assert beyond.request(0, 64).counts == (0, 0)
