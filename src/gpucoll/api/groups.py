"""Groups of calls: collected first, run together at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpucoll.calls.calling import Calling
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.lists import shared_by
from gpucoll.calls.messages import Collected, Grouped, MessageQueue, check_in_group
from gpucoll.calls.work import WorkQueue
from gpucoll.errors import ArgumentError, MismatchError, StateError
from gpucoll.transport.shared.words import Kind

_Task = Callable[[float | None], None]


class Grouping(Calling):
    """`Communicator.group`."""

    _queue: WorkQueue
    _message_queue: MessageQueue
    _grouped: Collected[tuple[_Task, Callable[[], Any], float | None]] | None

    @contextmanager
    def group(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Collect the calls made inside, and run them together at the end.

        All sends and receives run at once, so that they cannot wait for each other in a circle;
        then the collectives, in order. A call inside returns its output array, which is filled,
        and its errors are raised, at the end. When the block raises, nothing is run. Calls on GPU
        arrays come after those on host arrays, as one group of the vendor's library, which makes
        them at once, in no order: none may use another's output. They are put on their streams at
        the end.

        Parameters
        ----------
        timeout_s : float, optional
            Deadline of the sends and receives, in seconds; a shorter one of a call inside counts.

        Raises
        ------
        StateError
            Groups do not nest.
        ArgumentError
            Calls on GPU arrays in it use each other's output.
        ArgumentTypeError
            Objects, numbers, `probe`, plans, `split` and what asks for counts cannot be inside.

        Examples
        --------
        >>> with comm.group():
        ...     for peer in peers:
        ...         comm.send(mine[peer], peer)
        ...         comm.recv(theirs[peer], peer)
        """
        if self._grouped is not None:
            raise StateError("a group is open already: groups do not nest")
        calls: Collected[tuple[_Task, Callable[[], Any], float | None]] = Collected()
        messages: Collected[Grouped] = Collected()
        gpu_calls: Collected[GpuCall] = Collected()
        self._grouped, self._message_queue.grouped, self._gpu.grouped = calls, messages, gpu_calls
        self._queue.hold(True)
        try:
            yield
        finally:
            self._grouped = self._message_queue.grouped = self._gpu.grouped = None
            self._queue.hold(False)

        def task(timeout_s: float | None) -> None:
            self._message_queue.run_group(messages, timeout_s)
            for run, finish, own_timeout_s in calls:
                run(own_timeout_s)
                finish()

        _check_independent(gpu_calls)
        if calls or messages:
            self._run("group", task, lambda: None, timeout_s=timeout_s)
        self._gpu.run_group(gpu_calls, timeout_s)

    def _keep_for_group(
        self,
        name: str,
        task: _Task,
        finish: Callable[[], Any],
        async_op: bool,
        timeout_s: float | None,
        lasting: Any,
    ) -> Any:
        assert self._grouped is not None
        check_in_group(self._grouped, name, async_op, lasting)
        self._grouped.append((task, finish, timeout_s))
        return lasting

    def _raise_unreceived(self) -> None:
        """Raise where messages were left behind; called at close."""
        if self._group.failure is not None:
            return  # what broke the communicator was raised, and is why they are there
        who = f"rank {self.rank} of {self.world_size}"
        if left := self._backend.messages.unreceived():
            listed = ", ".join(f"from rank {peer} with tag {tag}" for peer, tag in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise MismatchError(f"{who} closed without receiving messages {listed}{more}")
        if left := self._backend.messages.undelivered():
            listed = ", ".join(f"to rank {peer} with tag {tag}" for peer, tag in left[:5])
            raise MismatchError(
                f"{who} sent messages that nobody received before closing: {listed}"
            )


def _check_independent(calls: Sequence[GpuCall]) -> None:
    """Raise ArgumentError where a call on GPU arrays uses what another one writes."""
    users = []
    for call in calls:
        pairs = [
            pair
            for request in call.requests
            for pair in request.parts or ((request.source, request.destination),)
        ]
        reads = [source for source, _ in pairs if source is not None]
        writes = [destination for _, destination in pairs if destination is not None]
        for message in call.messages:
            if message.buffer is not None:
                (reads if message.kind == Kind.SEND else writes).append(message.buffer)
        users.append((reads, writes))
    if shared := shared_by(users):
        one, other = sorted(shared)
        raise ArgumentError(
            f"call {one} ({calls[one].name}) and call {other} ({calls[other].name}) on GPU arrays "
            "in group() share memory, and one writes it; the vendor's library makes them at once, "
            "in no order: make them one after the other, outside of the group"
        )
