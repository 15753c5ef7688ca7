"""The words of small calls between hosts, by number: what Python and the compiled loops share.

What leaders send is a message for each step: a header of `MESSAGE_WORDS` and then parts, one for
each host of which the sender has it. A part is a header of `PART_WORDS` and the inputs of that
host's ranks, one after the other, filled up to whole words.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = int.from_bytes(b"gpusmal\x01", "little")
"""First word of a message; the last byte is the version of what goes over the connection."""
MESSAGE_WORDS = 4
"""Magic, number of the call, step, bytes that follow."""
PART_WORDS = 4
"""Digest of the call's signature, `PartKind`, bytes of data, `owner_of`: number and host."""
STEP_WORDS = 3
"""Descriptor to send on, descriptor to receive from, parts to send; `Word.GO_ON` may differ."""


class PartKind(IntEnum):
    """What a host brings to an exchange."""

    DATA = 0
    """The inputs of its ranks, as many bytes as its call says."""
    NOTHING = 1
    """It only finds out whether all make the same call."""
    FURTHER = 2
    """What it has goes by another exchange, over the links."""


class Outcome(IntEnum):
    """How the exchange of a call ended."""

    NONE = 0
    """The call has none, or none yet."""
    AGREED = 1
    """All hosts have made the same call, and everything is here."""
    DIFFERS = 2
    """They have not, or not all of what they have goes this way: the links have to tell."""
    AGAIN = 3
    """The slice is over; go on."""
    GONE = 4
    """A connection has ended."""
    ABORTED = 5
    DEADLINE = 6
    GARBLED = 7
    """What came is no message of this call."""


class Word(IntEnum):
    """Of a rank on several hosts.

    Attributes
    ----------
    HERE, N_HOSTS : int
        Which of how many hosts this is.
    RANK, WORLD_SIZE : int
        Which of how many ranks this is.
    EDGES : int
        Address of N_HOSTS + 1 numbers: how many ranks there are on the hosts before each.
    ORDER : int
        Address of all ranks, host by host.
    MOST_BYTES : int
        Calls with more data, of all ranks together, are large.
    LARGE : int
        Address of the loop that runs those, once all hosts have agreed on them; 0: Python does.
    IS_LARGE : int
        Whether this call is one.
    NUMBER : int
        Of the last call, counted alike on all ranks.
    COMPLETED : int
        Of the last call that has ended well here.
    ENTERED : int
        Address at which the other ranks of this host see that number.
    N_CLOSED : int
        Address of a word that is not 0 once a rank has closed the communicator.
    MAY_RUN : int
        Whether Python has looked who has closed, before this call.
    BELL_FD : int
        Wakes the thread of this host's leader.
    ABORT : int
        Address of this host's abort word.
    IS_OPEN : int
        Whether this leader's connections are.
    GO_ON, CARRIER : int
        Address of the function that goes on with an exchange, instead of over connections, until a
        time, and returns its `Outcome`; and of what it needs beside these words. 0: there is none.
    STEPS, N_STEPS : int
        Address and number of the exchange's steps.
    HELD, HELD_BYTES, CAPACITY : int
        Address of the parts that are here: this host's, then those of the hosts before it,
        backwards; their bytes, and for how many there is room. In front of them is one word, which
        goes to the other ranks of this host together with them: the `Outcome`.
    DIGEST, KIND : int
        Of this host's part.
    STEP, SENT, CAME : int
        Which step is under way, and how many bytes of its two messages.
    COMES : int
        How many bytes are expected behind the header of the message that comes.
    OUTCOME, LINK, ERRNO : int
        How the exchange of the last call ended; with which host, and why.
    START_NS : int
        When the call began.
    SENT_HEADER, CAME_HEADER, MESSAGE, VECTORS, POLL_FDS, CLOCK, ONE : int
        Arguments of system calls.
    PARTS : int
        Address of where each host's data lies, by host; behind it how many bytes each is to bring.
    INPUTS : int
        Address of each rank's input, by rank; behind it one more word, of the kernel's output.
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
