"""How a call on the host takes its turn: at once, behind those that are pending, or in a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucoll.calls.collected import Collected, check_in_group
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.work import Work, WorkQueue
from gpucoll.config import check_timeout_s
from gpucoll.group.protocol import Channel, Group
from gpucoll.types import Collective
from gpucoll.wording import another_thread

Task = Callable[[float | None], None]
"""Does a call, under a deadline in seconds; None: the communicator's."""


@dataclass(frozen=True)
class GroupedTask:
    """A collective on host arrays that waits for the end of the group."""

    run: Task
    finish: Callable[[], Any] | None
    timeout_s: float | None


class Runner:
    """Runs a communicator's calls on the host, one at a time.

    Parameters
    ----------
    group : Group
        The ranks.
    channel : Channel
        Moves bytes between all of them.

    Attributes
    ----------
    queue : WorkQueue
        Of asynchronous calls.
    grouped : Collected of GroupedTask, or None
        What is collected while a group is open.
    """

    def __init__(self, group: Group, channel: Channel) -> None:
        self.group = group
        self.channel = channel
        self.queue = WorkQueue(group.set_pending)
        self.grouped: Collected[GroupedTask] | None = None
        self._entering = threading.Lock()

    def run(
        self,
        name: str,
        task: Task,
        finish: Callable[[], Any] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        lasting: Any = NOT_IN_GROUPS,
        on_work: Callable[[Work[Any]], None] | None = None,
    ) -> Any:
        """Run a task in its turn, then `finish`; or queue it, or keep it for the end of the group.

        `lasting` is what a call inside a group returns: the array that is filled at its end.
        """
        check_timeout_s(timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, name, async_op, lasting)
            self.grouped.append(GroupedTask(task, finish, timeout_s))
            return lasting
        group = self.group
        if not self._entering.acquire(blocking=False):
            raise another_thread(group.rank, group.world_size)
        try:
            if not self.queue.is_busy:
                self.queue.raise_unseen()
                if not async_op:
                    task(timeout_s)
                    return None if finish is None else finish()
            group.check_open()

            def queued() -> Any:
                if not async_op:  # what was pending has ended: as if it had before this call
                    self.queue.raise_unseen()
                task(timeout_s)
                return None if finish is None else finish()

            work = self.queue.submit(queued, name, on_work)
            return work if async_op else work.wait()
        finally:
            self._entering.release()

    def exchange_bytes(
        self, data: bytes, collective: Collective, root: int, timeout_s: float | None
    ) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        parts: list[bytes] = []

        def exchange(timeout_s: float | None) -> None:
            parts.extend(self.channel.all_gather_bytes(data, collective, root, timeout_s))

        self.run(collective.spelled, exchange, timeout_s=timeout_s)
        return parts
