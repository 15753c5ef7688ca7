"""Where everything lies in the segment that a communicator's ranks share.

In this order (P ranks, every rank's lines 128 bytes apart, because processors prefetch
cache lines in pairs)::

    event line      abort word, event word (mismatch generation), which payloads have memory,
                    whose proposal in shrink() holds
    status lines    per rank: done word, closed | acknowledgements of events
    chunk flags     per rank: filled word, per rank: read word (counters of staged chunks)
    bells           per rank: rung when a message or a free place came; what it is waiting for
    opened          P x P words, by receiver and sender: 1 where the mailbox is used
    acknowledged    per rank: words of messages that wait to be taken
    enqueued lines  per rank: how far it has compared the calls on GPU arrays; behind them one for
                    each other host
    reasons         per rank: the exception that took it out of the communicator, as text
    shrinking       per rank: what it says in shrink(), and whom it proposes to go on with
    cpus            CPUS words: which rank waited last on a CPU
    records         per rank: ring of RECORDS records, 256 bytes each
    slots           ring of RING x P slots: a header, and a payload of up to SMALL_BYTES

Up to here memory is reserved when the segment is made (`first_bytes`); what follows has none until
it is first used (`room`)::

    payloads        ring of RING x P larger payloads, of up to rooted_bytes
    stages          ring of 3 x P stages of chunk_bytes each
    enqueued calls  per rank: ring of enqueued_records records; none where no rank has a GPU; behind
                    them one for each other host, which this one's leader fills in
    mailboxes       P x P, by receiver and sender: memory is taken when one is first used

Where these ranks exchange messages with ranks of other hosts, status lines, bells, opened words,
acknowledgements and mailboxes are there for those too, behind the ranks of this host.

Words that ranks wait for are {int32 value, int32 waiters}; a slot's header word is {int32 sequence,
uint32 signature digest} with its waiters behind it. Comparisons are of differences, so that
sequences may wrap. What a rank keeps for itself is in `words`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from enum import IntEnum

LAYOUT_VERSION = 13
LINE_BYTES = 128
RING = 16
"""Slots per rank: how many unsynchronised calls (small broadcasts) a rank may be ahead."""
CPUS = 256
"""CPUs further apart share a word; one that was overwritten is as if nobody had waited there."""
AHEAD = 4
"""How many calls a rank may have posted without having ended them: the ring's length less this many
calls after the last that all have been seen in, it must look (docs/decisions/0031).
"""
RECORDS = 32
RECORD_BYTES = 256
MAX_RANKS = 256
HEADER_BYTES = 64
REASON_BYTES = 256
INLINE_BYTES = 32
"""Payloads of up to this size share the header's cache line: one transfer instead of two."""
INLINE_OFFSET = 32
SLOT_BYTES = 512
SMALL_BYTES = SLOT_BYTES - HEADER_BYTES
"""Payloads of up to this size lie in the slot, behind a header: there is memory for them always."""
STAGES = 3

# Offsets in the event line.
EVENT_ABORT = 0
EVENT_WORD = 8
EVENT_PAYLOADS = 16
"""Up to how many bytes all payloads have memory; below `SMALL_BYTES`: none outside of slots."""
EVENT_SURVIVORS = 24
"""Whose proposal in `shrink` holds: {round: 32 bits, rank: 24 bits, `Phase`: 8 bits}."""

# Offsets in a status line.
STATUS_DONE = 0
STATUS_COPIES = 8
"""1 where this rank can read the private memory of every other one (`single_copy`)."""
STATUS_CLOSED = 16
STATUS_CLOSED_SEQUENCE = 24
STATUS_ACKNOWLEDGED = (64, 96)
"""Two acknowledgements of {event, sequence, chunk}, by the parity of the event's generation: a fast
rank may answer the next event while a slow one still reads its answer to the last."""

# Offsets in a rank's part of `shrinking`.
SHRINKING_BYTES = 2 * LINE_BYTES
SHRINKING_ROUND = 0
"""For which round of `shrink` it waits: 1, 2, ...; 0: it has not called it; `LEFT_SHRINK`."""
SHRINKING_COMPLETED = 8
SHRINKING_PORT = 16
"""Where it listens, should it be the first rank of those who go on: between hosts only."""
SHRINKING_PROPOSALS = (128, 192)
"""By the parity of the round: {last completed call, token of 16 bytes, a bit for each rank}."""
LEFT_SHRINK = -1

# Offsets in a slot's header.
HEADER_WORD = 0
HEADER_WAITERS = 8
HEADER_SOURCE = 16
HEADER_DESTINATION = 24
HEADER_ADDRESS = 32
"""Where a larger private input lies in its process; small payloads share this place."""

# Offsets in a bell's line.
BELL_WORD = 0
BELL_DOING = 8
"""What the rank waits for there, see `Doing`."""


