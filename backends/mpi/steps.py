"""The parts of calls through MPI: MPI functions, called by address, and waits for requests.

Every wait polls, as MPI itself does, and meanwhile checks whether the communicator has been given
up, a rank of this host is lost, the deadline has passed, or Ctrl-C was pressed. Requests that are
left behind then cannot be cancelled, so their memory must be kept (`Word.IS_GIVEN_UP`).
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.mpi import words as mpi_words
from gpucoll.backends.mpi.words import CALL_TAG, Word
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import (
    call_copy,
    call_foreign,
    call_reduce,
    get,
    load32,
    pause,
    put,
    signed32,
    store32_release,
    store64,
)
from gpucoll.transport.shared.flags import (
    give_up,
    is_aborted,
    look_around,
    now_ns,
    release_interpreter,
    start_clock,
    yield_once,
)
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import KERNEL, OK, PARAMETER, PART_BYTES, START_NS
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome

RANK, WORLD_SIZE = int(Word.RANK), int(Word.WORLD_SIZE)
COMMUNICATOR, BYTE, IN_PLACE = int(Word.COMMUNICATOR), int(Word.BYTE), int(Word.IN_PLACE)
HAS_LARGE_COUNTS, MOST_BYTES = int(Word.HAS_LARGE_COUNTS), int(Word.MOST_BYTES)
REQUESTS, N_REQUESTS = int(Word.REQUESTS), int(Word.N_REQUESTS)
INPUTS, MOVES = int(Word.INPUTS), int(Word.MOVES)
IS_ON_GPU = int(Word.IS_ON_GPU)
STRIDE, COPY = int(Call.PARAMETER_STRIDE), int(Context.COPY_PLAIN)
SCRATCH = int(Word.SCRATCH)
_STATUSES, _FLAG, ERROR = int(Word.STATUSES), int(Word.FLAG), int(Word.ERROR)
_REQUEST_BYTES, _IS_GIVEN_UP = int(Word.REQUEST_BYTES), int(Word.IS_GIVEN_UP)
_VECTORS = int(Word.VECTORS)
_SCRATCH_BYTES, _TEST, _TEST_ALL = int(Word.SCRATCH_BYTES), int(Word.TEST), int(Word.TEST_ALL)
SEND, RECEIVE = int(Word.SEND), int(Word.RECEIVE)
_SLICE_NS, _TIMEOUT_NS = int(Context.SLICE_NS), int(Context.TIMEOUT_NS)
_EVENT, _CONTEXT_RANK = int(Status.EVENT), int(Context.RANK)
_DEADLINE, _BACKEND = int(Abort.DEADLINE), int(Abort.BACKEND)
_HOSTS, _NOT_YET = int(Context.HOSTS), int(Status.NOT_YET)
MOVE_BYTES = 8 * mpi_words.MOVE_WORDS
_SEND_FROM, _SEND_BYTES = mpi_words.SEND_FROM, mpi_words.SEND_BYTES
_RECEIVE_AT, _RECEIVE_BYTES = mpi_words.RECEIVE_AT, mpi_words.RECEIVE_BYTES
FIRST_POLLS = 40
"""How often a wait polls before it lets other Python threads run."""

_i64 = types.int64
allocate = types.ExternalFunction("malloc", _i64(_i64))
release = types.ExternalFunction("free", types.void(_i64))


# --- one function, one request --------------------------------------------------------------------


@inline
def next_request(words):
    """Return the address for the next request of this call."""
    return get(words, REQUESTS) + get(words, N_REQUESTS) * get(words, _REQUEST_BYTES)


@inline
def issue(words, function, a, b, c, d, e, f, g, h, i, j):
    """Call an MPI function that starts something and fills `next_request`."""
    error = signed32(call_foreign(get(words, function), a, b, c, d, e, f, g, h, i, j))
    if error != 0:
        put(words, ERROR, error)
    else:
        put(words, N_REQUESTS, get(words, N_REQUESTS) + 1)


@inline
def poll_requests(words):
    """Return True if all requests have ended or MPI has failed."""
    count, flag = get(words, N_REQUESTS), words + 8 * _FLAG
    put(words, _FLAG, 0)
    if count == 1:
        error = call_foreign(
            get(words, _TEST),
            get(words, REQUESTS),
            flag,
            get(words, _STATUSES),
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        )
    else:
        error = call_foreign(
            get(words, _TEST_ALL),
            count,
            get(words, REQUESTS),
            flag,
            get(words, _STATUSES),
            0,
            0,
            0,
            0,
            0,
            0,
        )
    if error != 0:
        put(words, ERROR, np.int64(error))
        return True
    return load32(flag) != 0


@inline
def _leaves_it_to_python(context):
    """Return whether Python finds the late rank, as on several hosts: leaders query each other."""
    hosts = Exchange(get(context, _HOSTS))
    if not hosts or get(context, _CONTEXT_RANK) != 0:
        return False
    hosts.outcome = Outcome.DEADLINE
    return True


@inline
def _poll_long(context, words):
    """Poll until all requests have ended, yielding to others; return a status."""
    release_interpreter(context)
    time_ns = start_clock(context)
    look_ns = time_ns + get(context, _SLICE_NS)
    end_ns = get(context, START_NS) + get(context, _TIMEOUT_NS)
    while not poll_requests(words):
        yield_once()
        if is_aborted(context):
            return _EVENT
        time_ns = now_ns(context)
        if time_ns > end_ns and _leaves_it_to_python(context):
            return _NOT_YET
        if time_ns >= look_ns or time_ns > end_ns:
            status = look_around(context, _DEADLINE)
            if status != OK:
                return status
            look_ns = now_ns(context) + get(context, _SLICE_NS)
    return OK


@inline
def finish(context, words):
    """Wait until everything that was issued has ended; return a status."""
    status, is_done = OK, get(words, N_REQUESTS) == 0 and get(words, ERROR) == 0
    polls = 0
    while not is_done and polls < FIRST_POLLS and get(words, ERROR) == 0:
        is_done = poll_requests(words)
        polls += 1
        pause()
    if not is_done and get(words, ERROR) == 0:
        status = _poll_long(context, words)
    if get(words, ERROR) != 0:
        give_up(context, _BACKEND, get(context, _CONTEXT_RANK))
        status = _EVENT
    if status != OK:
        put(words, _IS_GIVEN_UP, 1)
    put(words, N_REQUESTS, 0)
    return status


# --- memory ---------------------------------------------------------------------------------------


@inline
def scratch_of(words, size_bytes):
    """Return scratch memory of at least this size; 0: there is none."""
    if size_bytes > get(words, _SCRATCH_BYTES):
        release(get(words, SCRATCH))
        put(words, SCRATCH, allocate(size_bytes))
        put(words, _SCRATCH_BYTES, size_bytes if get(words, SCRATCH) != 0 else 0)
    return get(words, SCRATCH)


@inline
def vector_of(words, which):
    """Return the address of a vector argument of MPI, with one number for each rank."""
    return get(words, _VECTORS) + 8 * which * get(words, WORLD_SIZE)


@inline
def set_number(words, which, rank, value):
    """Set a rank's number in such a vector, which is an MPI_Count or an int."""
    if get(words, HAS_LARGE_COUNTS) != 0:
        store64(vector_of(words, which) + 8 * rank, value)
    else:
        store32_release(vector_of(words, which) + 4 * rank, value)


