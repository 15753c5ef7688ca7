"""What Python and compiled loops share in a process's own memory, word by word.

The context is an int64 array per communicator, a call block one per prepared call, and a table of
point-to-point operations has a row of such words for each. What ranks share is in `layout`.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """What a compiled loop returns."""

    OK = 0
    EVENT = 1  # the segment's event line says that something happened
    MISMATCH = 2  # this rank saw another signature in its own call
    DEADLINE = 3  # a wait ran out
    LOST = 4  # a rank that is needed is gone or has closed
    SIGNAL = 5  # a Python signal handler raised; the exception is kept in the context
    NOT_RUN = 6  # the communicator was not idle
    MORE = 8  # there is more to come: of GPU calls, a rank is late
    MISFIT = 9  # a message is larger than its receive, or of another dtype
    NO_ROOM = 10  # there is no memory for a part of the segment; nothing has happened
    NOT_YET = 11  # what a caller waits for is not done when its own time is over; it goes on


class State(IntEnum):
    """What a communicator is doing; the compiled entry serves it in IDLE only."""

    IDLE = 0
    BUSY = 1
    NEEDS_PYTHON = 2  # an event to answer, closed, broken, forked
    TAKEN = 3  # of blocking messages: Python makes one


class Context(IntEnum):
    """Fields of the context."""

    # Who, and how far.
    STATE = 0
    STATUS = 1
    RANK = 2
    WORLD_SIZE = 3
    SEQUENCE = 4
    VERIFIED = 5  # up to which call this rank has seen the signatures of all
    CHUNK = 6
    PATH = 7
    MISMATCHED = 8
    PENDING = 9  # calls that were started, and reasons to leave every call to Python
    INTERPRETER = 10  # 1: this call holds it; an address: its thread's state, having given it away
    # Where things are in the segment, in the arenas, in this process.
    EVENT_LINE = 11
    EVENT_SEEN = 12
    STATUS_LINES = 13
    RECORDS = 14
    SLOTS = 15
    PAYLOAD_STRIDE = 16
    FILLED = 17
    READ = 18
    STAGES = 19
    ARENAS = 20  # for each rank, address of its `PeerArena` words
    ARENA_BASE = 21
    ARENA_BYTES = 22
    SOURCES = 23
    DESTINATIONS = 24
    PIDS = 25
    # Which way a call takes.
    ONE_SHOT_BYTES = 26
    ROOTED_BYTES = 27
    CHUNK_BYTES = 28
    SYMMETRIC_MIN_BYTES = 29
    SINGLE_COPY_MIN_BYTES = 30
    SINGLE_COPY_MAX_BYTES = 31
    GATHER_COPY_MAX_BYTES = 32
    SINGLE_COPY = 33  # whether every rank can read every other's memory: 0 not looked yet, 1, 2 no
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
    SLEEPY = 44  # waits still to come that sleep without yielding first
    SLICE_NS = 45
    START_NS = 46  # since when this call waits; 0 before it does
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
    POST_BYTES = 65  # of data behind an envelope
    EAGER_BYTES = 66
    MESSAGE_ROWS = 70  # address of two rows: of a blocking call
    # Ranks on several hosts.
    HOSTS = 90  # address of the words of `transport.tcp.exchange_words`; 0: all are on this host
    # Calls on GPU arrays.
    ENQUEUED_LINES = 110
    ENQUEUED = 111  # address of the calls' records
    ENQUEUED_COUNT = 112  # how many records a rank has
    ENQUEUED_SEQUENCE = 113  # of the last call posted
    ENQUEUED_SEEN = 114  # up to where all ranks have compared, when last looked at
    ENQUEUED_LATE = 115  # who has not posted the call that is compared next, or -1
    # Memory of the segment that is taken when it is first used, see `room`.
    SEGMENT_FD = 116
    ROOM_BYTES = 117  # that may be taken before somebody looks what the host has
    REFUSED_BYTES = 118
    REFUSED_ERROR = 119  # the kernel's number; 0: no more than ROOM_BYTES were granted
    PAYLOADS = 120  # address of those that are larger than a slot
    READY_BYTES = 121  # up to here a call needs no memory that it does not have
    READY_PAYLOADS = 122  # up to here payloads have memory
    READY_STAGES = 123  # whether this rank's stages have
    MAKE_READY = 124  # address of the function that takes it
    MAP_MORE = 125  # address of the function that maps more of a peer's arena
    # Ranks on one CPU, see `flags`.
    CPUS = 126  # address of the words that say which rank waited last on a CPU
    FULL_SPINS = 127  # SPINS where this rank has its CPU for itself
    SHARING = 128  # waits that are still to find no other rank on this CPU; 0: it has its own
    SHARING_WAITS = 129  # how many waits there were since one was found
    # Asynchronous calls.
    HOLDS = 130  # how many reasons there are to let Python alone start them
    # Messages that are pending.
    TRANSFERS = 131  # address of their table, see `TransferTable`; 0: there is none
    MESSAGE_STEP = 132  # address of what takes them a step further
    OPENED = 133
    ACKNOWLEDGED = 134
    LARGE_RING_BYTES = 135
    EAGER_ROOM_BYTES = 136
    # Which way a call takes, continued.
    ROOT_COPY_MIN_BYTES = 137  # 0: as what comes from others
    COPY_EXCHANGED = 138  # kernel for what comes out of a stage while this rank fills its own


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
    # What a reduction gives to whom.
    SCAN_KERNEL = 22
    PARAMETER_STRIDE = 23  # between the parameters of successive ranks' results; 0: one for all
    IDENTITY = 24  # address of the element that stands for no input at all
    # Where the blocks of a movement lie.
    FLOW = 25
    IS_SPREAD = 26  # the input is one block for each rank
    LANDS_APART = 27  # the output is one block from each rank
    BLOCK_BYTES = 28
    OFFSETS = 29  # address of the blocks' world_size + 1 offsets in bytes; 0: equal blocks
    LANDINGS = 30  # where each rank's block goes, as addresses where DESTINATION is 0; 0: in order
    PIECES = 31  # all_to_all with counts: bytes to each rank, then bytes from each rank
    LARGEST_BYTES = 32  # the largest input of any rank
    N_COUNTS = 33
    COUNTS = 34  # address of the counts as the caller gave them
    # How the compiled entry relates input and output.
    SOURCE_PARTS = 35
    DESTINATION_PARTS = 36
    LARGEST_PARTS = 37
    IN_PLACE_BLOCK = 38  # in place, the input begins so many blocks after the output
    SIGNS_COUNT = 39  # the signature holds the block's count instead of the input's shape
    # Point-to-point.
    TRANSFERS = 40
    N_TRANSFERS = 41
    IS_STARTED = 42  # whether they are in the table of those that are pending already
    # A list of arrays.
    SEGMENTS = 43  # address of its table; 0: one array
    N_SEGMENTS = 44
    PREPARES = 45  # whether the op changes an input before it combines it
    # A call on GPU arrays, see `Record`.
    SENT = 46
    RECEIVED = 47
    # A spread movement whose input is one array for each rank.
    INPUTS = 48  # address of their addresses; 0: one array
    # In two parts, for a call that was started and is waited for later; 0: it has none.
    POST = 49  # address of what posts it without waiting, and returns NOT_RUN where it cannot
    FINISH = 50  # address of what does the rest
    READS, READS_END = 51, 52  # between which addresses its input lies
    WRITES, WRITES_END = 53, 54
    # Point-to-point, again.
    DESCRIPTION = 55  # address of what tells a receiver of a dtype that has no number
    DESCRIPTION_BYTES = 56
    UNTIL_NS = 57  # when to return with NOT_YET; 0: never; 1: at once
    LEAVES = 58  # whether a signal ends only this wait: what it waits for goes on
    SHOWN_ROOT = 59  # what errors show as the root: of the call that this is a part of
    # Through MPI.
    MPI = 60  # address of the communicator's words, see `backends.mpi.words`
    MPI_DTYPE = 61  # its handles; without them the call is a movement, or reduced by our kernels
    MPI_OPERATION = 62
    MPI_COLLECTIVE = 63  # which, where COLLECTIVE says what it is a part of
    MPI_DIVIDES = 64  # whether KERNEL makes the average of the sum that MPI has made


CALL_WORDS = 65


class Pending(IntEnum):
    """Fields of the queue of calls that were started, one per communicator: `entries.pending`.

    Each has a number: 1, 2, ... What different threads write is lines apart.
    """

    CONTEXT = 0
    THREAD = 2  # address of the words of the process's thread
    WAIT_LONG = 3  # how a thread of Python's waits
    WAIT_LONG_ALONE = 4  # how one waits that is none
    TIMEOUT_NS = 5  # the communicator's
    TAIL = 8  # last number given, with the interpreter held
    REAPED = 9  # up to which Python has taken note of the end
    WANTED = 16  # up to which the thread is to run calls
    DONE = 24  # up to which calls have ended
    BELL = 25  # rung at every end: {int32 rings, int32 sleepers}
    POSTED = 32  # up to which calls have been posted, by whoever runs calls
    IS_RUNNING = 33  # whether somebody runs calls of the queue, or has not quite ended that
    ENTRIES = 40


class Started(IntEnum):
    """Fields of one entry of that queue."""

    CALL = 0  # address of its call block
    TIMEOUT_NS = 1
    STATUS = 2
    SEQUENCE = 3  # under which it was posted ahead
    FUTEX_TIMEOUT = 4  # 2 words, of who waits for it
    WORDS = 6  # a call block of the entry's own


PENDING_CALLS = 64
"""Entries of the queue; a power of two."""
STARTED_WORDS = -(-(Started.WORDS + CALL_WORDS) // 8) * 8  # whole cache lines
PENDING_WORDS = Pending.ENTRIES + PENDING_CALLS * STARTED_WORDS


class Thread(IntEnum):
    """Fields of the thread that runs started calls, and steps messages, of a whole process."""

    BELL = 0  # {int32 rings, int32 sleepers}
    STOP = 8
    CURRENT = 16  # the queue it looks at, which must stay where it is
    IS_RUNNING = 17
    FUTEX_TIMEOUT = 18  # 2 words
    COUNT = 20  # places in use, and free ones between them
    QUEUES = 24  # addresses; of a table of messages with the last bit set


THREAD_QUEUES = 1024
"""How many communicators the thread serves; calls on more are run by whoever waits."""
THREAD_WORDS = Thread.QUEUES + THREAD_QUEUES


class Flow(IntEnum):
    """Between whom the blocks of a movement go."""

    ALL = 0
    FROM_ROOT = 1
    TO_ROOT = 2


class Path(IntEnum):
    """Which way a call took; `Communicator.describe` and the bench show it."""

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
    SIZE_BYTES = 4  # of what is sent; most that may be received
    DTYPE = 5
    STATE = 6
    DONE_BYTES = 7
    WAY = 8  # how the message travels, see `layout.Way`
    PLACE = 9  # where the receiver finds it, if not in the mailbox
    ACKNOWLEDGEMENT = 10  # 1 + the number of the word that says that it was taken; 0: none
    MODE = 11  # see `Mode`
    FOUND_PEER = 12
    FOUND_TAG = 13
    FOUND_BYTES = 14
    FOUND_DTYPE = 15
    FOUND_NUMBER = 16  # which of all messages of that rank to this one
    DIMENSIONS = 17
    DIMENSION = 18  # eight of them
    NUMBER = 26  # of a receive: which message of that rank alone; 0: by tag
    HELD = 27  # address of the message that was taken aside for this receive, see `Held`
    DESCRIPTION = 28
    DESCRIPTION_BYTES = 29
    TIMEOUT_NS = 30
    DEADLINE_NS = 31  # 0: not set yet
    NEXT = 32
    IS_WAITING = 33  # a send: no part of it is in the mailbox
    KEPT = 34  # a Python object that is kept alive, and the row's memory with it; 0: none


TRANSFER_WORDS = 36


class Kind(IntEnum):
    """What a row does."""

    SEND = 1
    RECV = 2
    PROBE = 3
    TAKE = 4  # a receive that is told neither size nor dtype: it gets a `Held` message


class Mode(IntEnum):
    """How a message is sent, or asked for; they may be added."""

    SYNCHRONOUS = 1  # it is over for the sender when it is matched
    FOLLOWS = 2  # it is a part of the message before: no receive by tag gets it
    WITHDRAWS = 4  # a receive or probe: its deadline is for a message to match, and ends it alone


class Progress(IntEnum):
    """How far a row is; from DONE on it is over."""

    NEW = 0
    WAITING = 1
    UNDER_WAY = 2
    DONE = 3
    MISFIT = 4  # the message that matches is larger, or has another dtype; it stays
    GONE = 5  # somebody else has received the message that was asked for by its number
    DROPPED = 6  # Python took it back
    EXPIRED = 7  # no message had matched at its own deadline: it was withdrawn


class TransferTable(IntEnum):
    """Fields of a communicator's table of pending messages, in this process's memory."""

    LOCK = 0
    PENDING = 1  # how many rows are not over
    FINISHED = 2  # how many ever were over
    MOVES = 3  # counts what has moved, so that whoever waits sees that something did
    IS_DEAD = 4  # nothing is touched any more
    CONTEXT = 5  # of the steps: what they note is nobody else's
    CALLS = 6  # the context of collectives
    PEERS = 7  # address of a `Mailbox` for each rank
    FIRST = 8  # rows that move by themselves: sends, and receives that fetch
    LAST = 9
    FIRST_POSTED = 10  # receives and probes that no message has matched, in order
    LAST_POSTED = 11
    N_WANTED = 12  # receives and probes that the mailboxes can help
    N_ANY = 13  # of those that are posted, from any source
    FIRST_HELD = 14  # messages that were taken aside, in order
    LAST_HELD = 15
    LAST_SENDER = 16  # whose message came last: ANY_SOURCE looks at the next rank first
    FREE_WORDS = 17  # address of the numbers of acknowledgements that are not in use
    N_FREE_WORDS = 18
    NEEDS_ROOM = 19  # a send for which memory has to be granted; 0: none
    TURN = 20  # counts steps
    NOTED = 21  # the send that others are told of
    POST = 22  # address of `message_step.message_post`
    STEP = 23  # and of `message_step.message_step`
    SEEN_NS = 24  # when somebody last looked whether a rank is lost
    THREAD = 25  # address of the thread that steps it while it is wanted; 0: none does
    IS_WANTED = 26  # see `entries.pending.NEW`
    WAITERS = 27  # threads that wait for messages: they step, and the thread does not
    LOOKS_LEFT = 28  # of the thread, while nothing is pending
    # Where messages go to other hosts, too; else 0.
    FETCH = 29  # address of what asks for a message's data
    LEFT = 30  # address of a word for each rank: 1 where one of another host sends nothing more
    WIRES = 31  # address of the connections, see `backends.cpu.wires.words`
    LONGEST_SLICE_NS = 32  # that a wait sleeps without a look
    # What compiled entries call.
    GRANT = 33  # a Python function without arguments: grants the memory that NEEDS_ROOM is for


TABLE_WORDS = 34
THREAD_MIN_BYTES = 64 << 10
"""From this size on a message that is begun has the thread take it on: 10 us of copying."""


class Mailbox(IntEnum):
    """Fields of what a rank knows of the mailboxes to and from another, in its own memory."""

    OUT_AREA = 0  # address of the outgoing mailbox; 0: not used yet
    OUT_RING = 1  # which of its rings is written
    OUT_OFFSET = 2  # where in it
    OUT_OTHER = 3  # where in the other one
    OUT_WRITTEN = 4  # bytes that were ever written
    OUT_BASE = 5  # the same when this ring was begun to be written
    OUT_TAIL = 6  # bytes that are known to be taken
    OUT_SENT = 7  # bytes of messages
    OUT_MATCHED = 8  # of them, known to be matched
    OUT_NUMBER = 9  # of the last message
    OUT_WAITING = 10  # rows of which something is not in the mailbox yet
    OUT_TURN = 11  # in which step such a row was met
    OUT_HAS_LARGE = 12  # whether there is memory for the large ring
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
    """Fields of a message that was taken aside; its description and its data lie behind them."""

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
    OWNER = 24  # the receive of which it is; 0: it stands for whoever asks


HELD_WORDS = 25
