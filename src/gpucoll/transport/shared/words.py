"""The words that Python and compiled loops share in a process's own memory.

The context is an int64 array, one for each communicator. A call block is one for each prepared
call. A table of point-to-point operations has a row of such words for each operation. `layout`
describes what ranks share.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
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


class State(IntEnum):
    """What a communicator is doing; compiled entries serve it in IDLE only."""

    IDLE = 0
    BUSY = 1
    NEEDS_PYTHON = 2  # an event to answer, closed, broken, forked
    TAKEN = 3  # for blocking messages: Python makes one


class Context(IntEnum):
    """Fields of the context."""

    # The rank, and how far it is.
    STATE = 0
    STATUS = 1
    RANK = 2
    WORLD_SIZE = 3
    SEQUENCE = 4
    VERIFIED = 5  # the last call up to which this rank has compared all ranks' signatures
    CHUNK = 6
    PATH = 7
    MISMATCHED = 8
    PENDING = 9  # calls that were started, and reasons to leave every call to Python
    INTERPRETER = (
        10  # 1: this call holds it; an address: the thread state with which it released it
    )
    # Addresses in the segment, in the arenas, in this process.
    EVENT_LINE = 11
    EVENT_SEEN = 12
    STATUS_LINES = 13
    RECORDS = 14
    SLOTS = 15
    PAYLOAD_STRIDE = 16
    FILLED = 17
    READ = 18
    STAGES = 19
    ARENAS = 20  # address of the addresses of all ranks' `PeerArena` words
    ARENA_BASE = 21
    ARENA_BYTES = 22
    SOURCES = 23
    DESTINATIONS = 24
    PIDS = 25
    # Limits that choose a call's path.
    ONE_SHOT_BYTES = 26
    ROOTED_BYTES = 27
    CHUNK_BYTES = 28
    SYMMETRIC_MIN_BYTES = 29
    SINGLE_COPY_MIN_BYTES = 30
    SINGLE_COPY_MAX_BYTES = 31
    GATHER_COPY_MAX_BYTES = 32
    SINGLE_COPY = 33  # whether every rank can read every other's memory: 0: unknown, 1: yes, 2: no
    PREFETCH_BYTES = 34
    # Kernels and functions, by address.
    COPY_PLAIN = 35
    COPY_POSTED = 36
    COPY_IN = 37
    COPY_OUT = 38
    COPY_TAKE = 39
    REFILL = 40
    WAIT_LONG = 41
    # Waiting.
    SPINS = 42
    YIELDS = 43
    SLEEPY = 44  # how many of the next waits sleep without yielding first
    SLICE_NS = 45
    START_NS = 46  # when this call began to wait; 0: it has not
    TIMEOUT_NS = 47
    POLL_FDS = 48
    LOST_RANK = 49
    WAITED_RANK = 50
    CLOCK = 51  # 2 words
    FUTEX_TIMEOUT = 53  # 2 words
    IO_VECTORS = 55  # 4 words
    RAISED = 59  # 3 words
    # Messages.
    BELLS = 62
    MAILBOXES = 63
    MAILBOX_STRIDE = 64
    POST_BYTES = 65  # of data after an envelope
    EAGER_BYTES = 66
    MESSAGE_ROWS = 70  # address of the two rows of a blocking call
    # Ranks on several hosts.
    HOSTS = 90  # address of the words of `transport.tcp.exchange_words`; 0: all are on this host
    # Calls on GPU arrays.
    ENQUEUED_LINES = 110
    ENQUEUED = 111  # address of the calls' records
    ENQUEUED_COUNT = 112  # how many records a rank has
    ENQUEUED_SEQUENCE = 113  # number of the last call posted
    ENQUEUED_SEEN = 114  # the call up to which all ranks had compared, at the last look
    ENQUEUED_LATE = 115  # the rank that has not posted the next call to compare, or -1
    # Memory of the segment that is taken when it is first used; see `room`.
    SEGMENT_FD = 116
    ROOM_BYTES = 117  # may be taken before the host's free memory is checked again
    REFUSED_BYTES = 118
    REFUSED_ERROR = 119  # the kernel's errno; 0: more than ROOM_BYTES were needed
    PAYLOADS = 120  # address of the payloads that are larger than a slot
    READY_BYTES = 121  # up to this size a call has all the memory that it needs
    READY_PAYLOADS = 122  # up to this size payloads have memory
    READY_STAGES = 123  # whether this rank's stages have memory
    MAKE_READY = 124  # address of the function that takes memory
    MAP_MORE = 125  # address of the function that maps more of a peer's arena
    # Ranks on one CPU; see `flags`.
    CPUS = 126  # address of the words with the rank that waited last on each CPU
    FULL_SPINS = 127  # SPINS if this rank has its CPU for itself
    SHARING = 128  # how many more waits must find no other rank on this CPU; 0: it has its own
    SHARING_WAITS = 129  # how many waits there were since another rank was found
    # Asynchronous calls.
    HOLDS = 130  # how many reasons there are for Python alone to start them
    # Pending messages.
    TRANSFERS = 131  # address of their table; see `TransferTable`; 0: there is none
    MESSAGE_STEP = 132  # address of the function that advances them by a step
    OPENED = 133
    ACKNOWLEDGED = 134
    LARGE_RING_BYTES = 135
    EAGER_ROOM_BYTES = 136
    # Limits that choose a call's path, continued.
    ROOT_COPY_MIN_BYTES = 137  # 0: no limit of its own for data from a root
    COPY_EXCHANGED = 138  # kernel that copies out of a stage while this rank fills its own


CONTEXT_WORDS = 139


class Call(IntEnum):
    """Fields of a call block."""

    CONTEXT = 0
    COLLECTIVE = 1
    OPERATION = 2
    DTYPE = 3
    ROOT = 4
    COUNT = 5
    SIZE_BYTES = 6  # of this rank's input
    DIGEST = 7
    SOURCE = 8
    DESTINATION = 9
    KERNEL = 10
    PARAMETER = 11
    PART_BYTES = 12
    ITEM_BYTES = 13
    BASE_DIGEST = 14
    PARAMETER_BITS = 15
    DIMENSIONS = 16
    DIMENSION = 17  # four of them
    LOOP = 21  # address of the collective's compiled loop
    # The results of a reduction, by rank.
    SCAN_KERNEL = 22
    PARAMETER_STRIDE = 23  # between the parameters of successive ranks' results; 0: one for all
    IDENTITY = 24  # address of the element for an empty reduction
    # The blocks of a movement.
    FLOW = 25
    IS_SPREAD = 26  # the input is one block for each rank
    LANDS_APART = 27  # the output is one block from each rank
    BLOCK_BYTES = 28
    OFFSETS = 29  # address of the blocks' world_size + 1 offsets in bytes; 0: equal blocks
    LANDINGS = 30  # where each rank's block goes, as addresses if DESTINATION is 0; 0: in order
    PIECES = 31  # all_to_all with counts: bytes to each rank, then bytes from each rank
    LARGEST_BYTES = 32  # the largest input of any rank
    N_COUNTS = 33
    COUNTS = 34  # address of the counts as the caller gave them
    # How compiled entries relate input and output.
    SOURCE_PARTS = 35
    DESTINATION_PARTS = 36
    LARGEST_PARTS = 37
    IN_PLACE_BLOCK = 38  # by how many blocks the input begins after the output, in place
    SIGNS_COUNT = 39  # the signature has the block's count instead of the input's shape
    # Point-to-point.
    TRANSFERS = 40
    N_TRANSFERS = 41
    IS_STARTED = 42  # whether the table of pending messages has them already
    # A list of arrays.
    SEGMENTS = 43  # address of its table; 0: one array
    N_SEGMENTS = 44
    PREPARES = 45  # whether the op changes an input before it combines it
    # A call on GPU arrays; see `Record`.
    SENT = 46
    RECEIVED = 47
    # A spread movement whose input is one array for each rank.
    INPUTS = 48  # address of their addresses; 0: one array
    # The two parts of a call that is started and waited for later; 0: it has none.
    POST = 49  # address of the loop that posts it without waiting, and returns NOT_RUN if it cannot
    FINISH = 50  # address of the loop that does the rest
    READS, READS_END = 51, 52  # the addresses between which its input lies
    WRITES, WRITES_END = 53, 54
    # Point-to-point, again.
    DESCRIPTION = 55  # address of the description, for receivers, of a dtype without a number
    DESCRIPTION_BYTES = 56
    UNTIL_NS = 57  # when to return NOT_YET; 0: never; 1: at once
    LEAVES = 58  # whether a signal ends only this wait, and the awaited operation goes on
    SHOWN_ROOT = 59  # the root that errors show: that of the call that this is a part of
    # Through MPI.
    MPI = 60  # address of the communicator's words; see `backends.mpi.words`
    MPI_DTYPE = 61  # MPI's handles; without them the call is a movement, or our kernels reduce
    MPI_OPERATION = 62
    MPI_COLLECTIVE = 63  # MPI's collective, if COLLECTIVE is the call that this is a part of
    MPI_DIVIDES = 64  # whether KERNEL makes the average from MPI's sum


CALL_WORDS = 65


class Pending(IntEnum):
    """Fields of the queue of started calls, one for each communicator: `entries.pending`.

    Each call has a number: 1, 2, ... Fields that different threads write are on separate lines.
    """

    CONTEXT = 0
    THREAD = 2  # address of the words of the process's thread
    WAIT_LONG = 3  # address of the wait for a thread of Python's
    WAIT_LONG_ALONE = 4  # address of the wait for any other thread
    TIMEOUT_NS = 5  # the communicator's deadline
    TAIL = 8  # the last number given, with the interpreter held
    REAPED = 9  # the last call whose end Python has noted
    WANTED = 16  # the last call that the thread is to run
    DONE = 24  # the last call that has ended
    BELL = 25  # rung at every end: {int32 rings, int32 sleepers}
    POSTED = 32  # the last call that has been posted by the thread that runs calls
    IS_RUNNING = 33  # whether a thread runs calls of the queue, or has not quite stopped
    ENTRIES = 40


class Started(IntEnum):
    """Fields of one entry of that queue."""

    CALL = 0  # address of its call block
    TIMEOUT_NS = 1
    STATUS = 2
    SEQUENCE = 3  # the number under which it was posted ahead
    FUTEX_TIMEOUT = 4  # 2 words, for the thread that waits for it
    WORDS = 6  # the entry's own call block


PENDING_CALLS = 64
"""Entries of the queue; a power of two."""
STARTED_WORDS = -(-(Started.WORDS + CALL_WORDS) // 8) * 8  # whole cache lines
PENDING_WORDS = Pending.ENTRIES + PENDING_CALLS * STARTED_WORDS


class Thread(IntEnum):
    """Fields of a process's thread, which runs started calls and steps messages."""

    BELL = 0  # {int32 rings, int32 sleepers}
    STOP = 8
    CURRENT = 16  # the queue that it looks at, which must stay in memory
    IS_RUNNING = 17
    FUTEX_TIMEOUT = 18  # 2 words
    COUNT = 20  # places in use, with the free ones between them
    QUEUES = 24  # addresses; a table of messages has the last bit set


