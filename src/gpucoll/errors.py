"""Every error that gpucoll raises on purpose.

::

    GpucollError
    ├── UsageError                 this rank's call is wrong; nothing moved, all is as before
    │   ├── ArgumentError          a value (also ValueError): shape, op, root, overlap, read-only
    │   ├── ArgumentTypeError      a type (also TypeError): no array, another library, object dtype
    │   └── StateError             not now (also RuntimeError): closed, forked child, second thread
    ├── MismatchError              the ranks did not make the same call; says what holds from now on
    ├── BackendUnavailableError    a backend that is needed cannot serve here: cause and remedy
    ├── BackendError               a vendor's library or the GPU failed inside a call; broken
    ├── DeadlineError              a wait ran out (also TimeoutError); broken
    ├── PeerLostError              a rank's process is gone, or it closed; broken
    ├── AbortedError               another rank, or this one, gave the communicator up
    ├── ShrinkError                too few are left to go on, or the others went on without this one
    ├── SharedMemoryError          the host has no memory for what ranks share (also MemoryError)
    ├── RendezvousError            the ranks could not find each other, or do not belong together
    │   ├── AuthenticationError    somebody who may not take part tried to
    │   └── RendezvousDeadlineError   a rank did not come in time (also DeadlineError)
    └── LaunchError                a rank that gpucoll started ended by itself (signal, exit code)

After a MismatchError the communicator is usable where every rank raises it in the call that
differed: calls on host arrays in which all ranks wait for all. After small rooted calls and scans,
which some ranks end before the others have come, and after calls on GPU arrays, it is broken.
"Broken" means: every later call raises the same error at once; what is left to do is `shrink`, to
go on with the ranks that are left, or `close`.
After any error `out` holds undefined values, and so does the input where it was `out`.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "ArgumentError",
    "ArgumentTypeError",
    "AuthenticationError",
    "BackendError",
    "BackendUnavailableError",
    "DeadlineError",
    "GpucollError",
    "LaunchError",
    "MismatchError",
    "PeerLostError",
    "RendezvousDeadlineError",
    "RendezvousError",
    "SharedMemoryError",
    "ShrinkError",
    "StateError",
    "UsageError",
]


class GpucollError(Exception):
    """Root of every error that gpucoll raises on purpose."""


class UsageError(GpucollError):
    """This rank's call is wrong. Nothing was sent; the communicator is as it was before."""


class ArgumentError(UsageError, ValueError):
    """A value that cannot serve: shape, size, op, root, overlap, a read-only `out`."""


class ArgumentTypeError(UsageError, TypeError):
    """A type that cannot serve: no array, an array of another library, an object dtype."""


class StateError(UsageError, RuntimeError):
    """A call that cannot be made now: after close, in a forked child, from a second thread."""


class MismatchError(GpucollError):
    """The ranks did not make the same call.

    Raised on every rank that is in the call; a rank that had already left it (a broadcast's root)
    gets it at its next call. Where all ranks are still in the call the communicator stays usable,
    for host arrays; otherwise it is broken. The text says in which call the ranks differed, and
    which of the two it is.
    """


class BackendUnavailableError(GpucollError):
    """A backend cannot serve here. The message names the cause and the remedy."""


class BackendError(GpucollError):
    """A vendor's library or the GPU failed inside a call; its own words are in the message.

    The communicator is broken. After an error of the GPU itself (an illegal address, a GPU that was
    lost) nothing in this process can use that GPU any more.
    """


class DeadlineError(GpucollError, TimeoutError):
    """A wait ran out. Names the operation and the late ranks; the communicator is broken.

    Not where a receive or probe has had a ``timeout_s`` of its own, and no message came by then:
    it is withdrawn alone.
    """


class PeerLostError(GpucollError):
    """A rank's process is gone, or has closed the communicator, while this one needs it."""


class AbortedError(GpucollError):
    """The communicator was given up: by `abort`, or by a rank interrupted inside a call."""


class ShrinkError(GpucollError):
    """No communicator came of `shrink` for this rank.

    Too few ranks are left here to go on, or the others have gone on without this one. The message
    has the numbers; what is left to do is `close`, and for a minority to end.
    """


class SharedMemoryError(GpucollError, MemoryError):
    """The host has no memory for what the ranks share. The message says how much, and what to do.

    In a call: nothing was moved on this rank, and the communicator is as it was before.
    """


class RendezvousError(GpucollError):
    """The ranks could not find each other in time, or do not belong together."""


class AuthenticationError(RendezvousError):
    """Somebody who may not take part in the job tried to."""


class RendezvousDeadlineError(RendezvousError, DeadlineError):
    """A rank did not come to `init`, `split` or `duplicate` in time; names who is missing."""


class LaunchError(GpucollError):
    """A rank that gpucoll started ended by itself: killed by a signal, or with an exit code."""
