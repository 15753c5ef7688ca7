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
    ASIDE = 7  # a message that nobody asks for yet stands before others: Python takes it aside
    MORE = 8  # operations are done or have been added: Python looks
    MISFIT = 9  # a message has another size or dtype than its receive
    NO_ROOM = 10  # there is no memory for a part of the segment; nothing has happened


class State(IntEnum):
    """What a communicator is doing; the compiled entry serves it in IDLE only."""

    IDLE = 0
    BUSY = 1
    NEEDS_PYTHON = 2  # an event to answer, closed, broken, forked


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
    UNEXPECTED = 67  # messages that Python holds: compiled receives leave the call to it
    UNMATCHED = 68  # whose message is to be taken aside
    MORE = 69
    MESSAGE_ROWS = 70  # 2 rows of TRANSFER_WORDS
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


CONTEXT_WORDS = 131


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
    TAKES_MORE = 42  # whether operations may be added while the loop runs
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


CALL_WORDS = 55


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
    """Fields of the thread that runs started calls of all of a process's communicators."""

    BELL = 0  # {int32 rings, int32 sleepers}
    STOP = 8
    CURRENT = 16  # the queue it looks at, which must stay where it is
    IS_RUNNING = 17
    FUTEX_TIMEOUT = 18  # 2 words
    COUNT = 20  # places in use, and free ones between them
    QUEUES = 24


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

    @property
    def spelled(self) -> str:
        """The name as users read it: one-shot, staged, symmetric, single copy."""
        return self.name.lower().replace("one_shot", "one-shot").replace("_", " ")


# --- point-to-point ---


class Transfer(IntEnum):
    """Fields of one operation in a table of point-to-point operations."""

    KIND = 0
    PEER = 1
    TAG = 2
    ADDRESS = 3
    SIZE_BYTES = 4
    DTYPE = 5
    STATE = 6
    DONE_BYTES = 7
    POST = 8  # number of a sent message's first post
    FOUND_PEER = 9
    FOUND_TAG = 10
    DIMENSIONS = 11
    DIMENSION = 12  # eight of them


TRANSFER_WORDS = 20


class Kind(IntEnum):
    """What an operation of a table does."""

    SEND = 1
    RECV = 2
    PROBE = 3


class Progress(IntEnum):
    """How far it is."""

    WAITING = 0
    UNDER_WAY = 1
    DONE = 2
    MISFIT = 3  # the message that matches has another size or dtype; it stays
