"""gpucoll's errors in the form that users of torch.distributed catch.

Each error here is both the error of the same name in `gpucoll.errors` and a
`torch.distributed.DistBackendError` (a RuntimeError). The text is the same: the ranks and the
reason. The text of a deadline error also contains the word "timeout", because programs written for
other backends look for it.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from gpucoll import errors


class ArgumentError(errors.ArgumentError, DistBackendError):
    """A value is invalid; no data moved."""


class ArgumentTypeError(errors.ArgumentTypeError, DistBackendError):
    """A type is invalid; no data moved."""


class StateError(errors.StateError, DistBackendError):
    """The call is not allowed in the current state; no data moved."""


class MismatchError(errors.MismatchError, DistBackendError):
    """The ranks did not make the same call."""


class BackendUnavailableError(errors.BackendUnavailableError, DistBackendError):
    """Something that these tensors need is not available here."""


class BackendError(errors.BackendError, DistBackendError):
    """A vendor's library or the GPU failed inside a call."""


class DeadlineError(errors.DeadlineError, DistBackendError):
    """A wait exceeded its deadline."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """A rank's process is gone."""


class AbortedError(errors.AbortedError, DistBackendError):
    """The group was aborted."""


class SharedMemoryError(errors.SharedMemoryError, DistBackendError):
    """The host has too little memory for what the ranks share."""


class RendezvousError(errors.RendezvousError, DistBackendError):
    """The ranks could not find each other, or do not belong together."""


class AuthenticationError(errors.AuthenticationError, DistBackendError):
    """Ranks on several hosts have no secret, or different ones."""


class RendezvousDeadlineError(errors.RendezvousDeadlineError, DistBackendError):
    """A rank did not arrive in time."""


_KINDS: dict[type[errors.GpucollError], type[errors.GpucollError]] = {
    kind.__bases__[0]: kind
    for kind in (
        *(ArgumentError, ArgumentTypeError, StateError, MismatchError, BackendUnavailableError),
        *(BackendError, DeadlineError, PeerLostError, AbortedError, SharedMemoryError),
        *(RendezvousError, AuthenticationError, RendezvousDeadlineError),
    )
}


def as_torchs(error: errors.GpucollError) -> errors.GpucollError:
    """Return this module's error of the same name, to raise in place of `error`."""
    kind = _KINDS.get(type(error))
    if kind is None:
        return error
    text = str(error)
    if isinstance(error, errors.DeadlineError) and " timeout " not in text:
        text = f"Reached the timeout of a wait: {text}"
    return kind(text)