class Doing(IntEnum):
    """Words behind `BELL_DOING`: the message that a rank sleeps for, written before it sleeps."""

    KIND = 0  # of the operation; 0: the rank waits for no message
    PEER = 1
    TAG = 2
    SIZE_BYTES = 3
    DTYPE = 4
    FURTHER = 5  # how many more operations it waits for
    TIMEOUT_NS = 6
    # Whatever the rank is doing: of its sends, the first that waits for its receive.
    SENDS = 7  # 1 where there is one
    SEND_PEER = 8
    SEND_TAG = 9


# Offsets in an enqueued line.
ENQUEUED_COMPARED = 0
ENQUEUED_FAILED = 8
"""1 where this rank could not connect its GPU: the others need not wait for it."""
ENQUEUED_RECORDS = 256
"""How many calls on GPU arrays a rank may be ahead of the slowest one's looking."""

# A mailbox: what its receiver says of it; a small ring of records, whose lines stay in caches; and
# a large one, which is begun to be written when the small one is full. Each is memory that is taken
# when it is first used. A record is an envelope, then a shape and a description where the envelope
# has no room for them, then data.
MAILBOX_TAIL = 0
"""Bytes of records that were taken."""
MAILBOX_MATCHED = 8
"""Bytes of messages that a receive was found for."""
MAILBOX_MATCHED_COUNT = 16
"""How many those are."""
MAILBOX_SMALL = 256
MAILBOX_LARGE = 16384
LARGE_EXTRA_BYTES = 256 << 10
"""So much larger than the eager room is the large ring: for envelopes, and what streams."""
POST_BYTES = 32 << 10
"""What is streamed changes hands in parts of this size: 8 KiB parts took a fifth longer."""
MOST_EAGER_BYTES = 8192
"""From here on one copy by the kernel is faster than two through a mailbox."""
STREAMED_BYTES = 256 << 10
"""So much of the large ring is used by what streams, where the receiver keeps up."""
ENVELOPE_BYTES = 64
SHAPE_BYTES = 64
MESSAGE_DIMENSIONS = 8
MOST_DESCRIPTION_BYTES = 8192
ACKNOWLEDGEMENTS = 512
"""How many messages of a rank may wait to be acknowledged; further ones are streamed."""


class Envelope(IntEnum):
    """Fields of a record's first cache line, in words of 8 bytes.

    It holds the data of a very small message, too: one transfer between cores.
    """

    NUMBER = 0  # not zero; written last
    SIZE_BYTES = 1  # of the whole message, in its parts of that part
    TAG = 2
    DTYPE = 3
    PACKED = 4  # way, mode, 16 + dimensions, acknowledgement, bytes of the description
    PLACE = 5  # or the first dimension of what lies in the mailbox
    FIRST_LENGTH = 6  # the first dimension of what does not, or up to SMALLEST_BYTES of data


SMALLEST_BYTES = 16


class SentNumber(IntEnum):
    """In place of a message's number of dimensions: what was sent is no array but a number."""

    NUMPY = -1
    PYTHON = -2


class Way(IntEnum):
    """Where a message's data is."""

    POSTED = 0  # behind the envelope, and in the parts after it
    IN_ARENA = 1  # at an offset in the sender's arena
    IN_PROCESS = 2  # at an address in the sender's process
    ON_ANOTHER_HOST = 3  # it comes when it is asked for
    # Records that are no messages.
    PART = 4  # of the message before
    TO_START = 5  # the next record is at the start of the ring
    TO_OTHER = 6  # the next record is in the other ring


NEVER = 1 << 62
"""In place of a threshold in bytes: a size that nothing reaches."""
UNKNOWN_BYTES = 1 << 62
"""Instead of the largest input, where no rank knows the others': not small."""
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
    LEFT = 3  # with a MismatchError
    GOES_AHEAD = 4  # started, and this rank may end it before all ranks have arrived


