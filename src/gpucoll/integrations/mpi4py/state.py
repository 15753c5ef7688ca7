"""The state of an MPI communicator: one of gpucoll's, and what MPI adds to it."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.mpi4py.errors import as_mpis
from gpucoll.integrations.mpi4py.infos import ERRORS_RETURN

AnyComm: TypeAlias = Any
"""gpucoll's communicator; for an intercommunicator `OtherGroup`, which stands for one."""
_open: weakref.WeakSet[State] = weakref.WeakSet()


class State:
    """A communicator, shared by all its handles.

    Parameters
    ----------
    make : function
        Returns gpucoll's communicator; called when it is first needed.
    ranks : sequence of int
        The members' ranks in COMM_WORLD.
    rank : int
        This process's rank in it.
    context : str
        An identifier, unique to the communicator and the same on all members.
    """

    def __init__(
        self, make: Callable[[], AnyComm], ranks: Sequence[int], rank: int, context: str
    ) -> None:
        self._make = make
        self._making = threading.RLock()
        self._comm: AnyComm = None
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.context = context
        self.remote: tuple[int, ...] = ()
        """The members of the other group, for an intercommunicator."""
        self.name = ""
        self.attributes: dict[int, Any] = {}
        self.info: dict[str, str] = {}
        self.errhandler: Any = ERRORS_RETURN._core
        self.topology: Any = None
        self.n_children = 0
        self.locks: dict[Any, Any] = {}
        self.buffered: list[Any] = []
        self.attached: Any = None
        self.group: Any = None
        """A communicator of this rank's own group, for an intercommunicator that needed one."""
        self.private: Any = None
        """A duplicate for messages that no receive of the program may match."""
        self.n_private = 0
        self.is_predefined = False
        _open.add(self)

    @property
    def comm(self) -> AnyComm:
        """Gpucoll's communicator."""
        if self._comm is None:
            # otherwise threads that need it at the same time would each make one
            with self._making:
                if self._comm is None:
                    try:
                        self._comm = self._make()
                    except GpucollError as error:
                        raise as_mpis(error) from None
        return self._comm

    def next_context(self, kind: str) -> str:
        """Return the context of a new communicator that all members derive from this one."""
        self.n_children += 1
        return f"{self.context}/{kind}{self.n_children}"

    def flush(self) -> None:
        """Wait until all buffered sends are done."""
        while self.buffered:
            try:
                work = self.buffered.pop()
            except IndexError:
                return  # another thread is waiting for the last one
            work.wait()

    def close(self, at_end: bool = False) -> None:
        """Release everything; warn about messages that were never received.

        At the end of the program there is no warning: in MPI a message to a rank that has ended is
        not an error, and pools tell their workers to stop more than once.
        """
        for name in ("private", "group"):
            if (other := getattr(self, name)) is not None:
                other._state.close(at_end)
                setattr(self, name, None)
        comm, self._comm = self._comm, None
        self._make = _closed
        _open.discard(self)
        if comm is None or comm.is_closed:
            return
        try:
            if at_end:
                comm.check()
            comm.close()
        except gpucoll.MismatchError as error:
            if not (at_end and comm.is_closed):
                warnings.warn(f"{self.name or 'a communicator'} was freed: {error}", stacklevel=3)
        finally:
            with contextlib.suppress(GpucollError):
                comm.close()


def open_states() -> list[State]:
    """Return the communicators that have not been freed."""
    return list(_open)


def close_all() -> None:
    """Release all communicators that have not been freed."""
    for state in open_states():
        with contextlib.suppress(GpucollError):
            state.close(at_end=True)


def _closed() -> AnyComm:
    raise gpucoll.StateError("this communicator was freed, or MPI was finalized")
