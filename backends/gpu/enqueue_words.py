"""What Python and the compiled way of a call onto its stream share, word by word."""

from __future__ import annotations

from enum import IntEnum

MOST_ARGUMENTS = 8
"""Of a library's function, communicator and stream included."""


class DriverTable(IntEnum):
    """Words of what is the same for all calls on a GPU: addresses of the driver's functions."""

    PUSH = 0
    """CUDA: makes a context current, until it is popped."""
    CONTEXT = 1
    POP = 2
    GET_DEVICE = 3
    """HIP: says which device is current; 0 on CUDA."""
    SET_DEVICE = 4
    NUMBER = 5
    IS_CAPTURING = 6
    RECORD = 7
    WAIT = 8
    PLACE = 9
    """Counts: odd while a thread is in the driver, which may keep it there; even elsewhere."""
    GONE = 10
    """A `Gone`: who comes out of the driver looks at it before it calls the library."""
    ANSWER = 11
    """Where these functions write."""


DRIVER_TABLE_WORDS = int(DriverTable.ANSWER) + 1


class Gone(IntEnum):
    """Whether the library's communicator is still there; another thread may give it up."""

    NO = 0
    PERHAPS = 1
    """That is just being found out: wait."""
    YES = 2


class EnqueueBlock(IntEnum):
    """Words of what is the same for all calls of a kind."""

    DRIVER_TABLE = 0
    CALL = 1
    """The call block that is posted."""
    FUNCTION = 2
    """The library's."""
    POLL = 3
    """Of the library, too: says of a communicator whether it is still busy with a call."""
    IN_PROGRESS = 4
    """The code by which the library says that a thread of its own is about to enqueue the work."""
    N_SETTINGS = 5
    """How many of the function's arguments lie between the two addresses and the communicator."""
    ARGUMENTS = 6
    """All of them; the settings are filled in when the block is made."""


SETTINGS_AT = 2
"""Place of the first setting among the arguments."""
ENQUEUE_BLOCK_WORDS = int(EnqueueBlock.ARGUMENTS) + MOST_ARGUMENTS
POLLS = 256
"""So often that is waited for here, a CPU's time slice between: as a rule it takes some 20 us."""


class Step(IntEnum):
    """How far a call got that did not succeed: the upper half of what it returns."""

    NOTHING = 1
    """Nothing was posted and no work enqueued: it is for Python to do, or to refuse."""
    START = 2
    """Posted, but the first event could not be recorded."""
    CALL = 3
    """The library's function returned the code in the lower half."""
    END = 4
    """Enqueued, but the second event could not be recorded."""
    GONE = 5
    """Posted, but the communicator was given up while the driver kept this thread."""
