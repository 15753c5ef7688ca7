"""Calls of middle size between hosts in compiled code: each leader sends what each other one needs.

All hosts have agreed on the call before. Then each leader sends, to every other leader, that host's
share of its ranks' inputs. In a reduction a host combines its share of all inputs, in rank order,
and passes the result on, part by part while more comes. In a broadcast the hosts pass on their
shares of the root's input. So reductions combine each element once, in the order of the ranks, and
no collective sends more bytes than a ring.

A connection carries one message of a call in each direction: a header, pieces of inputs, and what
the sender passes on.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_reduce, load64
from gpucoll.transport.shared.libc import (
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    POLLIN,
    POLLOUT,
    poll,
    recvmsg,
    sendmsg,
)
from gpucoll.transport.shared.words import Call, Context
from gpucoll.transport.tcp.call_routes import (
    UNIT_ITEMS,
    block_start,
    gets_all,
    has_whole_inputs,
    n_pieces,
    n_ranks,
    own_input,
    passes_on,
    piece_bytes,
    rank_at,
    whole_input_bytes,
)
from gpucoll.transport.tcp.exchange import (
    HEADER_BYTES,
    IDLE,
    MILLISECOND_NS,
    MOVED,
    YIELDS,
    failed,
    now_ns,
    two_vectors,
    yielded,
)
from gpucoll.transport.tcp.exchange_words import MAGIC, MESSAGE_WORDS, Exchange, Outcome, Peer

STEP = 64
"""What the header of these messages has in place of an exchange's step."""
LEAST_COMBINED_BYTES = 64 << 10
"""So much of a share is combined at once, or its rest: what comes meanwhile stays in the caches."""
_LINE_BYTES = 64


# --- memory ---------------------------------------------------------------------------------------

# The leader's room has the result for all ranks of its host, then the inputs of the others, unless
# they are a part of the result, and the shares that are to be combined. No room is needed for what
# has a place in the leader's own arrays.


@inline
def _whole_lines(size_bytes: int) -> int:
    return (size_bytes + _LINE_BYTES - 1) & -_LINE_BYTES


@inline
def _room_of_result(words: Exchange, call: Call) -> int:
    """Return how much of the room is for the result, or for what a host passes on."""
    if call.kernel != 0 and passes_on(call):
        return _whole_lines(call.size_bytes)
    return _whole_lines(words.result_bytes)


@inline
def inputs_at(words: Exchange, call: Call) -> int:
    """Return where the leader gathers the inputs of its host's ranks."""
    if call.spreads == 0 and call.flow == Flow.FROM_ROOT:
        return words.room
    if has_whole_inputs(call) and gets_all(words, call, words.here):
        return words.room + block_start(call, words.edges[words.here])
    return words.room + _room_of_result(words, call)


@inline
def _is_apart(call: Call) -> bool:
    """Return whether input and output have no byte in common."""
    source, destination, size_bytes = call.source, call.destination, call.largest_bytes
    if source == 0:
        return False
    return source + size_bytes <= destination or destination + size_bytes <= source


@inline
def _find_result(words: Exchange, context: Context, call: Call) -> None:
    """Store where the result for this host's ranks is made.

    In place, what a host passes on lands where the input was that it was made of. That is no longer
    needed there: without it the other host could not have made anything of it.
    """
    words.result = words.room
    is_broadcast = call.flow == Flow.FROM_ROOT and passes_on(call)
    if is_broadcast and words.rank == call.root:
        words.result = own_input(call)
    elif call.destination != 0 and (call.flow != Flow.TO_ROOT or words.rank == call.root):
        moves_both_ways = call.spreads != 0 and call.gathers != 0
        is_whole = call.kernel != 0 or (is_broadcast and words.here != words.root_host)
        if context.world_size > 1:
            fits = is_whole and passes_on(call)
        else:
            fits = not moves_both_ways or _is_apart(call)
        if fits:
            words.result = call.destination


