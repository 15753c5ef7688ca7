"""The pieces of large arrays, and the blocks of ranks and hosts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from gpucoll.backends.cpu.world.phases import Bytes, Run, cut
from gpucoll.backends.protocol import Request
from gpucoll.group.world.schedules import Section

PIECES: Final = 8
PIECE_BYTES: Final = 512 << 10
"""A large array is cut into up to `PIECES` pieces of at least this size. While one is on its way,
the ranks of a host work on others: 1.40 of 1.43 Gbit/s with 2 hosts of 2 ranks at 1 Gbit/s, 32
MiB."""


def pieces_of(size_bytes: int, item_bytes: int) -> list[slice]:
    """Return the pieces of an array of whole items; the same on all ranks."""
    count = min(max(size_bytes // PIECE_BYTES, 1), PIECES)
    n_items = size_bytes // item_bytes
    edges = [n_items * piece // count * item_bytes for piece in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def sections_of(pieces: Sequence[slice], n_blocks: int, item_bytes: int) -> list[Section]:
    """Return a section for each piece, with `n_blocks` nearly equal blocks of whole items."""
    found = []
    for number, piece in enumerate(pieces):
        n_items = (piece.stop - piece.start) // item_bytes
        places = [n_items * block // n_blocks * item_bytes for block in range(n_blocks + 1)]
        found.append(Section.of([piece.start + place for place in places], number + 1))
    return found


# --- blocks of ranks, host by host ----------------------------------------------------------------


def block_sizes(request: Request, world_size: int, whole_bytes: int) -> list[int]:
    """Return the bytes of each rank's block, in rank order."""
    if request.counts is None:
        return [whole_bytes // world_size] * world_size
    row_bytes = request.row_count * request.data.item_bytes
    return [count * row_bytes for count in request.counts]


def host_edges(run: Run, sizes: Sequence[int]) -> list[int]:
    """Return where the blocks of each host's ranks begin, host by host, and where all end."""
    of_hosts = [sum(sizes[rank] for rank in ranks) for ranks in run.hosts.ranks]
    return [0, *itertools.accumulate(of_hosts)]


def in_host_order(run: Run, whole: Bytes, sizes: Sequence[int]) -> Bytes:
    """Return blocks in host order, given in rank order; the same array if the orders agree."""
    if run.hosts.is_in_order:
        return whole
    blocks = cut(whole, sizes)
    return np.concatenate([blocks[rank] for rank in run.hosts.order])
