"""The words that Python and the compiled enqueue step share."""

from __future__ import annotations

from enum import IntEnum

MOST_ARGUMENTS = 8
"""Of a library's function, including communicator and stream."""


class DriverTable(IntEnum):
    """Words that are the same for all calls on a GPU: addresses of the driver's functions."""

    PUSH = 0
    """CUDA: makes a context current, until it is popped."""
    CONTEXT = 1
    POP = 2
    GET_DEVICE = 3
    """HIP: returns the current device; 0 on CUDA."""
    SET_DEVICE = 4
    NUMBER = 5
    IS_CAPTURING = 6
    RECORD = 7
    WAIT = 8
    PLACE = 9
    """A counter: odd while a thread is in the driver, which may block it; even otherwise."""
    GONE = 10
    """A `Gone`: a thread that leaves the driver reads it before it calls the library."""
    ANSWER = 11
    """The word into which these functions write."""


DRIVER_TABLE_WORDS = int(DriverTable.ANSWER) + 1


class Gone(IntEnum):
    """Whether the library's communicator still exists; another thread may give it up."""

    NO = 0
    PERHAPS = 1
    """Another thread is finding that out: wait."""
    YES = 2


class EnqueueBlock(IntEnum):
    """Words that are the same for all calls of a kind."""

    DRIVER_TABLE = 0
    CALL = 1
    """The call block that is posted."""
    FUNCTION = 2
    """Address of the library's function."""
    POLL = 3
    """Address of the library's function that reports whether a communicator is still busy."""
    IN_PROGRESS = 4
    """The code with which the library reports that its own thread will enqueue the work."""
    N_SETTINGS = 5
    """Number of the function's arguments between the two addresses and the communicator."""
    ARGUMENTS = 6
    """All arguments; the settings are filled in when the block is made."""


SETTINGS_AT = 2
"""Index of the first setting among the arguments."""
ENQUEUE_BLOCK_WORDS = int(EnqueueBlock.ARGUMENTS) + MOST_ARGUMENTS
POLLS = 256
"""Number of polls, one CPU time slice apart, before Python takes over; usually takes some 20 us."""


class Step(IntEnum):
    """How far a failed call got: the upper half of the returned number."""

    NOTHING = 1
    """Nothing was posted or enqueued: Python makes the call, or refuses it."""
    START = 2
    """Posted, but the first event could not be recorded."""
    CALL = 3
    """The library's function returned the code in the lower half."""
    END = 4
    """Enqueued, but the second event could not be recorded."""
    GONE = 5
    """Posted, but the communicator was given up while this thread was in the driver."""
