"""Where everything lies: in the shared segment, in a rank's context, in a call block.

The segment, in this order (P ranks, every rank's lines 128 bytes apart, because processors prefetch
cache lines in pairs)::

    event line      abort word, event word (mismatch generation)
    status lines    per rank: done word, closed | acknowledgements of events
    chunk flags     per rank: filled word, per rank: read word (counters of staged chunks)
    records         per rank: ring of RECORDS records, 256 bytes each
    slots           ring of RING x P slots: a header line, and a payload of up to rooted_bytes
    stages          ring of 3 x P stages of chunk_bytes each
    bells           per rank: rung when a message or a free place came; what it is waiting for
    mailboxes       P x P, by receiver and sender: head line, tail line, ring of POSTS posts
    enqueued lines  per rank: how far it has compared the calls on GPU arrays
    enqueued calls  per rank: ring of enqueued_records records; none where no rank has a GPU

Words that ranks wait for are {int32 value, int32 waiters}; a slot's header word is {int32 sequence,
uint32 signature digest} with its waiters behind it. Comparisons are of differences, so that
sequences may wrap.

The context is a private int64 array per communicator, the call block one per prepared call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

LAYOUT_VERSION = 4
LINE_BYTES = 128
RING = 16
"""Slots per rank: how many unsynchronised calls (small broadcasts) a rank may be ahead."""
RECORDS = 32
RECORD_BYTES = 256
MAX_RANKS = 256
HEADER_BYTES = 64
INLINE_BYTES = 32
"""Payloads of up to this size share the header's cache line: one transfer instead of two."""
INLINE_OFFSET = 32
STAGES = 3

# Offsets in the event line.
EVENT_ABORT = 0
EVENT_WORD = 8

# Offsets in a status line.
STATUS_DONE = 0
STATUS_COPIES = 8
"""1 where this rank can read the private memory of every other one (`single_copy`)."""
STATUS_CLOSED = 16
STATUS_CLOSED_SEQUENCE = 24
STATUS_ACKNOWLEDGED = (64, 96)
"""Two acknowledgements of {event, sequence, chunk}, by the parity of the event's generation: a fast
rank may answer the next event while a slow one still reads its answer to the last."""

# Offsets in a slot's header.
HEADER_WORD = 0
HEADER_WAITERS = 8
HEADER_SOURCE = 16
HEADER_DESTINATION = 24
HEADER_ADDRESS = 32
"""Where a larger private input lies in its process; small payloads share this place."""

# Offsets in a bell's line.
BELL_WORD = 0
BELL_DOING = 8  # words: kind of the operation, peer, tag, size in bytes, dtype

# Offsets in an enqueued line.
ENQUEUED_COMPARED = 0
ENQUEUED_FAILED = 8
"""1 where this rank could not connect its GPU: the others need not wait for it."""
ENQUEUED_RECORDS = 256
"""How many calls on GPU arrays a rank may be ahead of the slowest one's looking."""

# A mailbox: how many posts were written, which only the sender looks at, and how many it knows to
# be taken; how many were taken; then the posts. A post that is written says so itself.
POSTS = 8
MAILBOX_HEAD = 0
MAILBOX_KNOWN_TAIL = 8
MAILBOX_TAIL = 128
MAILBOX_POSTS = 256
MAILBOXES_BYTES = 32 << 20
"""About how much memory the mailboxes of a segment may take."""
MOST_POST_BYTES = 32 << 10
"""What is streamed changes hands in parts of this size: 8 KiB parts took a fifth longer."""
LEAST_POST_BYTES = 64
MOST_EAGER_BYTES = 8192
"""From here on one copy by the kernel is faster than two through a post."""
ENVELOPE_BYTES = 128
MESSAGE_DIMENSIONS = 8


class Envelope(IntEnum):
    """Fields of a post, in words of 8 bytes; all but the number are those of a message's first.

    What a receiver looks at shares a cache line with the data of a very small message: one transfer
    between cores.
    """

    NUMBER = 0  # how many posts were written with this one; written last
    SIZE_BYTES = 1
    TAG = 2
    DTYPE = 3
    WAY = 4
    PLACE = 5  # or up to SMALLEST_BYTES of data
    DIMENSIONS = 7
    DIMENSION = 8  # eight of them


SMALLEST_BYTES = 16


class Way(IntEnum):
    """Where a message's data is."""

    POSTED = 0  # behind the envelope, and in the posts after it
    IN_ARENA = 1  # at an offset in the sender's arena
    IN_PROCESS = 2  # at an address in the sender's process


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