# --- an exchange between all pairs ----------------------------------------------------------------


@inline
def set_move(words, rank, source, send_bytes, destination, receive_bytes):
    """Set what is sent to a rank, and where data from it goes."""
    move = get(words, MOVES) + MOVE_BYTES * rank
    put(move, _SEND_FROM, source)
    put(move, _SEND_BYTES, send_bytes)
    put(move, _RECEIVE_AT, destination)
    put(move, _RECEIVE_BYTES, receive_bytes)


@inline
def _begin_round(words, step, done):
    """Start one piece to the rank `step` places ahead, and one from the rank as far behind."""
    me, world_size, moves = get(words, RANK), get(words, WORLD_SIZE), get(words, MOVES)
    dest, source = (me + step) % world_size, (me + world_size - step) % world_size
    sent, received = moves + MOVE_BYTES * dest, moves + MOVE_BYTES * source
    comm, byte, most = get(words, COMMUNICATOR), get(words, BYTE), get(words, MOST_BYTES)
    size_bytes = min(get(received, _RECEIVE_BYTES) - done, most)
    if size_bytes > 0:
        at = get(received, _RECEIVE_AT) + done
        issue(
            words,
            RECEIVE,
            at,
            size_bytes,
            byte,
            source,
            CALL_TAG,
            comm,
            next_request(words),
            0,
            0,
            0,
        )
    size_bytes = min(get(sent, _SEND_BYTES) - done, most)
    if size_bytes > 0:
        at = get(sent, _SEND_FROM) + done
        issue(words, SEND, at, size_bytes, byte, dest, CALL_TAG, comm, next_request(words), 0, 0, 0)


