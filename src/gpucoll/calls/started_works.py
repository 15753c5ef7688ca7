"""The works of calls that compiled code runs, by number, and how they end.

The steps in a call's life are: it is started; noted (its Work is known here); it ends; it is reaped
(its entry in the queue may be reused); its Work is forgotten. An interrupt, or another thread, may
come between any two steps. Each step may therefore be repeated: the next thread that looks
continues from the state it finds, and no thread waits for the one that took the previous step. A
call that was reaped before its Work ended has succeeded. `docs/models/started.pml` is a model of
this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.calls.work import Work
from gpucoll.errors import GpucollError
from gpucoll.group.protocol import Group, StartedCalls

__all__ = ["Endings", "StartedWorks"]

_busy: set[StartedWorks] = set()
"""Objects whose calls the compiled thread may run: nothing else may keep their arrays alive."""


class Endings:
    """Ends works, and keeps failures that were never inspected. The queue's lock is held.

    Parameters
    ----------
    group : Group
        The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._failed: list[Work[Any]] = []

    def end(self, work: Work[object], error: BaseException | None = None) -> None:
        """Note how a call has ended, once."""
        work.end(error)
        if work._error is not None and work not in self._failed:
            self._failed.append(work)

    def take_unseen(self) -> Work[object] | None:
        """Return the first Work with a failure that was never inspected, or None; forget all.

        The error that broke the communicator is left out if the program already got it from another
        call.
        """
        failed, self._failed = self._failed, []
        known = {id(work._error) for work in failed if work._was_seen}
        group = self._group
        if group.failure is not None and (group.was_told or group.was_interrupted):
            known.add(id(group.failure))
        return next((work for work in failed if id(work._error) not in known), None)

    def raised_by(self, function: Callable[..., object], *given: object) -> GpucollError | None:
        """Call a method of the group; return its error without marking it as reported."""
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
        Ends these works, and those of calls that Python runs.

    Attributes
    ----------
    by_number : dict
        Works that were noted and not forgotten. Each keeps its arrays alive.
    queue : StartedCalls or None
        The group's queue; None if no call has been started.
    """

    def __init__(self, group: Group, endings: Endings) -> None:
        self._group = group
        self._endings = endings
        self.by_number: dict[int, Work[Any]] = {}
        self.queue: StartedCalls | None = None

    def note(self, number: int, work: Work[object]) -> None:
        """Note a started call. Needs no lock."""
        work.number = number
        self.by_number[number] = work
        if len(self.by_number) == 1:
            _busy.add(self)

    def lost(self) -> list[int]:
        """Return the numbers of calls that were started but whose works were not noted."""
        numbers = () if self.queue is None else self.queue.started()
        return [number for number in numbers if number not in self.by_number]

    def settle(self) -> list[Work[object]]:
        """Note how calls have ended; return the works that were forgotten. The lock is held.

        A call that another thread has started but not noted yet is left for the next look.
        """
        if (queue := self.queue) is None:
            return []
        for number in queue.ended():
            if (work := self.by_number.get(number)) is None:
                continue
            status = queue.status_of(number)  # another call's, if this one is reaped by now
            error = None
            if number > queue.n_reaped and status and not work._is_done:
                error = self._endings.raised_by(self._group.raise_for, status)
            self._endings.end(work, error)
            queue.reap(number)
        return self._forget_reaped(queue.n_reaped)

    def _forget_reaped(self, n_reaped: int) -> list[Work[object]]:
        told = [work for number, work in list(self.by_number.items()) if number <= n_reaped]
        for work in told:
            self._endings.end(work)  # as a success: its reaper was interrupted, or ends it now
            self.forget(work)
        return told

    def forget(self, work: Work[object]) -> None:
        """Release a Work that has ended, and this object if compiled code has nothing left."""
        self.by_number.pop(work.number, None)
        if not self.by_number:
            _busy.discard(self)
            if self.by_number:  # another thread has just started a call
                _busy.add(self)

    def let_go(self) -> None:
        """Release pending calls: the group is closed, and nothing runs them."""
        _busy.discard(self)
