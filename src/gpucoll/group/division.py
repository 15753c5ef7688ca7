"""Watch the meetings of `split` and `duplicate` through the communicator that is divided.

The ranks of the new communicator meet at rank 0's socket as in `init`. Each of them also watches
the old communicator, which knows which ranks are alive. If a rank's process ends, or if the rank
closes the communicator or raises an exception on its way to the meeting, the others stop waiting at
once. As after a failure in any other call, the old communicator is broken then. It stays usable
only if the meeting itself has told all of its ranks that there is no new communicator (no memory
for it, for example).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from types import TracebackType

from gpucoll.errors import DeadlineError, GpucollError, RendezvousDeadlineError
from gpucoll.group.protocol import Group
from gpucoll.rendezvous.meeting import SLICE_S, Watch
from gpucoll.transport.shared.layout import Abort


class Division(Watch):
    """Watches the meeting of one part; as a context, gives up the old communicator on failure.

    Attributes
    ----------
    ranks : list of int
        The ranks of the new communicator, as the old one numbers them.
    """

    def __init__(self, group: Group, call: str) -> None:
        super().__init__(group.rank, group.world_size)
        self.call = call
        self.ranks: list[int] = []
        self._group = group
        self._next_look = time.monotonic() + SLICE_S

    def __enter__(self) -> Division:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_ordinary = isinstance(error, GpucollError | MemoryError)
        if error is None or (is_ordinary and (self.is_told or not self.has_begun)):
            return
        is_late = isinstance(error, DeadlineError)
        self._group.abort(Abort.DEADLINE if is_late else Abort.INTERRUPTED)

    def number(self, rank: int) -> int:
        """Return the old communicator's number of a rank."""
        return self.ranks[rank] if rank < len(self.ranks) else rank

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return an awaited rank that has ended or closed the old communicator."""
        self._group.raise_if_aborted()
        now = time.monotonic()
        if not awaited or now < self._next_look:
            return None
        self._next_look = now + SLICE_S  # a look at a hundred ranks takes a millisecond
        gone = self._group.gone_ranks()
        for rank in awaited:
            if self.number(rank) in gone:
                return rank, "it is gone"
        return None

    def lost(self, rank: int, how: str) -> GpucollError:
        """Break the old communicator, and return its error for a rank that is gone."""
        return self._broken(Abort.LOST, rank)

    def left(self, rank: int, why: str) -> GpucollError:
        """Break the old communicator, and return its error for a rank that raised something."""
        return self._broken(Abort.INTERRUPTED, rank, why)

    def late(self, text: str) -> GpucollError:
        """Break the old communicator, and return the error for ranks that did not come."""
        self._group.abort(Abort.DEADLINE)
        error = RendezvousDeadlineError(f"{text} The communicator is broken: close it")
        return self._group.fail(error)

    def _broken(self, code: Abort, rank: int, why: str = "") -> GpucollError:
        try:
            self._group.break_with(code, self.number(rank), why)
        except GpucollError as error:
            return error
        raise AssertionError("a communicator that is given up says so")
