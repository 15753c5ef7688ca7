"""The parts of calls through MPI: MPI functions, called by address, and waits for requests.

Every wait polls, as MPI itself does, and meanwhile checks whether the communicator has been given
up, a rank of this host is lost, the deadline has passed, or Ctrl-C was pressed. Requests that are
left behind then cannot be cancelled, so their memory must be kept (`MpiWords.is_given_up`).
"""

from __future__ import annotations

from gpucoll.backends.mpi.words import CALL_TAG, MpiWords
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_copy,
    call_foreign,
    call_reduce,
    load32,
    pause,
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
from gpucoll.transport.shared.libc import free, malloc
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome

FIRST_POLLS = 40
"""How often a wait polls before it lets other Python threads run."""


# --- one function, one request --------------------------------------------------------------------


@inline
def next_request(words: MpiWords) -> int:
    """Return the address for the next request of this call."""
    return words.requests + words.n_requests * words.request_bytes


@inline
def issue(
    words: MpiWords,
    function: int,
    a: int,
    b: int,
    c: int,
    d: int,
    e: int,
    f: int,
    g: int = 0,
    h: int = 0,
    i: int = 0,
    j: int = 0,
) -> None:
    """Call an MPI function that starts something and fills `next_request`."""
    error = signed32(call_foreign(function, a, b, c, d, e, f, g, h, i, j))
    if error != 0:
        words.error = error
    else:
        words.n_requests += 1


@inline
def poll_requests(words: MpiWords) -> bool:
    """Return True if all requests have ended or MPI has failed."""
    count, flag = words.n_requests, words.at.flag
    words.flag = 0
    if count == 1:
        error = call_foreign(words.test, words.requests, flag, words.statuses, 0, 0, 0, 0, 0, 0, 0)
    else:
        error = call_foreign(
            words.test_all, count, words.requests, flag, words.statuses, 0, 0, 0, 0, 0, 0
        )
    if error != 0:
        words.error = int(error)
        return True
    return load32(flag) != 0


@inline
def _leaves_it_to_python(context: Context) -> bool:
    """Return whether Python finds the late rank, as on several hosts: leaders query each other."""
    hosts = Exchange(context.hosts)
    if not hosts or context.rank != 0:
        return False
    hosts.outcome = Outcome.DEADLINE
    return True


@inline
def _poll_long(context: Context, words: MpiWords) -> int:
    """Poll until all requests have ended, yielding to others; return a status."""
    release_interpreter(context)
    time_ns = start_clock(context)
    look_ns = time_ns + context.slice_ns
    end_ns = context.start_ns + context.timeout_ns
    while not poll_requests(words):
        yield_once()
        if is_aborted(context):
            return Status.EVENT
        time_ns = now_ns(context)
        if time_ns > end_ns and _leaves_it_to_python(context):
            return Status.NOT_YET
        if time_ns >= look_ns or time_ns > end_ns:
            status = look_around(context, Abort.DEADLINE)
            if status != Status.OK:
                return status
            look_ns = now_ns(context) + context.slice_ns
    return Status.OK


@inline
def finish(context: Context, words: MpiWords) -> int:
    """Wait until everything that was issued has ended; return a status."""
    status: int = Status.OK
    is_done, polls = words.n_requests == 0 and words.error == 0, 0
    while not is_done and polls < FIRST_POLLS and words.error == 0:
        is_done = poll_requests(words)
        polls += 1
        pause()
    if not is_done and words.error == 0:
        status = _poll_long(context, words)
    if words.error != 0:
        give_up(context, Abort.BACKEND, context.rank)
        status = Status.EVENT
    if status != Status.OK:
        words.is_given_up = 1
    words.n_requests = 0
    return status


# --- memory ---------------------------------------------------------------------------------------


@inline
def scratch_of(words: MpiWords, size_bytes: int) -> int:
    """Return scratch memory of at least this size; 0: there is none."""
    if size_bytes > words.scratch_bytes:
        free(words.scratch)
        words.scratch = malloc(size_bytes)
        words.scratch_bytes = size_bytes if words.scratch != 0 else 0
    return words.scratch


@inline
def vector_of(words: MpiWords, which: int) -> int:
    """Return the address of a vector argument of MPI, with one number for each rank."""
    return words.vectors + 8 * which * words.world_size


@inline
def set_number(words: MpiWords, which: int, rank: int, value: int) -> None:
    """Set a rank's number in such a vector, which is an MPI_Count or an int."""
    if words.has_large_counts != 0:
        store64(vector_of(words, which) + 8 * rank, value)
    else:
        store32_release(vector_of(words, which) + 4 * rank, value)


