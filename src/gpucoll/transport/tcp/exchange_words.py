"""The words of small calls between hosts, by number, for Python and the compiled loops.

Leaders send one message for each step. It is a header of `MESSAGE_WORDS`, followed by one part for
each host whose part the sender has. A part is a header of `PART_WORDS` and the inputs of that
host's ranks, one after the other, padded to whole words.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = int.from_bytes(b"gpusmal\x01", "little")
"""First word of a message; its last byte is the version of the protocol on the connection."""
MESSAGE_WORDS = 4
"""Magic, number of the call, step, bytes that follow."""
PART_WORDS = 4
"""Digest of the call's signature, `PartKind`, bytes of data, `owner_of`: number and host."""
STEP_WORDS = 3
"""Descriptor to send on, descriptor to receive from, parts to send; `Word.GO_ON` may differ."""


class PartKind(IntEnum):
    """What a host brings to an exchange."""

    DATA = 0
    """The inputs of its ranks, in the sizes that its call gives."""
    NOTHING = 1
    """No data: it only finds out whether all hosts make the same call."""
    FURTHER = 2
    """No data here: its data goes by another exchange, over the links."""


class Outcome(IntEnum):
    """How the exchange of a call ended."""

    NONE = 0
    """The call has no exchange, or none yet."""
    AGREED = 1
    """All hosts have made the same call, and everything is here."""
    DIFFERS = 2
    """They have not, or some data goes another way: an exchange over the links must follow."""
    AGAIN = 3
    """The slice is over; go on."""
    GONE = 4
    """A connection has ended."""
    ABORTED = 5
    DEADLINE = 6
    GARBLED = 7
    """The received bytes are not a message of this call."""


class Word(IntEnum):
    """The words of a rank in a group on several hosts.

    Attributes
    ----------
    HERE, N_HOSTS : int
        This host, and the number of hosts.
    RANK, WORLD_SIZE : int
        This rank, and the number of ranks.
    EDGES : int
        Address of N_HOSTS + 1 numbers: how many ranks there are on the hosts before each.
    ORDER : int
        Address of all ranks, host by host.
    MOST_BYTES : int
        Calls with more data than this, of all ranks together, are large.
    LARGE : int
        Address of the loop that runs large calls, once all hosts have agreed on them; 0: Python
        does.
    IS_LARGE : int
        Whether this call is large.
    NUMBER : int
        Number of the last call, counted alike on all ranks.
    COMPLETED : int
        Number of the last call that has succeeded here.
    ENTERED : int
        Address at which the other ranks of this host read NUMBER.
    N_CLOSED : int
        Address of a word that is not 0 once a rank has closed the communicator.
    MAY_RUN : int
        Whether Python has checked, before this call, which ranks have closed.
    BELL_FD : int
        Descriptor that wakes the thread of this host's leader.
    ABORT : int
        Address of this host's abort word.
    IS_OPEN : int
        Whether this leader's connections are open.
    GO_ON, CARRIER : int
        If other code than connections carries exchanges: address of the function that goes on with
        an exchange until a given time and returns its `Outcome`, and of further data for it. 0:
        there is none.
    STEPS, N_STEPS : int
        Address and number of the exchange's steps.
    HELD, HELD_BYTES, CAPACITY : int
        Address of the parts that are here (this host's, then those of the hosts before it,
        backwards), their bytes, and the room for them in bytes. The word before them is the
        `Outcome`, which goes to the other ranks of this host together with the parts.
    DIGEST, KIND : int
        Digest and kind of this host's part.
    STEP, SENT, CAME : int
        The current step, and how many bytes of its two messages were sent and received.
    COMES : int
        How many bytes are expected after the header of the message to receive.
    OUTCOME, LINK, ERRNO : int
        How the exchange of the last call ended; with which host, and the errno.
    START_NS : int
        When the call began.
    SENT_HEADER, CAME_HEADER, MESSAGE, VECTORS, POLL_FDS, CLOCK, ONE : int
        Arguments of system calls.
    PARTS : int
        Address of the addresses of each host's data, by host; then the bytes that each is to bring.
    INPUTS : int
        Address of the addresses of each rank's input, by rank; then one more word, for the kernel's
        output.
    """

    HERE = 0
    N_HOSTS = 1
    RANK = 2
    WORLD_SIZE = 3
    EDGES = 4
    ORDER = 5
    MOST_BYTES = 6
    NUMBER = 7
    ENTERED = 8
    N_CLOSED = 9
    MAY_RUN = 10
    BELL_FD = 11
    ABORT = 12
    IS_OPEN = 13
    STEPS = 14
    N_STEPS = 15
    HELD = 16
    HELD_BYTES = 17
    CAPACITY = 18
    DIGEST = 19
    KIND = 20
    STEP = 21
    SENT = 22
    CAME = 23
    COMES = 24
    OUTCOME = 25
    LINK = 26
    ERRNO = 27
    START_NS = 28
    PARTS = 29
    INPUTS = 30
    ONE = 31
    SENT_HEADER = 32
    CAME_HEADER = 36
    MESSAGE = 40
    VECTORS = 48
    POLL_FDS = 52
    CLOCK = 54
    COMPLETED = 56
    LARGE = 57
    IS_LARGE = 58
    GO_ON = 59
    CARRIER = 60


WORDS = 61
