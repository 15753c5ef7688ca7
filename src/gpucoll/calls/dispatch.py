"""Choice of the backend for an array, from what the ranks agreed on during the rendezvous."""

from __future__ import annotations

from gpucoll.arrays.library import Template
from gpucoll.backends import BACKENDS
from gpucoll.backends.choice import HOST_ARRAYS, Choice
from gpucoll.errors import BackendUnavailableError


class Dispatch:
    """The dispatch of one communicator's calls.

    Parameters
    ----------
    choice : Choice
        The choice that its ranks agreed on.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.refuses_host = not choice.host.backend
        """Whether no backend moves host arrays."""
        self.enqueues_host = not self.refuses_host and BACKENDS[choice.host.backend].enqueues
        """Whether host arrays are treated as GPU arrays are (``mixed=True``), by no entry."""

    def is_enqueued(self, template: Template, what: str = "x") -> bool:
        """Return whether a call on these arrays is enqueued on a stream instead of run on the host.

        Raises
        ------
        BackendUnavailableError
            No backend moves host arrays here. (A missing backend for GPU arrays is raised later, by
            `gpucoll.calls.gpu.connection`.)
        """
        if template.device == HOST_ARRAYS:
            self.check_host(what)
        pick = self._choice.host if template.device == HOST_ARRAYS else self._choice.gpu
        return BACKENDS[pick.backend].enqueues if pick.backend else True

    def check_host(self, what: str = "x") -> None:
        """Raise BackendUnavailableError if no backend moves host arrays."""
        if self.refuses_host:
            reason = self._choice.host.reason
            raise BackendUnavailableError(f"{what} lies in host memory: {reason}")
