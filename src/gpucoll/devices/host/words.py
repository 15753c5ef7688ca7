"""The words that Python and the compiled threads of Host devices share.

They lie in one piece of private memory: the process's state, a table of events, and a block for
each stream. Streams and events are handles into these tables, so that a wrong handle is detected.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.codes import Codes

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


class Stream(Block):
    """A stream. Later streams reuse its words, and their commands continue the numbering."""

    device: int
    is_open: int
    """Whether it accepts commands: 0 once it is destroyed."""
    lock: int
    """Held by a thread that puts a command into the ring."""
    tail: int
    """Number of commands that were ever put into it."""
    done: int
    """Number of these commands that are done."""
    bell: int
    """The thread's bell: two 32-bit words, count and sleepers."""
    done_bell: int
    """The bell of threads that wait for a command's end."""
    futex_timeout: Field[Words] = words(2)
    """A timespec for the thread."""
    is_running: int
    """Whether there is a thread."""
    state: Field[State]
    ring: Field[Words] = words(ROWS * ROW_WORDS, 16)


class State(Block):
    """The process's state, with all events and streams."""

    thread_key: int
    """The pthreads key under which each thread has its current device's number, plus one."""
    is_forked: int
    """Whether this is a child's copy: the threads are its parent's."""
    stop: int
    """Whether the process ends: then every stream stops where it is."""
    errors: Field[Words] = words(MOST_DEVICES)
    """For each device, the code of its failure, which all later calls return."""
    default_streams: Field[Words] = words(MOST_DEVICES)
    """For each device, its default stream's handle; 0 before the device is opened."""
    events: Field[Words] = words(MOST_EVENTS, 136)
    streams: Field[Words] = words(MOST_STREAMS * Stream.n_words)
    """A `Stream` for each place."""


class Command(Codes):
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


class Code(Codes):
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
