"""The turn of a call on the host: at once, after pending calls, or at the end of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.backends.protocol import PreparedCall
from gpucoll.calls.collected import Collected, check_in_group
from gpucoll.calls.given import AnyResult
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.work_queue import WorkQueue
from gpucoll.collectives import Collective
from gpucoll.config import check_timeout_s
from gpucoll.group.in_one_piece import give_up
from gpucoll.group.protocol import Channel, Group
from gpucoll.wording import another_thread

Task = Callable[[float | None], None]
"""Makes a call under a deadline in seconds; None is the communicator's deadline."""


class GroupedTask(NamedTuple):
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
        Moves bytes between all ranks.

    Attributes
    ----------
    queue : WorkQueue
        The asynchronous calls.
    grouped : Collected of GroupedTask, or None
        The calls collected while a group is open.
    """

    def __init__(self, group: Group, channel: Channel) -> None:
        self.group = group
        self.channel = channel
        self.queue = WorkQueue(group)
        self.grouped: Collected[GroupedTask] | None = None
        self._entering = threading.Lock()

    def run(
        self,
        name: str,
        task: Task,
        finish: Callable[[], object] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        lasting: AnyResult = NOT_IN_GROUPS,
    ) -> AnyResult:
        """Run a task in its turn, then `finish`; or queue it, or keep it until the group ends.

        `lasting` is the result of a call inside a group: the array that is filled at its end.
        """
        check_timeout_s(timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, name, async_op, lasting)
            self.grouped.append(GroupedTask(task, finish, timeout_s))
            return lasting
        try:
            if async_op:
                self.group.check_open()
                return self.queue.submit(lambda: task(timeout_s), name, finish)
            # Not acquire() and try: an interrupt between the two would leave the lock locked.
            if self._entering.locked():
                raise another_thread(self.group.rank, self.group.world_size)
            with self._entering, self.queue.held_for_call():
                self.queue.drain()
                task(timeout_s)
                return None if finish is None else finish()
        except BaseException as error:
            if not isinstance(error, Exception):  # it is unknown whether the call was made
                give_up(self.group, error)
            raise

    def run_call(
        self,
        name: str,
        call: PreparedCall,
        finish: Callable[[], object],
        *,
        async_op: bool,
        timeout_s: float | None,
        lasting: AnyResult,
    ) -> AnyResult:
        """Run a prepared call in its turn. An asynchronous one may run in compiled code."""
        if async_op and self.grouped is None:
            check_timeout_s(timeout_s)
            self.group.check_open()
            return self.queue.start(call, name, finish, timeout_s)
        task = call.run
        return self.run(name, task, finish, async_op=async_op, timeout_s=timeout_s, lasting=lasting)

    def exchange_bytes(
        self, data: bytes, collective: Collective, root: int, timeout_s: float | None
    ) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        parts: list[bytes] = []

        def exchange(timeout_s: float | None) -> None:
            parts.extend(self.channel.all_gather_bytes(data, collective, root, timeout_s))

        self.run(collective.spelled, exchange, timeout_s=timeout_s)
        return parts
