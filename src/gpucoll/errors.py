"""Every error that gpucoll raises on purpose.

::

    GpucollError
    ├── UsageError                 this rank's call is wrong; nothing moved, nothing changed
    │   ├── ArgumentError          an invalid value (also ValueError): shape, op, root, overlap
    │   ├── ArgumentTypeError      an invalid type (also TypeError): not an array, another library
    │   └── StateError             not allowed now (also RuntimeError): closed, forked, other thread
    ├── MismatchError              the ranks did not make the same call; usable or broken: see below
    ├── BackendUnavailableError    a backend that is needed cannot be used here: cause and remedy
    ├── BackendError               a vendor's library or the GPU failed inside a call; broken
    ├── DeadlineError              a wait exceeded its deadline (also TimeoutError); broken
    ├── PeerLostError              a rank's process is gone, or has closed; broken
    ├── AbortedError               a rank gave up the communicator; broken
    ├── ShrinkError                too few ranks are left, or the others continued without this one
    ├── SharedMemoryError          the host has no memory for what ranks share (also MemoryError)
    ├── RendezvousError            the ranks did not find each other, or do not belong together
    │   ├── AuthenticationError    a process without the right credentials tried to take part
    │   └── RendezvousDeadlineError   a rank did not arrive in time (also DeadlineError)
    ├── SecureSumError             a message or step of a secure sum is refused; nothing changed
    │   └── TooFewClientsError     too few clients are left; nothing of their sum can be revealed
    └── LaunchError                a rank that gpucoll started died (signal, exit code)

After a MismatchError the communicator is usable if every rank raises it in the call that differed.
This holds for calls on host arrays in which all ranks wait for each other. The communicator is
broken after small rooted calls and scans, which some ranks complete before others have arrived, and
after calls on GPU arrays. On a broken communicator every later call raises the same error at once;
only `shrink`, to continue with the ranks that are left, and `close` remain.
After any error the values of `out` are undefined, and so are those of the input if it was `out`.
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
    "SecureSumError",
    "SharedMemoryError",
    "ShrinkError",
    "StateError",
    "TooFewClientsError",
    "UsageError",
]


class GpucollError(Exception):
    """Base class of all errors that gpucoll raises on purpose."""


class UsageError(GpucollError):
    """This rank's call is wrong. Nothing was sent, and the communicator is unchanged."""


class ArgumentError(UsageError, ValueError):
    """A value is invalid: shape, size, op, root, overlap, a read-only `out`."""


class ArgumentTypeError(UsageError, TypeError):
    """A type is invalid: not an array, an array of another library, an object dtype."""


class StateError(UsageError, RuntimeError):
    """The call is not allowed in this state: after close, in a forked child, a second thread."""


class MismatchError(GpucollError):
    """The ranks did not make the same call.

    Raised on every rank that is in the call. A rank that has already left it (a broadcast's root)
    raises it in its next call. If all ranks are still in the call, the communicator stays usable,
    for host arrays; otherwise it is broken. The text says in which call the ranks differed, and
    whether the communicator is usable.
    """


class BackendUnavailableError(GpucollError):
    """A backend cannot be used here. The message has the cause and the remedy."""


class BackendError(GpucollError):
    """A vendor's library or the GPU failed inside a call. The message has its own error text.

    The communicator is broken. After an error of the GPU itself (an illegal address, a lost GPU)
    nothing in this process can use that GPU any more.
    """


class DeadlineError(GpucollError, TimeoutError):
    """A wait exceeded its deadline; names the operation and the late ranks.

    The communicator is broken, except if a receive or probe had its own ``timeout_s`` and no
    message came by then: only the receive or probe is withdrawn.
    """


class PeerLostError(GpucollError):
    """A rank that this one needs is lost: its process is gone, or has closed the communicator."""


class AbortedError(GpucollError):
    """The communicator was given up, by `abort` or because a rank was interrupted in a call."""


class ShrinkError(GpucollError):
    """`shrink` made no communicator for this rank.

    Too few ranks are left here to continue, or the others have continued without this one. The
    message has the numbers. Only `close` remains; a minority should then end.
    """


class SharedMemoryError(GpucollError, MemoryError):
    """The host has no memory for what the ranks share. The message has the amount and the remedy.

    If a call raises it, nothing was moved on this rank, and the communicator is unchanged.
    """


class RendezvousError(GpucollError):
    """The ranks did not find each other in time, or do not belong together."""


class AuthenticationError(RendezvousError):
    """A process without the right credentials tried to take part in the job."""


class RendezvousDeadlineError(RendezvousError, DeadlineError):
    """A rank did not arrive at `init`, `split` or `duplicate` in time; names the missing ranks."""


class SecureSumError(GpucollError):
    """A message of a secure sum, or a step of a party, is refused. Nothing was changed by it."""


class TooFewClientsError(SecureSumError):
    """Too few clients of a secure sum are left. Nothing of their sum can be revealed."""


class LaunchError(GpucollError):
    """A rank that gpucoll started died: killed by a signal, or with an exit code."""
