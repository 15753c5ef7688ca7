"""The engine of one process set: requests in, results out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["Engine"]


class Engine:
    """Matches the requests of the ranks of one process set by name, and executes them.

    Parameters
    ----------
    comm : Communicator
        Of the set's ranks; the engine has it for itself.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def submit(self, request: Request) -> None:
        """Queue a request; a helper thread drives it if nobody waits.

        Raises
        ------
        ValueError
            A request of this name is pending.
        """
        raise NotImplementedError

    def wait(self, request: Request) -> None:
        """Return when the request is done; raise its error."""
        raise NotImplementedError

    def run(self, request: Request) -> None:
        """Submit and wait: cheaper than one after the other, since no thread is woken."""
        raise NotImplementedError

    def unnamed(self, kind: str) -> str:
        """Return the next name for a request without one, such as ``allreduce.noname.1``."""
        raise NotImplementedError