NEVER = 1 << 62
"""In place of a threshold in bytes: a size that nothing reaches."""
NOT_SHARED = -1
"""The offset of a buffer that is not in its rank's arena."""


class Record(IntEnum):
    """Fields of a record, in words of 8 bytes."""

    SEQUENCE = 0
    COLLECTIVE = 1
    OPERATION = 2
    DTYPE = 3
    ROOT = 4
    COUNT = 5
    SIZE_BYTES = 6
    STATE = 7
    PARAMETER = 8
    DIMENSIONS = 11
    DIMENSION = 12  # four of them; further ones are in the digest only
    N_COUNTS = 16
    COUNTS = 17  # eight of them; further ones are in the digest only
    # Of a call on GPU arrays.
    SENT = 25  # all_to_all with counts: a sum over what goes to each rank
    RECEIVED = 26  # and over what comes from each: equal when summed over all ranks
    HEADER = 31  # {sequence, digest}, written last


SHOWN_DIMENSIONS = 4
SHOWN_COUNTS = 8


class RecordState(IntEnum):
    """How far a recorded call is."""

    STARTED = 1
    DONE = 2


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
    KNOWN_DONE = 5
    UNVERIFIED = 6
    UNVERIFIED_COUNT = 7
    CHUNK = 8
    PATH = 9
    MISMATCHED = 10
    PENDING = 11  # asynchronous calls queued, or failed without anybody knowing
    INTERPRETER = 12  # 1: this call holds it; an address: its thread's state, having given it away
    # Where things are in the segment, in the arenas, in this process.
    EVENT_LINE = 13
    EVENT_SEEN = 14
    STATUS_LINES = 15
    RECORDS = 16
    SLOTS = 17
    SLOT_STRIDE = 18
    FILLED = 19
    READ = 20
    STAGES = 21
    ARENAS = 22
    ARENA_BASE = 23
    ARENA_BYTES = 24
    SOURCES = 25
    DESTINATIONS = 26
    PIDS = 27
    # Which way a call takes.
    ONE_SHOT_BYTES = 28
    ROOTED_BYTES = 29
    CHUNK_BYTES = 30
    SYMMETRIC_MIN_BYTES = 31
    SINGLE_COPY_MIN_BYTES = 32
    SINGLE_COPY_MAX_BYTES = 33
    GATHER_COPY_MAX_BYTES = 34
    SINGLE_COPY = 35  # whether every rank can read every other's memory: 0 not looked yet, 1, 2 no
    PREFETCH_BYTES = 36
    # Kernels and functions, by address.
    COPY_PLAIN = 37
    COPY_POSTED = 38
    COPY_IN = 39
    COPY_OUT = 40
    COPY_TAKE = 41
    REFILL = 42
    WAIT_LONG = 43
    # Waiting.
    SPINS = 44
    YIELDS = 45
    SLEEPY = 46  # waits still to come that sleep without yielding first
    SLICE_NS = 47
    START_NS = 48  # since when this call waits; 0 before it does
    TIMEOUT_NS = 49
    POLL_FDS = 50
    LOST_RANK = 51
    WAITED_RANK = 52
    CLOCK = 53  # 2 words
    FUTEX_TIMEOUT = 55  # 2 words
    IO_VECTORS = 57  # 4 words
    RAISED = 61  # 3 words
    # Messages.
    BELLS = 64
    MAILBOXES = 65
    MAILBOX_STRIDE = 66
    POST_BYTES = 67  # of data behind an envelope
    EAGER_BYTES = 68
    UNEXPECTED = 69  # messages that Python holds: compiled receives leave the call to it
    UNMATCHED = 70  # whose message is to be taken aside
    MORE = 71
    MESSAGE_ROWS = 72  # 2 rows of TRANSFER_WORDS
    # Calls on GPU arrays.
    ENQUEUED_LINES = 112
    ENQUEUED = 113  # address of the calls' records
    ENQUEUED_COUNT = 114  # how many records a rank has
    ENQUEUED_SEQUENCE = 115  # of the last call posted
    ENQUEUED_SEEN = 116  # up to where all ranks have compared, when last looked at
    ENQUEUED_LATE = 117  # who has not posted the call that is compared next, or -1


CONTEXT_WORDS = 118


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
    LANDINGS = 30  # all_to_all with counts: where each rank's block goes
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


CALL_WORDS = 48