@inline
def exchange(context, words):
    """Move everything given by `set_move`, in pieces that fit into a count.

    A rank's data for itself is copied if the host can access it; otherwise it is a message, too.
    """
    me, world_size, moves = get(words, RANK), get(words, WORLD_SIZE), get(words, MOVES)
    largest, first = 0, 1 - get(words, IS_ON_GPU)
    for rank in range(world_size):
        move = moves + MOVE_BYTES * rank
        if rank != me or first == 0:
            largest = max(largest, get(move, _SEND_BYTES), get(move, _RECEIVE_BYTES))
    mine = moves + MOVE_BYTES * me
    is_elsewhere = get(mine, _SEND_FROM) != get(mine, _RECEIVE_AT)
    if get(mine, _SEND_BYTES) > 0 and is_elsewhere and first == 1:
        source, size_bytes = get(mine, _SEND_FROM), get(mine, _SEND_BYTES)
        call_copy(get(context, COPY), get(mine, _RECEIVE_AT), source, size_bytes, 0)
    done, status = 0, OK
    while done < largest and status == OK:
        for step in range(first, world_size):
            _begin_round(words, step, done)
        done += get(words, MOST_BYTES)
        status = finish(context, words)
    return status


@inline
def broadcast_by_messages(context, words, root, source, destination, size_bytes):
    """Give all ranks the root's data along a binomial tree; the root's own copy is optional.

    After each round twice as many ranks have it.
    """
    me, world_size = get(words, RANK), get(words, WORLD_SIZE)
    place, has, status = (me + world_size - root) % world_size, 1, OK
    memory = source if place == 0 else destination
    while has < 2 * world_size and status == OK:
        for rank in range(world_size):
            set_move(words, rank, 0, 0, 0, 0)
        if has >= world_size:  # all others have it; the root's own copy follows
            if place == 0 and destination != 0:
                set_move(words, me, source, size_bytes, destination, size_bytes)
        elif place < has and place + has < world_size:
            set_move(words, (me + has) % world_size, memory, size_bytes, 0, 0)
        elif has <= place < 2 * has:
            set_move(words, (me + world_size - has) % world_size, 0, 0, memory, size_bytes)
        status = exchange(context, words)
        has *= 2
    return status


# --- our kernels ----------------------------------------------------------------------------------


@inline
def combine(words, call, destination, first, stride, n_ranks, size_bytes):
    """Combine the inputs of the first ranks, `stride` bytes apart, in order."""
    if size_bytes <= 0:
        return
    inputs = get(words, INPUTS)
    for rank in range(n_ranks):
        put(inputs, rank, first + rank * stride)
    landing = inputs + 8 * get(words, WORLD_SIZE)
    put(landing, 0, destination)
    parameter = get(call, PARAMETER) + get(call, STRIDE) * (n_ranks - 1)
    count = size_bytes // get(call, PART_BYTES)
    call_reduce(get(call, KERNEL), landing, 1, inputs, n_ranks, count, parameter, 0)
