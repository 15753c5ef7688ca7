"""Sections of a schedule: each by itself, and only when its piece of the array is ready."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from tests.transport.tcp.schedules import row
from tests.transport.tcp.stream_ends import HEADER, LIMIT_S, Ends, reduction

from gpucoll.transport.tcp.stream_words import Row
from gpucoll.transport.tcp.streams import ALL, StreamStatus, deadline_after

AGAIN, DONE = StreamStatus.AGAIN, StreamStatus.DONE
PIECE = 3000


def sectioned(ends, rank, sections):
    """Return a table of sections, each with its gate."""
    tables, first = [], 0
    for gate, rows in sections:
        table = ends.rows(rank, rows)
        table[:, Row.first], table[:, Row.end] = first, first + len(rows)
        table[:, Row.gate] = gate
        first += len(rows)
        tables.append(table)
    return np.concatenate(tables)


def begin(ends, rank, sections, array, ready=ALL, **options):
    table = sectioned(ends, rank, sections)
    ends.streams[rank].begin(
        table,
        array.ctypes.data,
        array.nbytes,
        HEADER,
        deadline_ns=deadline_after(LIMIT_S),
        ready=ready,
        **options,
    )


def pieces(count, peer, sends):
    for piece in range(count):
        there = (peer, piece * PIECE, PIECE)
        yield piece + 1, [row(0, there) if sends else row(0, receive=there)]


@pytest.mark.parametrize("secure", [False, True])
def test_a_piece_leaves_when_it_is_ready(secure):
    sent, came = np.zeros(3 * PIECE, np.uint8), np.zeros(3 * PIECE, np.uint8)
    with Ends(2, secure=secure) as ends:
        begin(ends, 0, pieces(3, 1, sends=True), sent, ready=0)
        begin(ends, 1, pieces(3, 0, sends=False), came)
        for piece in range(3):
            assert ends.streams[0].let(piece).status == AGAIN
            assert ends.streams[1].let(ALL).status == AGAIN
            assert came[piece * PIECE :].max() == 0
            sent[piece * PIECE : (piece + 1) * PIECE] = piece + 1

            assert ends.streams[0].let(piece + 1).status == (DONE if piece == 2 else AGAIN)
            outcome = ends.streams[1].finish(piece + 1)

            assert outcome.status == (DONE if piece == 2 else AGAIN)
            assert set(came[piece * PIECE : (piece + 1) * PIECE]) == {piece + 1}


@pytest.mark.parametrize("secure", [False, True])
def test_what_came_is_reduced_when_the_piece_is_ready(secure):
    sent, held = np.arange(PIECE, dtype=np.int32), np.zeros(PIECE, np.int32)
    with Ends(2, secure=secure) as ends:
        begin(ends, 0, [(0, [row(0, (1, 0, sent.nbytes))])], sent)
        taken = [(1, [row(0, receive=(0, 0, sent.nbytes), reduces=1, theirs_first=1)])]
        begin(ends, 1, taken, held, ready=0, reduction=reduction("int32"))
        assert ends.streams[0].finish().status == DONE
        assert ends.streams[1].let(0).status == AGAIN
        assert not held.any()
        held[:] = 1000

        assert ends.streams[1].let(1).status == DONE

    assert (held == 1000 + np.arange(PIECE)).all()


@pytest.mark.parametrize("secure", [False, True])
def test_no_section_waits_for_another(secure):
    """End 0's second section needs nothing of what its first one has still to receive."""
    arrays = [np.full(2 * PIECE, rank, np.uint8) for rank in range(3)]
    steps = [row(0, receive=(2, 0, PIECE)), row(1, (1, 0, PIECE))]
    with Ends(3, secure=secure) as ends:
        begin(ends, 0, [(0, steps), (0, [row(0, (2, PIECE, PIECE))])], arrays[0])
        begin(ends, 2, [(0, [row(0, receive=(0, PIECE, PIECE))])], arrays[2])
        assert ends.streams[0].let(ALL).status == AGAIN

        assert ends.streams[2].finish().status == DONE

        assert set(arrays[2][PIECE:]) == {0}


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (1, 2), (0, 0), (0, 3)])
def test_rows_that_are_not_in_their_section(first, end):
    array = np.zeros(20, np.uint8)
    with Ends(2) as ends:
        table = sectioned(ends, 0, [(0, [row(0, (1, 0, 10)), row(0, (1, 10, 10))])])
        table[0, [Row.first, Row.end]] = first, end

        with pytest.raises(ValueError, match="section"):
            ends.streams[0].run(table, array.ctypes.data, 20, HEADER)


def test_bytes_behind_four_gibibytes():
    """Both ends have 9 GiB of addresses, of which a few pages are used."""
    size, at, few = 9 << 30, (8 << 30) + 12345, 70_000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memories = [mmap.mmap(-1, size, flags=flags) for _ in range(2)]
    arrays = [np.frombuffer(memory, np.uint8) for memory in memories]
    arrays[0][at : at + few] = np.arange(few) % 251
    with Ends(2) as ends:
        there = [[row(0, (1, at, few))], [row(0, receive=(0, at, few))]]
        ends.complete(there, arrays)
        # What is left of a piece is counted in 64 bits: this one is never through.
        begin(ends, 0, [(0, [row(0, (1, 0, 5 << 30))])], arrays[0])
        assert ends.streams[0].let(ALL).status == AGAIN
        begin(ends, 1, [(0, [row(0, receive=(0, (4 << 30) + 1, 5 << 30))])], arrays[1])
        with pytest.raises(ValueError, match="range"):
            ends.streams[1].let(ALL)

    assert (arrays[1][at : at + few] == np.arange(few) % 251).all()