class Flow(IntEnum):
    """Between whom the blocks of a movement go."""

    ALL = 0
    FROM_ROOT = 1
    TO_ROOT = 2


class Abort(IntEnum):
    """Why a communicator is broken: the low byte of the abort word.

    The word is {code: 8 bits, rank: 24 bits, sequence: 32 bits}; the rank is the lost one, or the
    one that gave up.
    """

    DEADLINE = 1
    LOST = 2
    INTERRUPTED = 3
    REQUESTED = 4
    UNREADABLE = 5
    MESSAGE_DEADLINE = 6
    # Of calls on GPU arrays, whose sequence numbers are their own.
    ENQUEUED_MISMATCH = 7
    ENQUEUED_DEADLINE = 8
    ENQUEUED_LOST = 9
    BACKEND = 10  # the vendor's library or the GPU failed


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


@dataclass(frozen=True)
class Tuning:
    """The CPU backend's table. Rank 0's values hold for every rank of a communicator."""

    one_shot_bytes: int
    """Private arrays up to this size go through a slot in one step."""
    chunk_bytes: int
    """Larger ones are cut into chunks of this size."""
    symmetric_min_bytes: int
    """Arrays in shared arenas are reduced in place from this size on."""
    rooted_bytes: int
    """The same for what goes from or to a root: through a slot, senders need not wait."""
    single_copy_min_bytes: int
    """Private inputs from this size on that are only moved are read straight from their process."""
    single_copy_max_bytes: int
    """What each rank needs of a root's input goes through stages beyond this size."""
    gather_copy_max_bytes: int
    """The same for what goes to a root; half of it where that has its own input to copy."""
    prefetch_bytes: int
    """How far ahead lines are prefetched."""
    initial_sequence: int = 0
    """Where sequence numbers start: tests of their wrapping set it."""
    enqueued_records: int = 0
    """Records of calls on GPU arrays for each rank; a power of two, or 0 without a GPU."""

    def words(self) -> tuple[int, ...]:
        """Return the fields in order, to be sent."""
        return tuple(getattr(self, field.name) for field in fields(self))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class SegmentLayout:
    """Byte offsets of the segment's parts, for a number of ranks and a tuning."""

    world_size: int
    tuning: Tuning

    @property
    def status_lines(self) -> int:
        return LINE_BYTES

    @property
    def filled(self) -> int:
        return self.status_lines + self.world_size * LINE_BYTES

    @property
    def read(self) -> int:
        return self.filled + self.world_size * LINE_BYTES

    @property
    def records(self) -> int:
        return self.read + self.world_size * LINE_BYTES

    @property
    def slots(self) -> int:
        return round_up(self.records + self.world_size * RECORDS * RECORD_BYTES, 4096)

    @property
    def slot_stride(self) -> int:
        pieces_bytes = 16 * self.world_size  # of all_to_all with counts
        payload_bytes = max(self.tuning.one_shot_bytes, self.tuning.rooted_bytes, pieces_bytes)
        return round_up(HEADER_BYTES + payload_bytes, LINE_BYTES)

    @property
    def stages(self) -> int:
        return round_up(self.slots + RING * self.world_size * self.slot_stride, 4096)

    @property
    def bells(self) -> int:
        return round_up(self.stages + STAGES * self.world_size * self.tuning.chunk_bytes, 4096)

    @property
    def mailboxes(self) -> int:
        return round_up(self.bells + self.world_size * LINE_BYTES, 4096)

    @property
    def post_bytes(self) -> int:
        """Bytes of data that one post carries."""
        share = MAILBOXES_BYTES // (self.world_size**2 * POSTS)
        power = 1 << max(share - ENVELOPE_BYTES, 1).bit_length() - 1
        return max(LEAST_POST_BYTES, min(MOST_POST_BYTES, power))

    @property
    def eager_bytes(self) -> int:
        """Bytes up to which a message is over for its sender as soon as there is a free post."""
        return min(MOST_EAGER_BYTES, self.post_bytes)

    @property
    def mailbox_stride(self) -> int:
        return MAILBOX_POSTS + POSTS * (ENVELOPE_BYTES + self.post_bytes)

    @property
    def enqueued_lines(self) -> int:
        return round_up(self.mailboxes + self.world_size**2 * self.mailbox_stride, 4096)

    @property
    def enqueued(self) -> int:
        return self.enqueued_lines + self.world_size * LINE_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the whole segment, in bytes."""
        records = self.world_size * self.tuning.enqueued_records
        return round_up(self.enqueued + records * RECORD_BYTES, 4096)