# --- an exchange between all pairs ----------------------------------------------------------------


@inline
def set_move(
    words: MpiWords, rank: int, source: int, send_bytes: int, destination: int, receive_bytes: int
) -> None:
    """Set what is sent to a rank, and where data from it goes."""
    move = words.moves[rank]
    move.send_from = source
    move.send_bytes = send_bytes
    move.receive_at = destination
    move.receive_bytes = receive_bytes


@inline
def _begin_round(words: MpiWords, step: int, done: int) -> None:
    """Start one piece to the rank `step` places ahead, and one from the rank as far behind."""
    me, world_size, moves = words.rank, words.world_size, words.moves
    dest, source = (me + step) % world_size, (me + world_size - step) % world_size
    sent, received = moves[dest], moves[source]
    comm, byte, most = words.communicator, words.byte, words.most_bytes
    size_bytes = min(received.receive_bytes - done, most)
    if size_bytes > 0:
        at = received.receive_at + done
        issue(
            words, words.receive, at, size_bytes, byte, source, CALL_TAG, comm, next_request(words)
        )
    size_bytes = min(sent.send_bytes - done, most)
    if size_bytes > 0:
        at = sent.send_from + done
        issue(words, words.send, at, size_bytes, byte, dest, CALL_TAG, comm, next_request(words))


@inline
def exchange(context: Context, words: MpiWords) -> int:
    """Move everything given by `set_move`, in pieces that fit into a count.

    A rank's data for itself is copied if the host can access it; otherwise it is a message, too.
    """
    me, world_size, moves = words.rank, words.world_size, words.moves
    largest, first = 0, 1 - words.is_on_gpu
    for rank in range(world_size):
        move = moves[rank]
        if rank != me or first == 0:
            largest = max(largest, move.send_bytes, move.receive_bytes)
    mine = moves[me]
    is_elsewhere = mine.send_from != mine.receive_at
    if mine.send_bytes > 0 and is_elsewhere and first == 1:
        source, size_bytes = mine.send_from, mine.send_bytes
        call_copy(context.copy_plain, mine.receive_at, source, size_bytes, 0)
    done = 0
    status: int = Status.OK
    while done < largest and status == Status.OK:
        for step in range(first, world_size):
            _begin_round(words, step, done)
        done += words.most_bytes
        status = finish(context, words)
    return status


@inline
def broadcast_by_messages(
    context: Context, words: MpiWords, root: int, source: int, destination: int, size_bytes: int
) -> int:
    """Give all ranks the root's data along a binomial tree; the root's own copy is optional.

    After each round twice as many ranks have it.
    """
    me, world_size = words.rank, words.world_size
    place, has = (me + world_size - root) % world_size, 1
    status: int = Status.OK
    memory = source if place == 0 else destination
    while has < 2 * world_size and status == Status.OK:
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
def combine(
    words: MpiWords,
    call: Call,
    destination: int,
    first: int,
    stride: int,
    n_ranks: int,
    size_bytes: int,
) -> None:
    """Combine the inputs of the first ranks, `stride` bytes apart, in order."""
    if size_bytes <= 0:
        return
    inputs = words.inputs
    for rank in range(n_ranks):
        inputs[rank] = first + rank * stride
    landing = Words(inputs.address + 8 * words.world_size)
    landing[0] = destination
    parameter = call.parameter + call.parameter_stride * (n_ranks - 1)
    count = size_bytes // call.part_bytes
    call_reduce(call.kernel, landing, 1, inputs, n_ranks, count, parameter, 0)


# --- copies of blocks -----------------------------------------------------------------------------


@inline
def no_memory(context: Context) -> int:
    """Give the communicator up: all ranks are in the call, and this one cannot take part."""
    give_up(context, Abort.NO_ROOM, context.rank)
    return Status.EVENT


@inline
def copy_plain(context: Context, destination: int, source: int, size_bytes: int) -> None:
    """Copy, unless the data is in place already."""
    if size_bytes > 0 and destination != source:
        call_copy(context.copy_plain, destination, source, size_bytes, 0)


@inline
def copied(context: Context, source: int, size_bytes: int) -> int:
    """Return a copy of this rank's input; 0: there is no memory for it.

    MPI_IN_PLACE would need no copy, but all ranks must give it or none (Open MPI then takes another
    algorithm), and here each rank may choose.
    """
    copy = malloc(max(size_bytes, 1))
    if copy != 0:
        copy_plain(context, copy, source, size_bytes)
    return copy
