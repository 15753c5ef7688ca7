"""The layout of the segment that a communicator's ranks share.

The segment has these parts, in this order. There are P ranks; every rank's lines are 128 bytes
apart, because processors prefetch cache lines in pairs::

    event line      abort word, event word (mismatch generation), which payloads have memory,
                    whose proposal in shrink() is valid
    status lines    per rank: done word, closed | acknowledgements of events
    chunk flags     per rank: filled word, per rank: read word (counters of staged chunks)
    bells           per rank: rung when a message or a free place came; what it is waiting for
    opened          P x P words, by receiver and sender: 1 if the mailbox is used
    acknowledged    per rank: words of messages that wait to be taken
    enqueued lines  per rank: how far it has compared the calls on GPU arrays; then one for each
                    other host
    reasons         per rank: the exception that took it out of the communicator, as text
    shrinking       per rank: its state in shrink(), and its proposal of the survivors
    cpus            CPUS words: which rank waited last on a CPU
    facts           text: what a process that is no rank needs to read the segment
    records         per rank: ring of RECORDS records, 256 bytes each
    slots           ring of RING x P slots: a header, and a payload of up to SMALL_BYTES

Memory for the parts up to here is reserved when the segment is made (`first_bytes`). The following
parts have no memory until they are first used (`room`)::

    payloads        ring of RING x P larger payloads, of up to rooted_bytes
    stages          ring of n_stages x P stages of chunk_bytes each
    enqueued calls  per rank: ring of enqueued_records records, if any rank has a GPU; then one for
                    each other host, which this host's leader fills in
    mailboxes       P x P, by receiver and sender: memory is taken when one is first used
    spans           per rank: ring of SPANS calls with their times; who watches the job takes memory

If these ranks exchange messages with ranks of other hosts, there are also status lines, bells,
opened words, acknowledgements and mailboxes for those, after the ones of this host's ranks.

Words that ranks wait for are {int32 value, int32 waiters}. A slot's header word is {int32 sequence,
uint32 signature digest}, followed by its waiters. Sequences are compared by their difference, so
they may wrap. `words` describes what a rank keeps for itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from gpucoll.blocks import Block, Field, Words, word, words
from gpucoll.codes import Codes

LAYOUT_VERSION = 17
LINE_BYTES = 128
RING = 16
"""Slots per rank: by how many unsynchronised calls (small broadcasts) a rank may be ahead."""
CPUS = 256
"""CPUs further apart share a word. If a CPU's word was overwritten, no rank seems to wait there."""
AHEAD = 4
"""How many calls a rank may have posted without having ended them.

So a rank must verify, at the latest, ``RING - AHEAD`` calls after the last one whose headers it has
all seen (docs/decisions/0031).
"""
RECORDS = 32
RECORD_BYTES = 256
HEADER_BYTES = 64
REASON_BYTES = 256
INLINE_BYTES = 32
"""Payloads of up to this size share the header's cache line: one transfer instead of two."""
INLINE_OFFSET = 32
SLOT_BYTES = 512
SMALL_BYTES = SLOT_BYTES - HEADER_BYTES
"""Payloads of up to this size lie in the slot, after the header: they always have memory."""
STAGES = 3

# Offsets in the event line.
EVENT_ABORT = 0
EVENT_WORD = 8
EVENT_PAYLOADS = 16
"""Up to how many bytes all payloads have memory; below `SMALL_BYTES`: only those in slots."""
EVENT_SURVIVORS = 24
"""Whose proposal in `shrink` is valid: {round: 32 bits, rank: 24 bits, `Phase`: 8 bits}."""
EVENT_GROWTH = 32
"""Whether the last growth has been made: twice its number, and 1 if it has."""
EVENT_REPORT = 40
"""Which process writes, or has written, the report on a failure: `gpucoll.group.host.report`."""
EVENT_WATCHED = 48
"""Until when somebody watches, by the monotonic clock; 0: nobody does. Ranks note spans then."""

# Further offsets in the event line, the same in all versions: what `gpucoll.observe` reads first.
EVENT_MAGIC = 64
EVENT_LAYOUT = 72
"""`LAYOUT_VERSION`."""
EVENT_FACTS = 80
"""The offset of the facts; then their size in bytes."""
MAGIC = int.from_bytes(b"gpucoll\1", "little")
FACTS_BYTES = 1024
FACTS_RANK_BYTES = 32
"""For each rank of the host: its process and its number."""
FACTS_OTHER_BYTES = 12
"""For each rank of another host: its number."""

