"""How large calls are, and the blocks of ranks and hosts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from gpucoll.backends.cpu.world.phases import Bytes, Run, cut
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Data
from gpucoll.group.world.exchanges import MOST_BYTES
from gpucoll.group.world.hosts import Hosts
from gpucoll.group.world.schedules import Section

LARGE_BYTES: Final = MOST_BYTES
"""Limit of all ranks' data together that is sent in the exchange that begins each call."""
INT_BYTES: Final = 8
"""Size of a reduction that may be of Python ints: each rank then combines all of them, exactly."""

PIECES: Final = 8
PIECE_BYTES: Final = 512 << 10
"""A large array is cut into up to `PIECES` pieces of at least this size. While one is on its way,
the ranks of a host work on others: 1.40 of 1.43 Gbit/s with 2 hosts of 2 ranks at 1 Gbit/s, 32
MiB."""


def is_sealed(request: Request, is_encrypted: bool) -> bool:
    """Return whether a call must use the links, whatever its size, because it is unpickled.

    A change on the way is noticed there; without TLS it is not noticed elsewhere.
    """
    whole = request.part_of
    return not is_encrypted and whole is not None and whole.collective.data == Data.OBJECTS


def is_large(request: Request, hosts: Hosts, is_encrypted: bool) -> bool:
    """Return whether a call is too large for every leader to get all data; the same on all ranks.

    It is not if inputs must be combined in rank order and ranks are not ordered by host, nor if
    sizes differ between ranks.
    """
    op, data, world_size = request.op, request.data, hosts.world_size
    if is_sealed(request, is_encrypted):
        return False
    if op is not None and not op.commutative and not hosts.is_in_order:
        return False
    if request.collective.is_exchange and request.receive_counts is not None:
        return False
    if request.counts is not None:
        whole = sum(request.counts) * request.row_count * data.item_bytes
    elif request.parts:
        whole = sum(source.size_bytes for source, _ in request.parts)
    else:
        whole = data.size_bytes
    if op is not None and whole <= INT_BYTES:
        return False
    is_one_block = request.counts is None and request.collective.gathers
    if request.collective.knows_one_block and request.counts is None:
        is_one_block = request.source is None
    is_everyones = op is not None or request.collective.is_exchange
    return whole * (world_size if is_one_block or is_everyones else 1) > LARGE_BYTES


# --- pieces ---------------------------------------------------------------------------------------


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


def block_sizes(run: Run, whole_bytes: int) -> list[int]:
    """Return the bytes of each rank's block, in rank order."""
    request, world_size = run.request, run.group.world_size
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
