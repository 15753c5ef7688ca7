"""All ranks of a job: gpucoll-run and launch start, watch and end them with this code."""

from __future__ import annotations

import contextlib
import enum
import errno
import signal
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from gpucoll import config
from gpucoll.errors import LaunchError
from gpucoll.launcher.end_notices import EndNotices
from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.exec_rank import EXIT_CANNOT_RUN
from gpucoll.launcher.rank_process import DRAIN_READS, STDERR, RankCommand, RankEnd, RankProcess
from gpucoll.launcher.signals import deferred_signals, woken_by_signals

__all__ = ["RankSet"]

LIMITS = {
    errno.EMFILE: " (raise the limit of open files with ulimit -n)",
    errno.EAGAIN: " (raise the limit of processes: ulimit -u, or the container's)",
}
"""The remedy for an error at the start of a process."""

LEFTOVER_S = 1.0
"""How long processes that a rank started may outlive it: helpers need a moment to tidy up."""


class Stage(enum.IntEnum):
    """The stage of a job's end; it only increases."""

    RUNNING = 0
    GRACE = 1
    TERMINATED = 2
    KILLED = 3


class RankSet:
    """The running ranks of a job, and the loop that serves them.

    Use it as a context manager: when the block ends, for whatever reason, no rank is left.

    Parameters
    ----------
    on_output : callable
        Called with (rank, stream, data) when a rank writes; `stream` is 1 or 2, and `data` is empty
        at the end of the stream.
    on_end : callable
        Called with each `RankEnd`, after the output that the rank wrote before. Of ranks whose ends
        are seen at the same moment, those killed by a signal come first, then the others by rank.
    grace_s : float
        The pause between the steps of ending a job, in seconds.
    on_joined : callable
        Called with the rank whose place has a process that tells that it has joined the others.
    """

    def __init__(
        self,
        on_output: Callable[[int, int, bytes], None],
        on_end: Callable[[RankEnd], None],
        grace_s: float,
        on_joined: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.loop = EventLoop()
        self.grace_s = grace_s
        self.stage = Stage.RUNNING
        self._on_output = on_output
        self._on_end = on_end
        self._on_joined = on_joined
        self._notices: EndNotices | None = None
        self._waiting: set[int] = set()
        """Ranks in whose places a process is about to be started again."""
        self._starts_none = False
        self._running: dict[int, RankProcess] = {}
        self._left_over: dict[int, RankProcess] = {}
        """Ranks that have ended while a process that they started still holds their output."""

    def __enter__(self) -> RankSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with deferred_signals():
            remaining = self._processes()
            for process in remaining:  # signal all before waiting for any
                process.send(signal.SIGKILL, group=True)
            for process in remaining:
                process.release()
            self._running.clear()
            self._left_over.clear()
            if self._notices is not None:
                self._notices.close()
            self.loop.close()

    @property
    def running(self) -> list[str]:
        """The processes that have not ended, by their names in the output."""
        return [self._running[rank].label for rank in sorted(self._running)]

    def start(
        self, commands: Sequence[RankCommand], first: int = 0, world_size: int | None = None
    ) -> None:
        """Start one rank for each command. Signals that arrive meanwhile are handled afterwards.

        Parameters
        ----------
        commands : sequence of RankCommand
            In rank order.
        first : int
            The lowest rank; ranks below it run on other hosts.
        world_size : int, optional
            The job's world size, if it has more ranks than these.
        """
        with deferred_signals():
            if commands and (token := commands[0].environment.get(config.JOB)):
                # without notices, the ranks still have their deadlines
                with contextlib.suppress(OSError):
                    self._notices = EndNotices(
                        self.loop, token, len(commands), partial(self._joined, first)
                    )
            for rank, command in enumerate(commands, first):
                self._start_one(rank, world_size or len(commands), command)

    def _start_one(self, rank: int, world_size: int, command: RankCommand) -> None:
        try:
            process = RankProcess(rank, world_size, command)
        except OSError as error:
            raise LaunchError(
                f"rank {rank} of {world_size} could not be started: {error.strerror}"
                + LIMITS.get(error.errno or 0, "")
            ) from error
        self._running[rank] = process
        self.loop.add_reader(process.exit_watch.descriptor, self._collect)
        for stream, descriptor in process.outputs.items():
            self.loop.add_reader(descriptor, partial(self._readable, process, stream))

    def add(self, rank: int, world_size: int, command: RankCommand) -> None:
        """Start a process in a place that no other one has had.

        Raises
        ------
        LaunchError
            It cannot be started.
        """
        with deferred_signals():
            self._start_one(rank, world_size, command)

    def start_again(
        self, end: RankEnd, make_command: Callable[[], RankCommand], pause_s: float
    ) -> None:
        """Start a process in the place of one that has ended, unless the job ends meanwhile.

        Parameters
        ----------
        end : RankEnd
            How the former process ended.
        make_command : callable
            Returns the new process's command. It is called when nothing of the former one is left.
        pause_s : float
            The pause before the start, in seconds. What the former process has left running is
            ended first.
        """
        self._waiting.add(end.rank)
        self._start_after(pause_s, end, make_command)
        if self._starts_none:  # looked at last: a signal's handler may set it at any moment
            self._waiting.clear()

    def start_none_again(self) -> None:
        """Leave the places empty whose processes have ended, from here on."""
        self._starts_none = True
        self._waiting.clear()

    def _start_after(
        self, pause_s: float, end: RankEnd, make_command: Callable[[], RankCommand]
    ) -> None:
        def start() -> None:
            if end.rank in self._left_over:
                self._start_after(LEFTOVER_S, end, make_command)
                return
            with deferred_signals():  # which the new process gets, too
                if end.rank in self._waiting:
                    self._waiting.discard(end.rank)
                    self._start_in_place(end, make_command())

        self.loop.call_later(("start", end.rank), pause_s, start)

    def _start_in_place(self, end: RankEnd, command: RankCommand) -> None:
        try:
            self._start_one(end.rank, end.world_size, command)
        except LaunchError as error:
            self._on_output(end.rank, STDERR, f"gpucoll: {error}\n".encode())
            failed = end._replace(
                exit_code=EXIT_CANNOT_RUN, signal_number=None, attempt=command.attempt
            )
            self._on_end(failed)

    def run(self) -> None:
        """Serve the ranks until all have ended."""
        with woken_by_signals(self.loop):
            while self._running or self._left_over or self._waiting:
                self.loop.run_once()

    # --- ending -----------------------------------------------------------------------------------

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to every running rank, or to their whole process groups."""
        for process in list(self._running.values()):
            process.send(number, group=group)

    def send_to(self, rank: int, number: int) -> None:
        """Send a signal to one rank, unless it has ended."""
        if process := self._running.get(rank):
            process.send(number)

    def end_soon(self) -> None:
        """Give the ranks the grace time to end by themselves; then terminate, then kill them."""
        if self._enter(Stage.GRACE):
            self.loop.call_later(self, self.grace_s, self.terminate)

    def interrupt(self) -> None:
        """Send SIGINT to all groups, as a terminal does; kill them after the grace time."""
        if self._enter(Stage.TERMINATED):
            self.send(signal.SIGINT, group=True)
            self.loop.call_later(self, self.grace_s, self.kill)

    def terminate(self) -> None:
        """Send SIGTERM to the ranks; kill them after the grace time."""
        if self._enter(Stage.TERMINATED):
            self.send(signal.SIGTERM)
            self.loop.call_later(self, self.grace_s, self.kill)

    def kill(self) -> None:
        """Send SIGKILL to all groups."""
        self._enter(Stage.KILLED)
        self.send(signal.SIGKILL, group=True)

    def _enter(self, stage: Stage) -> bool:
        if stage <= self.stage:
            return False
        self.stage = stage
        self.loop.cancel(self)
        self.start_none_again()
        return True

    # --- events -----------------------------------------------------------------------------------

    def close_stream(self, stream: int) -> None:
        """Stop reading one stream of all ranks; a rank that writes to it gets SIGPIPE."""
        for process in self._processes():
            if stream in process.outputs:
                self._close_output(process, stream)

    def _processes(self) -> list[RankProcess]:
        return list({**self._running, **self._left_over}.values())

    def _readable(self, process: RankProcess, stream: int) -> None:
        self._relay(process, stream)
        if not process.outputs and process.rank in self._left_over:
            self._release(process)

    def _relay(self, process: RankProcess, stream: int) -> bool:
        """Relay one piece of output; return whether there may be more."""
        data = process.read(stream)
        if data is None:
            return False
        self._on_output(process.rank, stream, data)
        if data:
            return stream in process.outputs  # the callback may have closed the stream
        self._close_output(process, stream)
        return False

    def _close_output(self, process: RankProcess, stream: int) -> None:
        if stream not in process.outputs:
            return  # a callback has closed it
        self.loop.remove_reader(process.outputs[stream])
        process.close_output(stream)

    def _drain(self, process: RankProcess) -> None:
        for stream in list(process.outputs):
            for _ in range(DRAIN_READS):
                if stream not in process.outputs or not self._relay(process, stream):
                    break

    def _collect(self) -> None:
        """Handle all ranks that have ended in a fixed order, as the kernel's is arbitrary."""
        if self._notices is not None:
            self._notices.hear()  # what was told before these ends
        by_launcher = self.stage >= Stage.TERMINATED
        ended = [
            (end, process)
            for process in self._running.values()
            if (end := process.end(by_launcher=by_launcher)) is not None
        ]
        for end, process in sorted(
            ended, key=lambda pair: (pair[0].signal_number is None, pair[0].rank)
        ):
            self._drain(process)
            self.loop.remove_reader(process.exit_watch.descriptor)
            self._left_over[process.rank] = process
            del self._running[process.rank]
            if self._notices is not None and end.attempt == 1:  # others have no rank
                self._notices.add(end)
            self._on_end(end)
            self._end_leftovers(process)

    def _joined(self, first: int, place: int) -> None:
        if first + place in self._running:
            self._on_joined(first + place)

    def _end_leftovers(self, process: RankProcess) -> None:
        """End the processes that an ended rank has left running."""
        if process.outputs and self.stage < Stage.KILLED:
            process.send(signal.SIGTERM, group=True)
            self.loop.call_later(process, LEFTOVER_S, lambda: self._release(process))
        else:
            self._release(process)

    def _release(self, process: RankProcess) -> None:
        self.loop.cancel(process)
        process.send(signal.SIGKILL, group=True)
        self._drain(process)
        for stream in list(process.outputs):
            self._on_output(process.rank, stream, b"")
            self._close_output(process, stream)
        process.release()
        del self._left_over[process.rank]