@inline
def _note_inputs(words: Exchange, call: Call) -> None:
    """Store where the inputs of this host's ranks are."""
    is_own = call.flow != Flow.FROM_ROOT or words.rank == call.root
    if has_whole_inputs(call):
        is_own = n_ranks(words, words.here) == 1
    gathered = inputs_at(words, call)
    words.first_input = own_input(call) if is_own else gathered
    words.further_inputs = gathered
    words.input_bytes = whole_input_bytes(call, words.rank)


@inline
def _input_at(words: Exchange, piece: int) -> int:
    """Return the address of an input of this host, or of all of them."""
    if piece == 0:
        return words.first_input
    return words.further_inputs + piece * words.input_bytes


@inline
def _landing_of(words: Exchange, call: Call, host: int) -> int:
    """Return where the pieces from a host land."""
    here, place = words.here, words.edges[host]
    share = words.peers[here].share
    if call.kernel != 0:
        landing = words.room + _room_of_result(words, call)
        if n_ranks(words, here) > 1:
            landing += _whole_lines(words.input_bytes * n_ranks(words, here))
        return landing + place * share
    if has_whole_inputs(call):
        return words.result + block_start(call, place)
    if call.flow == Flow.FROM_ROOT:
        return words.part
    return words.result + place * share


@inline
def _part_of(words: Exchange, call: Call, host: int) -> int:
    """Return where the part of the result lies that a host passes on, or keeps."""
    return words.result + (words.peers[host].share_start if passes_on(call) else 0)


# --- messages -------------------------------------------------------------------------------------


@inline
def _pieces_bytes(words: Exchange, call: Call, origin: int, to: int) -> int:
    """Return the size of all pieces from one host to another."""
    return n_pieces(words, call, origin) * piece_bytes(words, call, origin, to)


@inline
def _message_bytes(words: Exchange, call: Call, origin: int, to: int) -> int:
    """Return the size of the message from one host to another."""
    size_bytes = HEADER_BYTES + _pieces_bytes(words, call, origin, to)
    if passes_on(call) and gets_all(words, call, to):
        size_bytes += words.peers[origin].share
    return size_bytes


@inline
def _note_messages(words: Exchange, call: Call, host: int) -> None:
    """Store what goes to another host and comes from it."""
    peer, here = words.peers[host], words.here
    peer.sent = 0
    peer.came = 0
    peer.to_send = _message_bytes(words, call, here, host)
    peer.to_come = _message_bytes(words, call, host, here)
    peer.pieces_end = HEADER_BYTES + _pieces_bytes(words, call, here, host)
    peer.pieces_come = HEADER_BYTES + _pieces_bytes(words, call, host, here)
    peer.piece_bytes = piece_bytes(words, call, here, host)
    peer.landing = _landing_of(words, call, host)
    peer.part = _part_of(words, call, host)
    header = peer.sent_header
    header[0] = MAGIC
    header[1] = words.number
    header[2] = STEP
    header[3] = peer.to_send - HEADER_BYTES


@inline
def _take_own(words: Exchange, context: Context, call: Call) -> None:
    """Copy what the ranks of this host have for each other to its place in the result."""
    own = words.peers[words.here]
    landing, size_bytes = own.landing, own.piece_bytes
    for piece in range(n_pieces(words, call, words.here)):
        source = _input_at(words, piece) + own.share_start
        if source != landing and size_bytes > 0:
            call_copy(context.copy_plain, landing, source, size_bytes, 0)
        landing += size_bytes


@inline
def begin(words: Exchange, context: Context, call: Call) -> None:
    """Begin the messages to and from all other leaders."""
    _find_result(words, context, call)
    _note_inputs(words, call)
    words.made_bytes = 0
    words.part = _part_of(words, call, words.here)
    for host in range(words.n_hosts):
        _note_messages(words, call, host)
    if call.kernel == 0:
        _take_own(words, context, call)


@inline
def _ready_bytes(words: Exchange, peer: Peer) -> int:
    """Return how much of the message to a host can be sent by now."""
    return min(peer.pieces_end + words.made_bytes, peer.to_send)


