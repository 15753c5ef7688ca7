"""What `split` and `duplicate` owe the communicator that is divided: it knows who is alive.

The ranks of the new communicator meet in rank 0's socket as in `init`, but each watches the old one
too: a rank whose process ends, that closes, or that raises something on its way there, ends the
others at once. As with every call, the old communicator is broken then. Only where all of them have
been told in the meeting that there is no new one (no memory for it), the old one can be used on.
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
    """The watch over the meeting of one part; a context that gives the old communicator up.

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
        self._next_look = now + SLICE_S  # it takes a millisecond with a hundred ranks
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
