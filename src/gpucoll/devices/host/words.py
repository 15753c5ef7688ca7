"""What Python and the compiled threads of Host devices share, word by word.

One piece of private memory for the process: its state, a table of events, and a block for each
stream. Streams and events are handles into these tables, so a wrong one is found, not followed.
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
"""Commands that a stream takes; then who brings more waits, as for a GPU."""
ROW_WORDS = 12
RECORDED_SHIFT = 48
"""An event that was recorded is ``(place of the stream + 1) << 48 | number of the command``."""
EVENT_IS_NEW = 1
"""An event that was never recorded; 0: there is no such event."""


class State(IntEnum):
    """Words of the process's state."""

    THREAD_KEY = 0
    """Of pthreads: under it each thread has its current device's number, plus one."""
    IS_FORKED = 1
    """A child's copy: the threads are its parent's."""
    STOP = 2
    """The process ends: every stream stops where it is."""
    ERRORS = 3
    """For each device a code: what has gone wrong there, which all later calls return."""
    DEFAULT_STREAMS = ERRORS + MOST_DEVICES
    """For each device its default stream's handle; 0 before the device is opened."""


class Stream(IntEnum):
    """Words of a stream; they are used again by later ones, whose commands count on."""

    DEVICE = 0
    IS_OPEN = 1
    """Whether it takes commands: 0 once it is destroyed."""
    LOCK = 2
    """Held by who puts a command into the ring."""
    TAIL = 3
    """Commands that were put into it, ever."""
    DONE = 4
    """Of these the ones that are done."""
    BELL = 5
    """Two 32-bit words, count and sleepers: of the thread."""
    DONE_BELL = 6
    """Of those who wait for a command's end."""
    FUTEX_TIMEOUT = 7
    """A timespec of the thread's."""
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
    """Only counts: what an event that is recorded refers to."""
    CALL = 1
    """A function and eight words for it."""
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
    """The code that the device has from now on."""
    EXIT = 9


class Code(IntEnum):
    """What functions return that are called by address: the numbers of the vendors' drivers."""

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
    Code.INVALID_VALUE: "an argument is wrong",
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