@inline
def _piece_to_send(words: Exchange, peer: Peer, at: int) -> tuple[int, int]:
    """Return address and size of the piece at an offset of the message, as far as it is ready."""
    if at < peer.pieces_end:
        size_bytes, at = peer.piece_bytes, at - HEADER_BYTES
        done = at % size_bytes
        start = _input_at(words, at // size_bytes) + peer.share_start
        return start + done, size_bytes - done
    return words.part + at - peer.pieces_end, _ready_bytes(words, peer) - at


@inline
def _send_some(words: Exchange, host: int) -> int:
    """Send the rest of the message to a host, as far as it is ready and the kernel takes it."""
    peer = words.peers[host]
    sent = peer.sent
    if sent == _ready_bytes(words, peer):
        return IDLE
    start = peer.sent_header.address + sent
    piece, size_bytes = _piece_to_send(words, peer, max(sent, HEADER_BYTES))
    message = two_vectors(words, start, max(HEADER_BYTES - sent, 0), piece, size_bytes)
    taken = sendmsg(np.int32(peer.fd), message, np.int32(MSG_DONTWAIT | MSG_NOSIGNAL))
    if taken < 0:
        return failed(words, host)
    peer.sent = sent + taken
    return MOVED


@inline
def _is_header_wrong(words: Exchange, peer: Peer) -> bool:
    """Return whether the received header is not that of this call's message; store it if so."""
    header = peer.came_header
    is_right = header[0] == MAGIC and header[1] == words.number
    if is_right and header[2] == STEP and header[3] == peer.to_come - HEADER_BYTES:
        return False
    for word in range(MESSAGE_WORDS):
        words.came_header[word] = header[word]
    return True


@inline
def _receive_some(words: Exchange, host: int) -> int:
    """Receive the rest of the message from a host, as far as it has come."""
    peer = words.peers[host]
    came = peer.came
    if came == peer.to_come:
        return IDLE
    at = max(came, HEADER_BYTES)
    if at < peer.pieces_come:
        piece, size_bytes = peer.landing + at - HEADER_BYTES, peer.pieces_come - at
    else:
        piece, size_bytes = peer.part + at - peer.pieces_come, peer.to_come - at
    start = peer.came_header.address + came
    message = two_vectors(words, start, max(HEADER_BYTES - came, 0), piece, size_bytes)
    got = recvmsg(np.int32(peer.fd), message, np.int32(MSG_DONTWAIT))
    if got < 0:
        return failed(words, host)
    if got == 0:
        words.errno = 0
        words.link = host
        return Outcome.GONE
    peer.came = came + got
    if came < HEADER_BYTES <= came + got and _is_header_wrong(words, peer):
        words.link = host
        return Outcome.GARBLED
    return MOVED


# --- this host's share ----------------------------------------------------------------------------


@inline
def _combinable_bytes(words: Exchange) -> int:
    """Return up to where this host's share has come from every rank."""
    share = least_bytes = words.peers[words.here].share
    for host in range(words.n_hosts):
        if host != words.here:
            before_bytes = HEADER_BYTES + (n_ranks(words, host) - 1) * share
            least_bytes = min(least_bytes, words.peers[host].came - before_bytes)
    return least_bytes


@inline
def _combine(words: Exchange, call: Call, size_bytes: int) -> None:
    """Combine the next bytes of all ranks' shares, in the order of the ranks."""
    inputs, done = words.inputs, words.made_bytes
    for host in range(words.n_hosts):
        peer = words.peers[host]
        for place in range(n_ranks(words, host)):
            at = peer.landing + place * words.peers[words.here].share
            if host == words.here:
                at = _input_at(words, place) + peer.share_start
            inputs[rank_at(words, host, place)] = at + done
    combine_inputs(words, call, words.world_size, words.part + done, size_bytes)
    words.made_bytes = done + size_bytes


@inline
def _combine_some(words: Exchange, call: Call) -> bool:
    """Combine what has come, if it is worth a call of the kernel; return whether it was."""
    done, share = words.made_bytes, words.peers[words.here].share
    if call.kernel == 0 or done == share:
        return False
    size_bytes = _combinable_bytes(words) - done
    if done + size_bytes < share:
        size_bytes -= size_bytes % (call.item_bytes * UNIT_ITEMS)
        if size_bytes < LEAST_COMBINED_BYTES:
            return False
    _combine(words, call, size_bytes)
    return True


@inline
def _note_broadcast(words: Exchange, call: Call) -> None:
    """Note how much of this host's share of a broadcast has come and can be passed on."""
    if call.flow == Flow.FROM_ROOT and call.spreads == 0 and words.here != words.root_host:
        came = words.peers[words.root_host].came - HEADER_BYTES
        words.made_bytes = min(max(came, 0), words.peers[words.here].share)


@inline
def combine_inputs(
    words: Exchange, call: Call, n_inputs: int, destination: int, size_bytes: int
) -> None:
    """Combine the first `n_inputs` ranks' inputs, in order."""
    if size_bytes <= 0:
        return
    inputs = words.inputs
    landing = inputs.address + 8 * words.world_size
    Words(landing)[0] = destination
    parameter = call.parameter + call.parameter_stride * (n_inputs - 1)
    count = size_bytes // call.part_bytes
    call_reduce(call.kernel, landing, 1, inputs.address, n_inputs, count, parameter, 0)


# --- going on -------------------------------------------------------------------------------------


@inline
def _move(words: Exchange) -> int:
    """Send and receive on all connections; return `MOVED`, `IDLE`, or how it has ended."""
    n_hosts, here = words.n_hosts, words.here
    moved = IDLE
    for distance in range(1, n_hosts):
        sent = _send_some(words, (here + distance) % n_hosts)
        came = _receive_some(words, (here - distance + n_hosts) % n_hosts)
        if came >= 0:
            return came
        if sent >= 0:
            return sent
        moved = max(moved, max(sent, came))
    return moved


@inline
def _is_over(words: Exchange, call: Call) -> bool:
    if call.kernel != 0 and words.made_bytes < words.peers[words.here].share:
        return False
    for host in range(words.n_hosts):
        peer = words.peers[host]
        is_over = peer.sent == peer.to_send and peer.came == peer.to_come
        if host != words.here and not is_over:
            return False
    return True


@inline
def _sleep(words: Exchange, duration_ns: int) -> bool:
    """Sleep until something can move, for `duration_ns` at most; return whether a signal came."""
    count = 0
    for host in range(words.n_hosts):
        peer = words.peers[host]
        events = 0 if peer.came == peer.to_come else POLLIN
        if peer.sent < _ready_bytes(words, peer):
            events |= POLLOUT
        if host != words.here and events != 0:
            words.peer_polls[count] = peer.fd | (events << 32)  # struct pollfd
            count += 1
    milliseconds = (duration_ns + MILLISECOND_NS - 1) // MILLISECOND_NS
    return poll(words.peer_polls.address, count, np.int32(milliseconds)) < 0


@inline
def go_on_until(words: Exchange, call: Call, end_ns: int) -> int:
    """Go on with the messages; return an `Outcome`, which is `AGAIN` at `end_ns`."""
    idle = 0
    while True:
        result = _move(words)
        if result >= 0:
            return result
        _note_broadcast(words, call)
        if _combine_some(words, call) or result == MOVED:
            idle = 0
        elif _is_over(words, call):
            return Outcome.AGREED
        else:
            if load64(words.abort) != 0:
                return Outcome.ABORTED
            time_ns = now_ns(words)
            if time_ns >= end_ns:
                return Outcome.AGAIN
            if idle > YIELDS:
                if _sleep(words, end_ns - time_ns):
                    return Outcome.AGAIN
            else:
                idle = yielded(words, idle, time_ns)