UNFINISHED = (RecordState.STARTED, RecordState.GOES_AHEAD)
"""States of calls that a rank is in."""


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
    NO_ROOM = 11  # a rank had no memory for its stages when all were in the call
    NO_ADDRESSES = 12  # a rank could not map what it needed of a peer's arena
    ELSEWHERE = 13  # on another host, or between hosts: what happened is kept apart
    ENQUEUED_MESSAGE = 14  # a message of GPU arrays waited too long; it has no sequence number
    MISMATCH = 15  # the ranks' calls differed, and a rank may have gone on before that was found


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
    eager_room_bytes: int = 1 << 20
    """Messages from one rank to another that nobody has received, before a small send waits."""
    root_copy_min_bytes: int = 0
    """Unless 0, the bound for what comes from a root, and only if that has its own to copy."""
    string_copies: int = 0
    """Whether slots and stages are filled, and exchanged, by the processor's string instruction."""
    other_hosts: int = 0
    """How many hosts there are besides this one, whose calls on GPU arrays are compared."""

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
    others: int = 0
    """Ranks of other hosts that these exchange messages with."""

    @functools.cached_property
    def ends(self) -> int:
        """How many ranks a message may come from or go to."""
        return self.world_size + self.others

    @functools.cached_property
    def status_lines(self) -> int:
        return LINE_BYTES

    @functools.cached_property
    def filled(self) -> int:
        return self.status_lines + self.ends * LINE_BYTES

    @functools.cached_property
    def read(self) -> int:
        return self.filled + self.world_size * LINE_BYTES

    @functools.cached_property
    def bells(self) -> int:
        return self.read + self.world_size * LINE_BYTES

    @functools.cached_property
    def opened(self) -> int:
        return self.bells + self.ends * LINE_BYTES

    @functools.cached_property
    def acknowledged(self) -> int:
        return round_up(self.opened + 8 * self.ends**2, LINE_BYTES)

    @functools.cached_property
    def enqueued_lines(self) -> int:
        return round_up(self.acknowledged + 8 * self.ends * ACKNOWLEDGEMENTS, LINE_BYTES)

    @functools.cached_property
    def reasons(self) -> int:
        return self.enqueued_lines + self.enqueued_rows * LINE_BYTES

    @functools.cached_property
    def enqueued_rows(self) -> int:
        """How many rows of calls on GPU arrays are compared: one for each rank, and other host."""
        return self.world_size + self.tuning.other_hosts

    @functools.cached_property
    def shrinking(self) -> int:
        return round_up(self.reasons + self.world_size * REASON_BYTES, LINE_BYTES)

    @functools.cached_property
    def cpus(self) -> int:
        return self.shrinking + self.world_size * SHRINKING_BYTES

    @functools.cached_property
    def records(self) -> int:
        return self.cpus + 8 * CPUS

    @functools.cached_property
    def slots(self) -> int:
        return round_up(self.records + self.world_size * RECORDS * RECORD_BYTES, 4096)

    @functools.cached_property
    def eager_bytes(self) -> int:
        """Bytes up to which a message lies in the mailbox, and its sender need not wait."""
        return MOST_EAGER_BYTES

    @functools.cached_property
    def large_ring_bytes(self) -> int:
        """Size of a mailbox's large ring."""
        return round_up(self.tuning.eager_room_bytes + LARGE_EXTRA_BYTES, 4096)

    @functools.cached_property
    def mailbox_stride(self) -> int:
        return MAILBOX_LARGE + self.large_ring_bytes

    @functools.cached_property
    def first_bytes(self) -> int:
        """How much of the segment has memory from the beginning."""
        return round_up(self.slots + RING * self.world_size * SLOT_BYTES, 4096)

    @functools.cached_property
    def payloads(self) -> int:
        return self.first_bytes

    @functools.cached_property
    def payload_stride(self) -> int:
        """Bytes between payloads: no power of two, whose lines would compete for the same sets."""
        # Of all_to_all with counts: bytes to and from each rank; of an input that is one array for
        # each rank: their addresses, behind those.
        pieces_bytes = 24 * self.world_size
        payload_bytes = max(self.tuning.one_shot_bytes, self.tuning.rooted_bytes, pieces_bytes)
        return round_up(payload_bytes + 1, LINE_BYTES)

    @functools.cached_property
    def stages(self) -> int:
        return round_up(self.payloads + RING * self.world_size * self.payload_stride, 4096)

    @functools.cached_property
    def enqueued(self) -> int:
        return self.stages + STAGES * self.world_size * self.tuning.chunk_bytes

    @functools.cached_property
    def mailboxes(self) -> int:
        records = self.enqueued_rows * self.tuning.enqueued_records
        return round_up(self.enqueued + records * RECORD_BYTES, 4096)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Size of the whole segment, in bytes, were all of it in use."""
        return self.mailboxes + self.ends**2 * self.mailbox_stride

    def header(self, rank: int, sequence: int) -> int:
        """Return where a rank's header for a call is: `steps.slot_of`."""
        place = (sequence & (RING - 1)) * self.world_size + rank
        return self.slots + place * SLOT_BYTES

    def payload(self, rank: int, sequence: int, size_bytes: int) -> int:
        """Return where a rank's payload for a call is, one that is not inline."""
        turn = (sequence & 0x7FFFFFFF) // RING
        column = (rank + turn) % self.world_size
        if size_bytes <= SMALL_BYTES:
            return self.header(column, sequence) + HEADER_BYTES
        place = (sequence & (RING - 1)) * self.world_size + column
        return self.payloads + place * self.payload_stride
