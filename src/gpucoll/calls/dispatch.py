"""Which backend an array goes to: by what the ranks agreed on when they met."""

from __future__ import annotations

from gpucoll.arrays.library import Template
from gpucoll.backends import BACKENDS
from gpucoll.backends.choice import HOST_ARRAYS, Choice
from gpucoll.errors import BackendUnavailableError


class Dispatch:
    """Where the calls of one communicator go.

    Parameters
    ----------
    choice : Choice
        What its ranks agreed on.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.refuses_host = not choice.host.backend
        """Whether no backend moves host arrays."""
        self.enqueues_host = not self.refuses_host and BACKENDS[choice.host.backend].enqueues
        """Whether host arrays go as GPU arrays do (``mixed=True``), and by no compiled entry."""

    def is_enqueued(self, template: Template, what: str = "x") -> bool:
        """Return whether a call on such arrays is enqueued on a stream, or runs on the host.

        Raises
        ------
        BackendUnavailableError
            Nothing moves host arrays here. (For GPU arrays it may still turn out that nothing does:
            `gpucoll.calls.gpu.connection` says so.)
        """
        if template.device == HOST_ARRAYS:
            self.check_host(what)
        pick = self._choice.host if template.device == HOST_ARRAYS else self._choice.gpu
        return BACKENDS[pick.backend].enqueues if pick.backend else True

    def check_host(self, what: str = "x") -> None:
        """Raise BackendUnavailableError where no backend moves host arrays."""
        if self.refuses_host:
            reason = self._choice.host.reason
            raise BackendUnavailableError(f"{what} lies in host memory: {reason}")