# Offsets in a status line.
STATUS_DONE = 0
STATUS_COPIES = 8
"""1 if this rank can read the private memory of every other one (`peer_memory`)."""
STATUS_CLOSED = 16
STATUS_CLOSED_SEQUENCE = 24
STATUS_SINCE = 32
"""When the rank began to wait in a collective, by the monotonic clock; written while it sleeps.

Then the number of that collective.
"""
STATUS_ABROAD = 48
"""Since when the rank, its host's leader, waits for other hosts; 0: it does not."""
STATUS_ACKNOWLEDGED = (64, 96)
"""Two acknowledgements of {event, sequence, chunk}, by the parity of the event's generation.

A fast rank may answer the next event while a slow one still reads its answer to the last.
"""

# Offsets in a rank's part of `shrinking`.
SHRINKING_BYTES = 2 * LINE_BYTES
SHRINKING_ROUND = 0
"""The round of `shrink` that the rank waits for: 1, 2, ...; 0: none yet; or `LEFT_SHRINK`."""
SHRINKING_COMPLETED = 8
SHRINKING_PORT = 16
"""The port at which the rank listens, in case it is the first survivor; only between hosts."""
SHRINKING_PROPOSALS = (128, 192)
"""By the parity of the round: {last completed call, token of 16 bytes, a bit for each rank}."""
LEFT_SHRINK = -1

SPANS = 2048
SPAN_BYTES = 64
SPANS_BYTES = LINE_BYTES + SPANS * SPAN_BYTES
"""A rank's spans: how many it has written, on a line of its own, and then the ring."""

# Offsets in a slot's header.
HEADER_WORD = 0
HEADER_WAITERS = 8
HEADER_SOURCE = 16
HEADER_DESTINATION = 24
HEADER_ADDRESS = 32
"""Address of a larger private input in its process; small payloads use the same place."""

# In a bell's line; the word that a rank sleeps on comes first.
BELL_DOING = 8
"""What the rank waits for at its bell; see `Doing`."""


class Doing(Block):
    """From `BELL_DOING` on: the message that a rank sleeps for, written before it sleeps."""

    kind: int  # kind of the operation; 0: the rank waits for no message
    peer: int
    tag: int
    size_bytes: int
    dtype: int
    further: int  # how many more operations it waits for
    timeout_ns: int
    # The rank's first send that waits for its receive, whatever the rank is doing.
    sends: int  # 1 if there is one
    send_peer: int
    send_tag: int
    since_ns: int  # when the rank began to wait, by the monotonic clock


# Offsets in an enqueued line.
ENQUEUED_COMPARED = 0
ENQUEUED_FAILED = 8
"""1 if this rank could not connect its GPU: the others need not wait for it."""
ENQUEUED_PENDING = 16
"""The number of the oldest call that is not over on this rank's GPU, if that takes long."""
ENQUEUED_PENDING_NS = 24
"""Since when that is the oldest one, by the monotonic clock; 0: none takes long."""
ENQUEUED_BEGUN = 32
"""1 if the stream has reached that call."""
ENQUEUED_RECORDS = 256
"""By how many calls on GPU arrays a rank may be ahead of the comparison of the slowest one."""

# A mailbox consists of its receiver's words, a small ring of records, whose lines stay in caches,
# and a large ring, which is written once the small one is full. Memory for each is taken when it is
# first used. A record is an envelope, then a shape and a description if the envelope has no room
# for them, then data.
MAILBOX_TAIL = 0
"""Bytes of records that the receiver has taken."""
MAILBOX_MATCHED = 8
"""Bytes of messages that have been matched with a receive."""
MAILBOX_MATCHED_COUNT = 16
"""The number of these messages."""
MAILBOX_SMALL = 256
MAILBOX_LARGE = 16384
POST_BYTES = 32 << 10
"""Streamed data changes hands in parts of this size: 8 KiB parts took a fifth longer."""
MOST_EAGER_BYTES = 8192
"""From here on one copy by the kernel is faster than two through a mailbox."""
ENVELOPE_BYTES = 64
SHAPE_BYTES = 64
MESSAGE_DIMENSIONS = 8
MOST_DESCRIPTION_BYTES = 8192
ACKNOWLEDGEMENTS = 512
"""How many messages of a rank may wait to be acknowledged; further ones are streamed."""


class Envelope(Block):
    """The first cache line of a record in a mailbox.

    It also contains the data of a very small message: one transfer between cores.
    """

    number: int  # not zero; written last
    size_bytes: int  # of the whole message; in a `Way.PART`, of that part
    tag: int
    dtype: int
    packed: int  # way, mode, 16 + dimensions, acknowledgement, bytes of the description
    place: int  # or the first dimension, if the data lies in the mailbox
    first_length: int  # the first dimension, if it does not; or up to SMALLEST_BYTES of data