THREAD_QUEUES = 1024
"""How many communicators the thread serves; on any more, only waiting threads run calls."""
THREAD_WORDS = Thread.QUEUES + THREAD_QUEUES


class Flow(IntEnum):
    """Between which ranks the blocks of a movement go."""

    ALL = 0
    FROM_ROOT = 1
    TO_ROOT = 2


class Path(IntEnum):
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


class Transfer(IntEnum):
    """Fields of one send, receive or probe: a row."""

    KIND = 0
    PEER = 1
    TAG = 2
    ADDRESS = 3
    SIZE_BYTES = 4  # of the sent message; the limit of a received one
    DTYPE = 5
    STATE = 6
    DONE_BYTES = 7
    WAY = 8  # how the message travels; see `layout.Way`
    PLACE = 9  # where the receiver finds it, if not in the mailbox
    ACKNOWLEDGEMENT = 10  # 1 + the number of the word that acknowledges it; 0: none
    MODE = 11  # see `Mode`
    FOUND_PEER = 12
    FOUND_TAG = 13
    FOUND_BYTES = 14
    FOUND_DTYPE = 15
    FOUND_NUMBER = 16  # its number among all messages of that rank to this one
    DIMENSIONS = 17
    DIMENSION = 18  # eight of them
    NUMBER = 26  # for a receive: the only message of that rank to match; 0: match by tag
    HELD = 27  # address of the message that was taken aside for this receive; see `Held`
    DESCRIPTION = 28
    DESCRIPTION_BYTES = 29
    TIMEOUT_NS = 30
    DEADLINE_NS = 31  # 0: not set yet
    NEXT = 32
    IS_WAITING = 33  # for a send: no part of it is in the mailbox
    KEPT = 34  # a Python object that is kept alive, and the row's memory with it; 0: none


