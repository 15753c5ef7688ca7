"""The words that Python and compiled loops share in a process's own memory.

The context is an int64 array, one for each communicator. A call block is one for each prepared
call. A table of point-to-point operations has a row of such words for each operation. `layout`
describes what ranks share.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, word, words
from gpucoll.codes import Codes


class Status(Codes):
    """The results of compiled loops."""

    OK = 0
    EVENT = 1  # the segment's event line shows an event
    MISMATCH = 2  # another rank's signature differs from this rank's
    DEADLINE = 3  # a wait ran out
    LOST = 4  # a rank that is needed is gone or has closed
    SIGNAL = 5  # a Python signal handler raised; the exception is kept in the context
    NOT_RUN = 6  # the communicator was not idle
    MORE = 8  # there is more to come; for calls on GPU arrays: a rank is late
    MISFIT = 9  # a message is larger than its receive, or of another dtype
    NO_ROOM = 10  # there is no memory for a part of the segment; nothing has happened
    NOT_YET = 11  # the caller's own time is over, and what it waits for is not done but goes on


class State(Codes):
    """What a communicator is doing; compiled entries serve it in IDLE only."""

    IDLE = 0
    BUSY = 1
    NEEDS_PYTHON = 2  # an event to answer, closed, broken, forked
    TAKEN = 3  # for blocking messages: Python makes one


class Context(Block):
    """What the compiled loops of a communicator share."""

    # The rank, and how far it is.
    state: int
    status: int
    rank: int
    world_size: int
    sequence: int
    verified: int  # the last call up to which this rank has compared all ranks' signatures
    chunk: int
    path: int
    mismatched: int
    pending: int  # calls that were started, and reasons to leave every call to Python
    interpreter: int  # 1: this call holds it; an address: it was released with that thread state
    # Addresses in the segment, in the arenas, in this process.
    event_line: int
    event_seen: int
    status_lines: int
    records: int
    slots: int
    payload_stride: int
    filled: int
    read: int
    stages: int
    arenas: int  # address of the addresses of all ranks' `PeerArena` words
    arena_base: int
    arena_bytes: int
    sources: int
    destinations: int
    pids: Field[Words]
    # Limits that choose a call's path.
    one_shot_bytes: int
    rooted_bytes: int
    chunk_bytes: int
    symmetric_min_bytes: int
    single_copy_min_bytes: int
    single_copy_max_bytes: int
    gather_copy_max_bytes: int
    single_copy: int  # whether every rank can read every other's memory: 0: unknown, 1: yes, 2: no
    prefetch_bytes: int
    # Kernels and functions, by address.
    copy_plain: int
    copy_posted: int
    copy_in: int
    copy_out: int
    copy_take: int
    refill: int
    wait_long: int
    # Waiting.
    spins: int
    yields: int
    sleepy: int  # how many of the next waits sleep without yielding first
    slice_ns: int
    start_ns: int  # when this call began to wait; 0: it has not
    timeout_ns: int
    poll_fds: int
    clock: Field[Words] = words(2)
    futex_timeout: Field[Words] = words(2)
    io_vectors: Field[Words] = words(4)
    raised: Field[Words] = words(3)
    # Messages.
    bells: int
    mailboxes: int
    mailbox_stride: int
    post_bytes: int  # of data after an envelope
    eager_bytes: int
    message_rows: Field[Transfer] = word(70)  # address of the two rows of a blocking call
    # Ranks on several hosts.
    hosts: int = word(90)  # address of an `Exchange` (`transport.tcp.exchange_words`); 0: one host
    # Calls on GPU arrays.
    enqueued_lines: int = word(110)
    enqueued: int  # address of the calls' records
    enqueued_count: int  # how many records a rank has
    enqueued_sequence: int  # number of the last call posted
    enqueued_seen: int  # the call up to which all ranks had compared, at the last look
    enqueued_late: int  # the rank that has not posted the next call to compare, or -1
    # Memory of the segment that is taken when it is first used; see `room`.
    segment_fd: int
    room_bytes: int  # may be taken before the host's free memory is checked again
    refused_bytes: int
    refused_error: int  # the kernel's errno; 0: more than `room_bytes` were needed
    payloads: int  # address of the payloads that are larger than a slot
    ready_bytes: int  # up to this size a call has all the memory that it needs
    ready_payloads: int  # up to this size payloads have memory
    ready_stages: int  # whether this rank's stages have memory
    make_ready: int  # address of the function that takes memory
    map_more: int  # address of the function that maps more of a peer's arena
    # Ranks on one CPU; see `flags`.
    cpus: int  # address of the words with the rank that waited last on each CPU
    full_spins: int  # `spins` if this rank has its CPU for itself
    sharing: int  # how many more waits must find no other rank on this CPU; 0: it has its own
    sharing_waits: int  # how many waits there were since another rank was found
    # Asynchronous calls.
    holds: int  # how many reasons there are for Python alone to start them
    # Pending messages.
    transfers: Field[TransferTable]  # address of their table; see `TransferTable`; 0: there is none
    message_step: int  # address of the function that advances them by a step
    opened: int
    acknowledged: int
    large_ring_bytes: int
    eager_room_bytes: int
    # Limits that choose a call's path, continued.
    root_copy_min_bytes: int  # 0: no limit of its own for data from a root
    copy_exchanged: int  # kernel that copies out of a stage while this rank fills its own
    # For those that watch the job from outside; see `spans`.
    spans: int  # address of this rank's spans; they have memory while somebody watches
    note_arrival: int  # addresses of functions
    note_end: int
    note_message: int
    n_stages: int  # stages of each rank
    streamed_bytes: int
    fetched_min_bytes: int
    # For `filling`: a kernel whose stores go past the caches, or 0; and this rank's own counts.
    copy_nontemporal: int
    nontemporal_left: int  # how many bytes are still to be stored past the caches
    fill_span: int  # how many the next time
    fill_tried: int  # how many bytes were stored in the ordinary way since then
    fill_slow: int  # how many of them took long
    fill_clock: Field[Words] = words(2)


class Call(Block):
    """A prepared call."""

    context: Field[Context]
    collective: int
    operation: int
    dtype: int
    root: int
    count: int
    size_bytes: int  # of this rank's input
    digest: int
    source: int
    destination: int
    kernel: int  # combines inputs; 0: the call only moves
    parameter: int  # of the kernel: address of a factor or divisor
    part_bytes: int  # what the kernel counts: an element, or half of a complex one
    item_bytes: int  # of an element, which is never divided
    base_digest: int
    parameter_bits: int
    n_dimensions: int
    dimensions: Field[Words] = words(4)
    loop: int  # address of the collective's compiled loop
    # See `gpucoll.collectives`.
    flow: int
    operands: int
    # The results of a reduction, by rank.
    scan_kernel: int
    parameter_stride: int  # between the parameters of successive ranks' results; 0: one for all
    identity: int  # address of the element for an empty reduction
    # The blocks of a movement.
    spreads: int  # the input is one block for each rank
    gathers: int  # the output is one block from each rank
    block_bytes: int
    offsets: Field[Words]  # address of the blocks' world_size + 1 offsets in bytes; 0: equal blocks
    landings: Field[Words]  # where each rank's block goes (addresses, if `destination` is 0)
    pieces: Field[Words]  # all_to_all with counts: bytes to each rank, then bytes from each rank
    largest_bytes: int  # the largest input of any rank
    n_counts: int
    counts: Field[Words]  # address of the counts as the caller gave them
    # How compiled entries relate input and output.
    source_parts: int
    destination_parts: int
    largest_parts: int
    in_place_block: int  # by how many blocks the input begins after the output, in place
    signs_count: int  # the signature has the block's count instead of the input's shape
    # Point-to-point.
    transfers: Field[Transfer]
    n_transfers: int
    is_started: int  # whether the table of pending messages has them already
    # A list of arrays.
    segments: Field[Segment]  # its table; 0: one array
    n_segments: int
    prepares: int  # whether the op changes an input before it combines it
    # A call on GPU arrays; see `Record`.
    sent: int
    received: int
    # A spread movement whose input is one array for each rank.
    inputs: Field[Words]  # address of their addresses; 0: one array
    # The two parts of a call that is started and waited for later; 0: it has none.
    post: int  # address of the loop that posts it without waiting, and returns NOT_RUN if it cannot
    finish: int  # address of the loop that does the rest
    reads: int
    reads_end: int  # the addresses between which its input lies
    writes: int
    writes_end: int
    # Point-to-point, again.
    description: Field[Words]  # for receivers, of a dtype without a number
    description_bytes: int
    until_ns: int  # when to return NOT_YET; 0: never; 1: at once
    leaves: int  # whether a signal ends only this wait, and the awaited operation goes on
    shown_root: int  # the root that errors show: that of the call that this is a part of
    # Through MPI.
    mpi: int  # address of the communicator's words; see `backends.mpi.words`
    mpi_dtype: int  # MPI's handles; without them the call is a movement, or our kernels reduce
    mpi_operation: int
    mpi_divides: int  # whether `kernel` makes the average from MPI's sum


class Segment(Block):
    """One array of a list, which is reduced as if its arrays were one: the whole."""

    end: int  # where it ends in the whole
    input: int  # its address minus where it begins in the whole; plus an offset: an address
    output: int


class Started(Block):
    """One started call: an entry of `Pending`."""

    call: Field[Call]  # address of its call block
    timeout_ns: int
    status: int
    sequence: int  # the number under which it was posted ahead
    futex_timeout: Field[Words] = words(2)  # for the thread that waits for it
    own_call: Field[Call] = words(Call.n_words)  # the entry's own call block


PENDING_CALLS = 64
"""Entries of the queue; a power of two."""
STARTED_WORDS = -(-Started.n_words // 8) * 8  # whole cache lines


class Pending(Block):
    """The queue of started calls, one for each communicator: `entries.pending`.

    Each call has a number: 1, 2, ... Fields that different threads write are on separate lines.
    """

    context: Field[Context]
    thread: Field[Thread] = word(2)  # address of the words of the process's thread
    wait_long: int  # address of the wait for a thread of Python's
    wait_long_alone: int  # address of the wait for any other thread
    timeout_ns: int  # the communicator's deadline
    tail: int = word(8)  # the last number given, with the interpreter held
    reaped: int  # the last call whose end Python has noted
    wanted: int = word(16)  # the last call that the thread is to run
    done: int = word(24)  # the last call that has ended
    bell: int  # rung at every end: {int32 rings, int32 sleepers}
    posted: int = word(32)  # the last call that has been posted by the thread that runs calls
    is_running: int  # whether a thread runs calls of the queue, or has not quite stopped
    entries: Field[Words] = words(PENDING_CALLS * STARTED_WORDS, index=40)


THREAD_QUEUES = 1024
"""How many communicators the thread serves; on any more, only waiting threads run calls."""


class Thread(Block):
    """A process's thread, which runs started calls and steps messages."""

    bell: int  # {int32 rings, int32 sleepers}
    stop: int = word(8)
    current: int = word(16)  # the queue that it looks at, which must stay in memory
    is_running: int
    futex_timeout: Field[Words] = words(2)
    count: int  # places in use, with the free ones between them
    # Addresses; a table of messages has the last bit set.
    queues: Field[Words] = words(THREAD_QUEUES, index=24)