SMALLEST_BYTES = 16


class SentNumber(Codes):
    """In place of a message's number of dimensions: a number was sent, not an array."""

    NUMPY = -1
    PYTHON = -2


class Way(Codes):
    """Where a message's data is."""

    POSTED = 0  # after the envelope, and in the parts that follow
    IN_ARENA = 1  # at an offset in the sender's arena
    IN_PROCESS = 2  # at an address in the sender's process
    ON_ANOTHER_HOST = 3  # it comes when it is requested
    # Records that are not messages.
    PART = 4  # a part of the message before
    TO_START = 5  # the next record is at the start of the ring
    TO_OTHER = 6  # the next record is in the other ring


NEVER = 1 << 62
"""In place of a threshold in bytes: a size that no array reaches."""
UNKNOWN_BYTES = 1 << 62
"""In place of the largest input's size, if ranks do not know each other's: not small."""
NOT_SHARED = -1
"""In place of an offset: the buffer is not in its rank's arena."""


class Record(Block):
    """The record of one rank's call, which errors show."""

    sequence: int
    collective: int
    operation: int
    dtype: int
    root: int
    count: int
    size_bytes: int
    state: int
    parameter: int
    begun_ns: int  # when the rank came to the call, by the monotonic clock; 0: nobody watched
    n_dimensions: int = word(11)
    dimensions: Field[Words] = words(4)  # further ones are in the digest only
    n_counts: int
    counts: Field[Words] = words(8)  # further ones are in the digest only
    # Fields of a call on GPU arrays.
    sent: int  # all_to_all with counts: a sum over what goes to each rank
    received: int  # a sum over what comes from each rank: summed over all ranks, both are equal
    header: int = word(31)  # {sequence, digest}, written last


SHOWN_DIMENSIONS = 4
SHOWN_COUNTS = 8


class RecordState(Codes):
    """The state of a recorded call."""

    STARTED = 1
    DONE = 2
    LEFT = 3  # with a MismatchError
    GOES_AHEAD = 4  # started, and this rank may end it before all ranks have arrived


UNFINISHED = (RecordState.STARTED, RecordState.GOES_AHEAD)
"""States of calls that a rank is in."""


class Abort(Codes):
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
    ELSEWHERE = 13  # on another host, or between hosts: the error is stored elsewhere
    ENQUEUED_MESSAGE = 14  # a message of GPU arrays waited too long; it has no sequence number
    MISMATCH = 15  # the ranks' calls differed, and a rank may have gone on before that was found


