"""Which route a call between hosts takes, and how much of its data each host gives and needs.

All ranks that make the same call compute the same answers.
"""

from __future__ import annotations

from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.exchange_words import Exchange, Route

LEAST_BYTES = 16
"""Size of the largest element."""
UNIT_ITEMS = 64
"""Shares of a reduction are cut at multiples of this many elements, if there are so many."""


# --- inputs ---------------------------------------------------------------------------------------


@inline
def block_start(call: Call, rank: int) -> int:
    """Return the offset of a rank's block in an input with one block for each rank."""
    if call.offsets:
        return call.offsets[rank]
    return call.block_bytes * rank


@inline
def whole_input_bytes(call: Call, rank: int) -> int:
    """Return the size of a rank's input."""
    if call.flow == Flow.FROM_ROOT:
        return call.largest_bytes if rank == call.root else 0
    if call.spreads != 0:
        return call.largest_bytes
    if call.kernel != 0:
        return call.size_bytes
    offsets = call.offsets
    if offsets:
        return offsets[rank + 1] - offsets[rank]
    return call.block_bytes


@inline
def _data_bytes(words: Exchange, call: Call) -> int:
    """Return the total size of all ranks' inputs."""
    total = 0
    for rank in range(words.world_size):
        total += whole_input_bytes(call, rank)
    return total


@inline
def own_input(call: Call) -> int:
    """Return the address of this rank's input; a root may have it in its output's place."""
    return call.source if call.source != 0 else call.destination


# --- the route ------------------------------------------------------------------------------------


@inline
def _can_be_pairwise(words: Exchange, call: Call) -> bool:
    """Return whether leaders can send each other what each needs; scans need something else."""
    if words.most_pairwise_bytes == 0 or call.operands != Operands.ALL:
        return False
    if call.spreads != 0 or call.gathers != 0:
        return words.is_in_order != 0
    return True


@inline
def _is_exchange_spare(words: Exchange, call: Call) -> bool:
    """Return whether an exchange brings to no host more than about what it needs."""
    if call.spreads != 0 or (call.gathers != 0 and call.flow == Flow.TO_ROOT):
        return False
    return call.gathers != 0 or words.n_hosts == 2


@inline
def _most_pairwise_bytes(words: Exchange, call: Call) -> int:
    """Return how much data of all ranks together may be pairwise.

    The limit is for the data of one host. With blocks of different sizes all of them may be for one
    host.
    """
    moves_both_ways = call.spreads != 0 and call.gathers != 0
    is_divided = (call.kernel != 0 or moves_both_ways) and not call.offsets
    return words.most_pairwise_bytes * (words.n_hosts if is_divided else 1)


@inline
def route_of(words: Exchange, call: Call) -> int:
    """Return the `Route` of a call.

    A call with counts that others may not know is always large. A reduction of one element never
    is.
    """
    if call.pieces:
        return Route.LARGE
    if call.kernel != 0 and call.size_bytes <= LEAST_BYTES:
        return Route.SMALL
    data_bytes = _data_bytes(words, call)
    if not _can_be_pairwise(words, call):
        return Route.SMALL if data_bytes <= words.most_bytes else Route.LARGE
    is_spare = _is_exchange_spare(words, call)
    if data_bytes < (words.most_bytes if is_spare else words.least_pairwise_bytes):
        return Route.SMALL
    return Route.PAIRWISE if data_bytes <= _most_pairwise_bytes(words, call) else Route.LARGE


# --- hosts ----------------------------------------------------------------------------------------


@inline
def n_ranks(words: Exchange, host: int) -> int:
    """Return the number of a host's ranks."""
    return words.edges[host + 1] - words.edges[host]


@inline
def rank_at(words: Exchange, host: int, place: int) -> int:
    """Return the rank at a place of a host."""
    edges = words.edges
    return words.order[edges[host] + place]


@inline
def host_of(words: Exchange, rank: int) -> int:
    """Return a rank's host; -1 if there is no such rank."""
    found = -1
    for host in range(words.n_hosts):
        for place in range(n_ranks(words, host)):
            if rank_at(words, host, place) == rank:
                found = host
    return found


# --- shares ---------------------------------------------------------------------------------------

# A host has a share of every input. If inputs are blocks, it is the blocks of its ranks. Otherwise
# inputs are cut into as many shares as there are hosts: each host combines its share and passes the
# result on. In a broadcast the other hosts pass on what they get of the root's input.


@inline
def passes_on(call: Call) -> bool:
    """Return whether hosts need what others have made of their shares, or have got as theirs."""
    return call.spreads == 0 and call.gathers == 0


@inline
def gets_all(words: Exchange, call: Call, host: int) -> bool:
    """Return whether a host needs what the others pass on, or all blocks that they bring."""
    if call.flow == Flow.TO_ROOT:
        return host == words.root_host
    return call.flow == Flow.ALL or host != words.root_host


@inline
def _share_start(words: Exchange, call: Call, host: int) -> int:
    """Return where a host's share of every input begins; that of the last host + 1 is the end."""
    if call.spreads != 0:
        return block_start(call, words.edges[host])
    if call.gathers != 0:
        return 0  # whole inputs go to others
    n_shares, place, size_bytes = words.n_hosts, host, call.size_bytes
    if call.flow == Flow.FROM_ROOT:
        n_shares -= 1
        place -= 1 if host > words.root_host else 0
        size_bytes = call.largest_bytes
    if place == n_shares:
        return size_bytes
    unit_bytes = call.item_bytes * UNIT_ITEMS
    if size_bytes < unit_bytes * n_shares:
        unit_bytes = call.item_bytes
    return size_bytes // unit_bytes * place // n_shares * unit_bytes


@inline
def note_shares(words: Exchange, call: Call) -> None:
    """Store each host's share of every input: where it begins, and its size."""
    words.root_host = host_of(words, call.root)
    start = _share_start(words, call, 0)
    for host in range(words.n_hosts):
        peer, end = words.peers[host], _share_start(words, call, host + 1)
        peer.share_start = start
        peer.share = end - start
        start = end
    words.result_bytes = _result_bytes(words, call)


# --- pieces ---------------------------------------------------------------------------------------

# What goes from a host to another one is a number of pieces of the same size: a share of each
# input, or all inputs as one piece.


@inline
def has_whole_inputs(call: Call) -> bool:
    """Return whether whole inputs go to other hosts: in all_gather and gather."""
    return call.gathers != 0 and call.spreads == 0


@inline
def n_pieces(words: Exchange, call: Call, origin: int) -> int:
    """Return the number of pieces that a host sends to another one."""
    if call.flow == Flow.FROM_ROOT:
        return 1 if origin == words.root_host else 0
    return 1 if has_whole_inputs(call) else n_ranks(words, origin)


@inline
def piece_bytes(words: Exchange, call: Call, origin: int, to: int) -> int:
    """Return the size of a piece from one host to another."""
    if not has_whole_inputs(call):
        return words.peers[to].share
    if not gets_all(words, call, to):
        return 0
    edges = words.edges
    return block_start(call, edges[origin + 1]) - block_start(call, edges[origin])


@inline
def _result_bytes(words: Exchange, call: Call) -> int:
    """Return the size of everything that the ranks of this host get."""
    if call.spreads != 0:
        n_shares = words.world_size if call.gathers != 0 else 1
        return words.peers[words.here].share * n_shares
    if call.flow == Flow.TO_ROOT and words.here != words.root_host:
        return 0
    if call.gathers != 0:
        return block_start(call, words.world_size)
    return call.size_bytes if call.kernel != 0 else call.largest_bytes