class Path(Codes):
    """The path that a call took; `Communicator.describe` and the bench show it."""

    NONE = 0
    LOCAL = 1
    ONE_SHOT = 2
    STAGED = 3
    SYMMETRIC = 4
    SINGLE_COPY = 5
    MESSAGE = 6
    MPI = 7

    @property
    def spelled(self) -> str:
        """The name as users read it: one-shot, staged, symmetric, single copy."""
        return self.name.lower().replace("one_shot", "one-shot").replace("_", " ")


# --- point-to-point ---


class Transfer(Block):
    """One send, receive or probe: a row."""

    kind: int
    peer: int
    tag: int
    memory: int
    size_bytes: int  # of the sent message; the limit of a received one
    dtype: int
    state: int
    done_bytes: int
    way: int  # how the message travels; see `layout.Way`
    place: int  # where the receiver finds it, if not in the mailbox
    acknowledgement: int  # 1 + the number of the word that acknowledges it; 0: none
    mode: int  # see `Mode`
    found_peer: int
    found_tag: int
    found_bytes: int
    found_dtype: int
    found_number: int  # its number among all messages of that rank to this one
    n_dimensions: int
    dimensions: Field[Words] = words(8)
    number: int  # for a receive: the only message of that rank to match; 0: match by tag
    held: Field[Held]  # address of the message that was taken aside for this receive; see `Held`
    description: Field[Words]
    description_bytes: int
    timeout_ns: int
    deadline_ns: int  # 0: not set yet
    next: Field[Transfer]
    is_waiting: int  # for a send: no part of it is in the mailbox
    kept: int  # a Python object that is kept alive, and the row's memory with it; 0: none
    begun_ns: int  # when it was posted, by the monotonic clock; 0: nobody watched