class Tuning(NamedTuple):
    """The CPU backend's tuning. Rank 0's values are used by every rank of a communicator."""

    one_shot_bytes: int
    """Private arrays up to this size go through a slot in one step."""
    chunk_bytes: int
    """Larger private arrays are cut into chunks of this size."""
    symmetric_min_bytes: int
    """Arrays in shared arenas are reduced in place from this size on."""
    rooted_bytes: int
    """Data from or to a root goes through a slot up to this size, and senders need not wait."""
    single_copy_min_bytes: int
    """Private inputs from this size on, if only moved, are read straight from their process."""
    single_copy_max_bytes: int
    """If a rank needs more than this of a root's input, the data goes through stages."""
    gather_copy_max_bytes: int
    """The same limit for data to a root; half of it if the root has its own input to copy."""
    prefetch_bytes: int
    """How far ahead lines are prefetched."""
    initial_sequence: int = 0
    """Where sequence numbers start; tests of their wrapping set it."""
    enqueued_records: int = 0
    """Records of calls on GPU arrays for each rank; a power of two, or 0 without a GPU."""
    eager_room_bytes: int = 1 << 20
    """Bytes of unreceived messages from one rank to another before a small send waits."""
    streamed_bytes: int = 256 << 10
    """How much of a mailbox's large ring streamed messages use, if the receiver keeps up.

    By so much the ring exceeds the eager room.
    """
    fetched_min_bytes: int = 0
    """Smaller messages are streamed, and never read straight from their process."""
    nontemporal_fills: int = 0
    """When shared memory is filled past the caches: 0: never, 1: while that is faster, 2: always.

    See `filling`.
    """
    root_copy_min_bytes: int = 0
    """Unless 0: data from a root is read straight from its process from this size on.

    This is only done if the root also copies its own input.
    """
    n_stages: int = STAGES
    """Stages of each rank that are used in turn where data goes one way.

    Reductions to which all ranks contribute results use the first three.
    """
    string_copies: int = 0
    """Whether the processor's string instruction fills and exchanges slots and stages."""
    other_hosts: int = 0
    """The number of other hosts, whose calls on GPU arrays are compared with this host's."""

    def words(self) -> tuple[int, ...]:
        """Return the fields in order, for sending."""
        return tuple(self)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class SegmentLayout:
    """Byte offsets of the segment's parts for a number of ranks and a tuning."""

    world_size: int
    tuning: Tuning
    others: int = 0
    """The number of ranks on other hosts with which these exchange messages."""

    @functools.cached_property
    def ends(self) -> int:
        """The number of ranks that a message may come from or go to."""
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
        """The number of compared rows of calls on GPU arrays: one per rank and per other host."""
        return self.world_size + self.tuning.other_hosts

    @functools.cached_property
    def shrinking(self) -> int:
        return round_up(self.reasons + self.world_size * REASON_BYTES, LINE_BYTES)

    @functools.cached_property
    def cpus(self) -> int:
        return self.shrinking + self.world_size * SHRINKING_BYTES

    @functools.cached_property
    def facts(self) -> int:
        return self.cpus + 8 * CPUS

    @functools.cached_property
    def facts_bytes(self) -> int:
        bytes_of_ranks = FACTS_RANK_BYTES * self.world_size + FACTS_OTHER_BYTES * self.others
        return round_up(FACTS_BYTES + bytes_of_ranks, LINE_BYTES)

    @functools.cached_property
    def records(self) -> int:
        return self.facts + self.facts_bytes

    @functools.cached_property
    def slots(self) -> int:
        return round_up(self.records + self.world_size * RECORDS * RECORD_BYTES, 4096)

    @functools.cached_property
    def eager_bytes(self) -> int:
        """Up to this size a message lies in the mailbox, and its sender need not wait."""
        return MOST_EAGER_BYTES

    @functools.cached_property
    def large_ring_bytes(self) -> int:
        """Size of a mailbox's large ring."""
        return round_up(self.tuning.eager_room_bytes + self.tuning.streamed_bytes, 4096)

    @functools.cached_property
    def mailbox_stride(self) -> int:
        return MAILBOX_LARGE + self.large_ring_bytes

    @functools.cached_property
    def first_bytes(self) -> int:
        """The size of the segment's first parts, which have memory from the beginning."""
        return round_up(self.slots + RING * self.world_size * SLOT_BYTES, 4096)

    @functools.cached_property
    def payloads(self) -> int:
        return self.first_bytes

    @functools.cached_property
    def payload_stride(self) -> int:
        """Bytes between payloads; not a power of two, since lines would compete for cache sets."""
        # For all_to_all with counts, a payload has the bytes to and from each rank. If an input is
        # one array for each rank, the arrays' addresses follow.
        pieces_bytes = 24 * self.world_size
        payload_bytes = max(self.tuning.one_shot_bytes, self.tuning.rooted_bytes, pieces_bytes)
        return round_up(payload_bytes + 1, LINE_BYTES)

    @functools.cached_property
    def stages(self) -> int:
        return round_up(self.payloads + RING * self.world_size * self.payload_stride, 4096)

    @functools.cached_property
    def enqueued(self) -> int:
        return self.stages + self.tuning.n_stages * self.world_size * self.tuning.chunk_bytes

    @functools.cached_property
    def mailboxes(self) -> int:
        records = self.enqueued_rows * self.tuning.enqueued_records
        return round_up(self.enqueued + records * RECORD_BYTES, 4096)

    @functools.cached_property
    def spans(self) -> int:
        return round_up(self.mailboxes + self.ends**2 * self.mailbox_stride, 4096)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Size of the whole segment in bytes, if all of it is used."""
        return self.spans + self.world_size * SPANS_BYTES

    def header(self, rank: int, sequence: int) -> int:
        """Return the offset of a rank's header for a call, as `steps.slot_of` does."""
        place = (sequence & (RING - 1)) * self.world_size + rank
        return self.slots + place * SLOT_BYTES

    def payload(self, rank: int, sequence: int, size_bytes: int) -> int:
        """Return the offset of a rank's payload for a call, if it is not inline."""
        turn = (sequence & 0x7FFFFFFF) // RING
        column = (rank + turn) % self.world_size
        if size_bytes <= SMALL_BYTES:
            return self.header(column, sequence) + HEADER_BYTES
        place = (sequence & (RING - 1)) * self.world_size + column
        return self.payloads + place * self.payload_stride
