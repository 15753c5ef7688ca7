"""gpucoll's errors as users of torch.distributed catch them.

Each is its namesake of `gpucoll.errors` and a `torch.distributed.DistBackendError` (a
RuntimeError), with the same text: the ranks and the reason. A deadline's text has the word
"timeout" in it, for which programs look that were written for other backends.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from gpucoll import errors


class ArgumentError(errors.ArgumentError, DistBackendError):
    """A value that cannot serve; nothing moved."""


class ArgumentTypeError(errors.ArgumentTypeError, DistBackendError):
    """A type that cannot serve; nothing moved."""


class StateError(errors.StateError, DistBackendError):
    """A call that cannot be made now; nothing moved."""


class MismatchError(errors.MismatchError, DistBackendError):
    """The ranks did not make the same call."""


class BackendUnavailableError(errors.BackendUnavailableError, DistBackendError):
    """What is needed for these tensors cannot serve here."""


class BackendError(errors.BackendError, DistBackendError):
    """A vendor's library or the GPU failed inside a call."""


class DeadlineError(errors.DeadlineError, DistBackendError):
    """A wait ran out."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """A rank's process is gone."""


class AbortedError(errors.AbortedError, DistBackendError):
    """The group was given up."""


class SharedMemoryError(errors.SharedMemoryError, DistBackendError):
    """The host has no memory for what the ranks share."""


class RendezvousError(errors.RendezvousError, DistBackendError):
    """The ranks could not find each other, or do not belong together."""


class AuthenticationError(errors.AuthenticationError, DistBackendError):
    """Ranks on several hosts have no secret, or different ones."""


class RendezvousDeadlineError(errors.RendezvousDeadlineError, DistBackendError):
    """A rank did not come in time."""


_KINDS: dict[type[errors.GpucollError], type[errors.GpucollError]] = {
    kind.__bases__[0]: kind
    for kind in (
        *(ArgumentError, ArgumentTypeError, StateError, MismatchError, BackendUnavailableError),
        *(BackendError, DeadlineError, PeerLostError, AbortedError, SharedMemoryError),
        *(RendezvousError, AuthenticationError, RendezvousDeadlineError),
    )
}


def as_torchs(error: errors.GpucollError) -> errors.GpucollError:
    """Return the error to raise in its place."""
    kind = _KINDS.get(type(error))
    if kind is None:
        return error
    text = str(error)
    if isinstance(error, errors.DeadlineError) and " timeout " not in text:
        text = f"Reached the timeout of a wait: {text}"
    return kind(text)