TRANSFER_WORDS = 36


class Kind(IntEnum):
    """What a row does."""

    SEND = 1
    RECV = 2
    PROBE = 3
    TAKE = 4  # a receive without size and dtype: it gets a `Held` message


class Mode(IntEnum):
    """How a message is sent or received; modes may be added."""

    SYNCHRONOUS = 1  # a send is complete when it is matched
    FOLLOWS = 2  # it is a part of the message before: no receive by tag gets it
    WITHDRAWS = 4  # for a receive or probe: its deadline is for a match, and ends only this row


class Progress(IntEnum):
    """The state of a row; from DONE on it is over."""

    NEW = 0
    WAITING = 1
    UNDER_WAY = 2
    DONE = 3
    MISFIT = 4  # the message that matches is larger, or has another dtype; it stays
    GONE = 5  # another receive has got the message that was requested by its number
    DROPPED = 6  # Python withdrew it
    EXPIRED = 7  # no message had matched at its own deadline: it was withdrawn


class TransferTable(IntEnum):
    """Fields of a communicator's table of pending messages, in this process's memory."""

    LOCK = 0
    PENDING = 1  # how many rows are not over
    FINISHED = 2  # how many rows have ended so far
    MOVES = 3  # counts moves of data, so that a waiting thread sees progress
    IS_DEAD = 4  # whether the table must not be touched any more
    CONTEXT = 5  # the steps' own context
    CALLS = 6  # the context of collectives
    PEERS = 7  # address of a `Mailbox` for each rank
    FIRST = 8  # rows that move by themselves: sends, and receives that fetch
    LAST = 9
    FIRST_POSTED = 10  # receives and probes that no message has matched, in order
    LAST_POSTED = 11
    N_WANTED = 12  # receives and probes that the mailboxes can serve
    N_ANY = 13  # posted receives and probes from any source
    FIRST_HELD = 14  # messages that were taken aside, in order
    LAST_HELD = 15
    LAST_SENDER = 16  # the rank of the last message: ANY_SOURCE looks at the next rank first
    FREE_WORDS = 17  # address of the numbers of acknowledgements that are not in use
    N_FREE_WORDS = 18
    NEEDS_ROOM = 19  # a send for which memory has to be granted; 0: none
    TURN = 20  # counts steps
    NOTED = 21  # the send that `layout.Doing` shows to others
    POST = 22  # address of `message_step.message_post`
    STEP = 23  # address of `message_step.message_step`
    SEEN_NS = 24  # when a thread last checked for lost ranks
    THREAD = 25  # address of the thread that steps it while it is wanted; 0: none does
    IS_WANTED = 26  # see `entries.pending.NEW`
    WAITERS = 27  # threads that wait for messages: they step, and the thread does not
    LOOKS_LEFT = 28  # how often the thread still looks while nothing is pending
    # Messages between hosts; 0 if there are none.
    FETCH = 29  # address of the function that requests a message's data
    LEFT = 30  # address of a word for each rank: 1 if a rank of another host sends nothing more
    WIRES = 31  # address of the connections; see `backends.cpu.wires.words`
    LONGEST_SLICE_NS = 32  # how long a wait sleeps at most before it looks again
    # A function that compiled entries call.
    GRANT = 33  # a Python function without arguments: grants the memory that NEEDS_ROOM is for


