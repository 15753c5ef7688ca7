"""The words that Python and the compiled enqueue step share."""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.codes import Codes
from gpucoll.transport.shared.words import Call

MOST_ARGUMENTS = 8
"""Of a library's function, including communicator and stream."""


class DriverTable(Block):
    """What is the same for all calls on a GPU: addresses of the driver's functions."""

    push: int
    """CUDA: makes a context current, until it is popped."""
    context: int
    pop: int
    get_device: int
    """HIP: returns the current device; 0 on CUDA."""
    set_device: int
    number: int
    is_capturing: int
    record: int
    wait: int
    place: int
    """A counter: odd while a thread is in the driver, which may block it; even otherwise."""
    gone: int
    """A `Gone`: a thread that leaves the driver reads it before it calls the library."""
    answer: int
    """The word into which these functions write."""


class Gone(Codes):
    """Whether the library's communicator still exists; another thread may give it up."""

    NO = 0
    PERHAPS = 1
    """Another thread is finding that out: wait."""
    YES = 2


class EnqueueBlock(Block):
    """What is the same for all calls of a kind."""

    driver_table: Field[DriverTable]
    call: Field[Call]
    """The call block that is posted."""
    function: int
    """Address of the library's function."""
    poll: int
    """Address of the library's function that reports whether a communicator is still busy."""
    in_progress: int
    """The code with which the library reports that its own thread will enqueue the work."""
    n_settings: int
    """Number of the function's arguments between the two addresses and the communicator."""
    arguments: Field[Words] = words(MOST_ARGUMENTS)
    """All arguments; the settings are filled in when the block is made."""


SETTINGS_AT = 2
"""Index of the first setting among the arguments."""
POLLS = 256
"""Number of polls, one CPU time slice apart, before Python takes over; usually takes some 20 us."""


class Step(Codes):
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
