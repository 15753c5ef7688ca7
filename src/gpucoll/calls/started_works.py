"""The works of calls that compiled code runs, by number, and how they end.

A call is started, noted (its Work is known here), has ended, is reaped (its entry may be used
anew), and its Work is forgotten. An interrupt, or another thread, may come between any two of
these. So each is a step that may be repeated, and whoever looks next goes on from what is there:
nobody waits for the one who did the step before. What was reaped before its Work has ended has
ended well. `docs/models/started.pml` is a model of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.calls.work import Work
from gpucoll.errors import GpucollError
from gpucoll.group.protocol import Group, StartedCalls

__all__ = ["Endings", "StartedWorks"]

_busy: set[StartedWorks] = set()
"""Those with calls that the compiled thread may run: nothing else may keep their arrays alive."""


class Endings:
    """Ends works, and keeps the failures that nobody has asked for. The queue's lock is held.

    Parameters
    ----------
    group : Group
        The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._failed: list[Work[Any]] = []

    def end(self, work: Work[Any], error: BaseException | None = None) -> None:
        """Note how a call has ended, once."""
        work.end(error)
        if work._error is not None and work not in self._failed:
            self._failed.append(work)

    def take_unseen(self) -> Work[Any] | None:
        """Return the first Work with a failure that nobody has seen, or None; forget all.

        What has broken the communicator is no news to who has had it from another call.
        """
        failed, self._failed = self._failed, []
        known = {id(work._error) for work in failed if work._was_seen}
        group = self._group
        if group.failure is not None and (group.was_told or group.was_interrupted):
            known.add(id(group.failure))
        return next((work for work in failed if id(work._error) not in known), None)

    def raised_by(self, function: Callable[..., object], *given: Any) -> GpucollError | None:
        """Call a function of the group's; return what it has raised, which nobody was told of."""
        was_told = self._group.was_told
        try:
            function(*given)
        except GpucollError as error:
            self._group.was_told = was_told
            return error
        return None


class StartedWorks:
    """The works of a group's compiled queue.

    Parameters
    ----------
    group : Group
        The ranks.
    endings : Endings
        Of these works, and others.

    Attributes
    ----------
    by_number : dict
        Works that were noted and not forgotten: what is in it keeps its arrays alive.
    queue : StartedCalls or None
        The group's queue; None: no call has been started.
    """

    def __init__(self, group: Group, endings: Endings) -> None:
        self._group = group
        self._endings = endings
        self.by_number: dict[int, Work[Any]] = {}
        self.queue: StartedCalls | None = None

    def note(self, number: int, work: Work[Any]) -> None:
        """Note a call that was started. Without a lock."""
        work.number = number
        self.by_number[number] = work
        if len(self.by_number) == 1:
            _busy.add(self)

    def lost(self) -> list[int]:
        """Return the numbers of calls that were started, and whose works nobody has noted."""
        numbers = () if self.queue is None else self.queue.started()
        return [number for number in numbers if number not in self.by_number]

    def settle(self) -> list[Work[Any]]:
        """Note how calls have ended; return the works that were forgotten. The lock is held.

        One that another thread has just started, and notes now, is left to who looks next.
        """
        if (queue := self.queue) is None:
            return []
        for number in queue.ended():
            if (work := self.by_number.get(number)) is None:
                continue
            status = queue.status_of(number)  # of another call, if it is reaped by now
            error = None
            if number > queue.n_reaped and status and not work._is_done:
                error = self._endings.raised_by(self._group.raise_for, status)
            self._endings.end(work, error)
            queue.reap(number)
        return self._forget_reaped(queue.n_reaped)

    def _forget_reaped(self, n_reaped: int) -> list[Work[Any]]:
        told = [work for number, work in list(self.by_number.items()) if number <= n_reaped]
        for work in told:
            self._endings.end(work)  # well: who has reaped it was interrupted, or does so now
            self.forget(work)
        return told

    def forget(self, work: Work[Any]) -> None:
        """Keep a Work no longer that has ended, nor this, if compiled code has nothing to do."""
        self.by_number.pop(work.number, None)
        if not self.by_number:
            _busy.discard(self)
            if self.by_number:  # another thread has started one just now
                _busy.add(self)

    def let_go(self) -> None:
        """Keep what is pending no longer: the group is closed, and nobody runs it."""
        _busy.discard(self)
