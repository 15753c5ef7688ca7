"""The words that Python and the compiled threads of Host devices share.

They lie in one piece of private memory: the process's state, a table of events, and a block for
each stream. Streams and events are handles into these tables, so that a wrong handle is detected.
"""

from __future__ import annotations

from enum import IntEnum

STREAM_HANDLES = 1 << 40
"""Handle of the first stream; the default streams' handles, 0 to 2, are far below."""
EVENT_HANDLES = 1 << 41
HANDLE_STEP = 16
MOST_STREAMS = 512
MOST_EVENTS = 1 << 16
MOST_DEVICES = 64
ROWS = 1024
"""The most commands that a stream holds; then a thread that enqueues more waits, as for a GPU."""
ROW_WORDS = 12
RECORDED_SHIFT = 48
"""The word of a recorded event is ``(place of the stream + 1) << 48 | number of the command``."""
EVENT_IS_NEW = 1
"""The word of an event that was never recorded; 0: there is no such event."""


class State(IntEnum):
    """Words of the process's state."""

    THREAD_KEY = 0
    """The pthreads key under which each thread has its current device's number, plus one."""
    IS_FORKED = 1
    """Whether this is a child's copy: the threads are its parent's."""
    STOP = 2
    """Whether the process ends: then every stream stops where it is."""
    ERRORS = 3
    """For each device, the code of its failure, which all later calls return."""
    DEFAULT_STREAMS = ERRORS + MOST_DEVICES
    """For each device, its default stream's handle; 0 before the device is opened."""


class Stream(IntEnum):
    """Words of a stream. Later streams reuse them, and their commands continue the numbering."""

    DEVICE = 0
    IS_OPEN = 1
    """Whether it accepts commands: 0 once it is destroyed."""
    LOCK = 2
    """Held by a thread that puts a command into the ring."""
    TAIL = 3
    """Number of commands that were ever put into it."""
    DONE = 4
    """Number of these commands that are done."""
    BELL = 5
    """The thread's bell: two 32-bit words, count and sleepers."""
    DONE_BELL = 6
    """The bell of threads that wait for a command's end."""
    FUTEX_TIMEOUT = 7
    """A timespec for the thread."""
    IS_RUNNING = 9
    """Whether there is a thread."""
    STATE = 10
    """Address of the process's state, for the thread."""
    RING = 16


STATE_WORDS = (State.DEFAULT_STREAMS + MOST_DEVICES + 7) // 8 * 8
STREAM_WORDS = Stream.RING + ROWS * ROW_WORDS
EVENTS_AT = STATE_WORDS
STREAMS_AT = EVENTS_AT + MOST_EVENTS
WORDS = STREAMS_AT + MOST_STREAMS * STREAM_WORDS


class Command(IntEnum):
    """The first word of a row; its arguments follow."""

    NOTHING = 0
    """Only counts: a recorded event refers to it."""
    CALL = 1
    """A function, and eight words for it."""
    COPY = 2
    """Destination, source, bytes."""
    FILL = 3
    """Address, bytes of the pattern, the pattern (two words), count."""
    WAIT_FOR_STREAM = 4
    """Place of another stream, and the number of its command."""
    WRITE_VALUE = 5
    """Address and 32-bit value."""
    WAIT_FOR_VALUE = 6
    DELAY = 7
    """Nanoseconds."""
    FAIL = 8
    """The device's code from now on."""
    EXIT = 9


class Code(IntEnum):
    """The codes of functions that are called by address: the numbers of the vendors' drivers."""

    OK = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALISED = 3
    INVALID_DEVICE = 101
    INVALID_HANDLE = 400
    NOT_READY = 600
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713
    LAUNCH_FAILED = 719


MEANINGS = {
    Code.INVALID_VALUE: "an argument is invalid",
    Code.OUT_OF_MEMORY: "there is no memory left",
    Code.NOT_INITIALISED: "a forked child cannot use its parent's devices: start processes by "
    "spawn, or fork before the first use",
    Code.INVALID_DEVICE: "there is no such device",
    Code.INVALID_HANDLE: "no such stream or event, or it belongs to another device than the "
    "current one",
    Code.NOT_READY: "work is not done yet",
    Code.ALREADY_REGISTERED: "the memory is registered already",
    Code.NOT_REGISTERED: "the memory is not registered",
    Code.LAUNCH_FAILED: "a kernel has failed; nothing runs on the device from then on",
}