TABLE_WORDS = 34
THREAD_MIN_BYTES = 64 << 10
"""From this size on the thread advances a message that was begun: 10 us of copying."""


class Mailbox(IntEnum):
    """Fields of a rank's view of the mailboxes to and from another rank, in its own memory."""

    OUT_AREA = 0  # address of the outgoing mailbox; 0: not used yet
    OUT_RING = 1  # which of its rings is written
    OUT_OFFSET = 2  # the position in that ring
    OUT_OTHER = 3  # the position in the other ring
    OUT_WRITTEN = 4  # bytes written so far
    OUT_BASE = 5  # OUT_WRITTEN when writing to this ring began
    OUT_TAIL = 6  # bytes known to be taken
    OUT_SENT = 7  # bytes of messages
    OUT_MATCHED = 8  # bytes of messages known to be matched
    OUT_NUMBER = 9  # of the last message
    OUT_WAITING = 10  # rows that are not in the mailbox completely
    OUT_TURN = 11  # the step in which such a row was found
    OUT_HAS_LARGE = 12  # whether the large ring has memory
    IN_AREA = 16
    IN_RING = 17
    IN_OFFSET = 18
    IN_OTHER = 19
    IN_TAKEN = 20
    IN_MATCHED = 21
    IN_NUMBER = 22  # of the last message that was taken
    IN_WANTED = 23  # receives and probes of this rank's messages
    IN_TARGET = 24  # the row or held message whose parts come next; 0: none
    IN_TARGET_IS_HELD = 25
    IN_COUNT = 26  # of messages that were matched


MAILBOX_WORDS = 32


class Held(IntEnum):
    """Fields of a message that was taken aside, followed by its description and its data."""

    NEXT = 0
    SENDER = 1
    TAG = 2
    SIZE_BYTES = 3
    DTYPE = 4
    WAY = 5
    PLACE = 6
    ACKNOWLEDGEMENT = 7
    MODE = 8
    NUMBER = 9
    COST = 10
    DONE_BYTES = 11
    IS_WHOLE = 12
    DESCRIPTION_BYTES = 13
    DATA = 14  # address
    DIMENSIONS = 15
    DIMENSION = 16  # eight of them
    OWNER = 24  # the receive that it belongs to; 0: any receive may get it


HELD_WORDS = 25