class Kind(Codes):
    """What a row does."""

    SEND = 1
    RECV = 2
    PROBE = 3
    TAKE = 4  # a receive without size and dtype: it gets a `Held` message


class Mode(Codes):
    """How a message is sent or received; modes may be added."""

    SYNCHRONOUS = 1  # a send is complete when it is matched
    FOLLOWS = 2  # it is a part of the message before: no receive by tag gets it
    WITHDRAWS = 4  # for a receive or probe: its deadline is for a match, and ends only this row


class Progress(Codes):
    """The state of a row; from DONE on it is over."""

    NEW = 0
    WAITING = 1
    UNDER_WAY = 2
    DONE = 3
    MISFIT = 4  # the message that matches is larger, or has another dtype; it stays
    GONE = 5  # another receive has got the message that was requested by its number
    DROPPED = 6  # Python withdrew it
    EXPIRED = 7  # no message had matched at its own deadline: it was withdrawn


class LinkedList(Block):
    """A list of `Transfer` or `Held` in order; each names the next."""

    first: int
    last: int


class TransferTable(Block):
    """A communicator's table of pending messages, in this process's memory."""

    lock: int
    pending: int  # how many rows are not over
    finished: int  # how many rows have ended so far
    moves: int  # counts moves of data, so that a waiting thread sees progress
    is_dead: int  # whether the table must not be touched any more
    context: Field[Context]  # the steps' own context
    calls: Field[Context]  # the context of collectives
    peers: Field[Mailbox]  # one for each rank
    moving: Field[LinkedList] = words(2)  # rows that need no record: sends, receives that fetch
    posted: Field[LinkedList] = words(2)  # receives and probes that no message has matched
    n_wanted: int  # receives and probes that the mailboxes can serve
    n_any: int  # posted receives and probes from any source
    held: Field[LinkedList] = words(2)  # messages that were taken aside
    last_sender: int  # the rank of the last message: ANY_SOURCE looks at the next rank first
    free_words: Field[Words]  # address of the numbers of acknowledgements that are not in use
    n_free_words: int
    needs_room: Field[Transfer]  # a send for which memory has to be granted; 0: none
    turn: int  # counts steps
    noted: int  # the send that `layout.Doing` shows to others
    post: int  # address of `message_step.message_post`
    step: int  # address of `message_step.message_step`
    seen_ns: int  # when a thread last checked for lost ranks
    thread: Field[Thread]  # address of the thread that steps it while it is wanted; 0: none does
    is_wanted: int  # see `entries.pending.NEW`
    waiters: int  # threads that wait for messages: they step, and the thread does not
    looks_left: int  # how often the thread still looks while nothing is pending
    # Messages between hosts; 0 if there are none.
    fetch: int  # address of the function that requests a message's data
    left: Field[Words]  # a word for each rank: 1 if a rank of another host sends nothing more
    wires: int  # address of the connections; see `backends.cpu.wires.words`
    longest_slice_ns: int  # how long a wait sleeps at most before it looks again
    # A function that compiled entries call.
    grant: int  # a Python function without arguments: grants the memory that `needs_room` is for


THREAD_MIN_BYTES = 64 << 10
"""From this size on the thread advances a message that was begun: 10 us of copying."""


class Mailbox(Block):
    """A rank's view of the mailboxes to and from another rank, in its own memory."""

    out_area: int  # address of the outgoing mailbox; 0: not used yet
    out_ring: int  # which of its rings is written
    out_offset: int  # the position in that ring
    out_other: int  # the position in the other ring
    out_written: int  # bytes written so far
    out_base: int  # `out_written` when writing to this ring began
    out_tail: int  # bytes known to be taken
    out_sent: int  # bytes of messages
    out_matched: int  # bytes of messages known to be matched
    out_number: int  # of the last message
    out_waiting: int  # rows that are not in the mailbox completely
    out_turn: int  # the step in which such a row was found
    out_has_large: int  # whether the large ring has memory
    in_area: int = word(16)
    in_ring: int
    in_offset: int
    in_other: int
    in_taken: int
    in_matched: int
    in_number: int  # of the last message that was taken
    in_wanted: int  # receives and probes of this rank's messages
    in_target: int  # the row or held message whose parts come next; 0: none
    in_target_is_held: int
    in_count: int  # of messages that were matched
    padding: Field[Words] = words(5)


class Held(Block):
    """A message that was taken aside, followed by its description and its data."""

    next: Field[Held]
    sender: int
    tag: int
    size_bytes: int
    dtype: int
    way: int
    place: int
    acknowledgement: int
    mode: int
    number: int
    cost: int
    done_bytes: int
    is_whole: int
    description_bytes: int
    data: int  # address
    n_dimensions: int
    dimensions: Field[Words] = words(8)
    owner: Field[Transfer]  # the receive that it belongs to; 0: any receive may get it
