"""One call of `gpucoll.launch`: start the ranks, collect replies, return or raise the outcome."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from gpucoll import config
from gpucoll.errors import DeadlineError, LaunchError
from gpucoll.launcher.call import Reply, ReplyReader, revive
from gpucoll.launcher.job import interpreter, rank_cpus, rank_environments
from gpucoll.launcher.output import PrintedOutput
from gpucoll.launcher.rank_process import RankCommand, RankEnd, listed
from gpucoll.launcher.rank_set import RankSet
from gpucoll.launcher.signals import deferred_signals

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject

__all__ = ["LaunchJob"]

FUNCTION_RANK = Path(__file__).with_name("function_rank.py")


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: it replied with an exception, or ended without a reply."""

    rank: int
    reply: Reply | None = None
    end: RankEnd | None = None

    @property
    def follows(self) -> bool:
        """Whether another rank's failure caused it."""
        return self.reply is not None and self.reply.follows

    @property
    def manner(self) -> str:
        """The failure in a few words."""
        return self.reply.kind if self.reply is not None else self.end.manner if self.end else "?"


class LaunchJob:
    """The ranks of one call, their replies, and the outcome."""

    def __init__(self, name: str, ranks: int, timeout_s: float | None, prefix: bool) -> None:
        self.name = name
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.output = PrintedOutput(ranks, prefix=prefix)
        self.rank_set = RankSet(self.output.feed, self.ended, config.grace_s())
        self.readers: list[ReplyReader] = []
        self.replies: dict[int, Reply] = {}
        self.failures: list[Failure] = []
        self.late: list[int] = []
        self.odd_ends: list[RankEnd] = []

    def execute(self, call: BinaryIO, bind: str) -> list[AnyObject]:
        """Start the ranks, wait for them, and return their results or raise the failure."""
        with ExitStack() as stack:
            stack.enter_context(self.rank_set)
            with deferred_signals():
                self.start(call, bind, stack)
            if self.timeout_s is not None:
                self.rank_set.loop.call_later("timeout", self.timeout_s, self.time_out)
            try:
                self.rank_set.run()
            except KeyboardInterrupt:
                self.rank_set.interrupt()
                self.rank_set.run()
                raise
        return self.conclude()

    def start(self, call: BinaryIO, bind: str, stack: ExitStack) -> None:
        """Start the ranks, with a pipe for each rank's reply."""
        if not config.binding_allowed():
            bind = "none"
        pipes = []
        with ExitStack() as write_ends:
            for _ in range(self.ranks):
                read_end, write_end = os.pipe()
                write_ends.callback(os.close, write_end)
                self.readers.append(ReplyReader(read_end))
                stack.callback(self.readers[-1].close)
                pipes.append(write_end)
            settings = zip(
                pipes, rank_environments(self.ranks, bind), rank_cpus(self.ranks, bind), strict=True
            )
            self.rank_set.start([rank_command(call, *each) for each in settings])
        for rank, reader in enumerate(self.readers):
            self.rank_set.loop.add_reader(reader.descriptor, partial(self.receive, rank))

    # --- events -----------------------------------------------------------------------------------

    def receive(self, rank: int) -> None:
        """Read what has arrived of a rank's reply."""
        reader = self.readers[rank]
        if rank in self.replies:
            return
        reply = reader.read()
        if reply is None:
            if reader.at_end:
                self.rank_set.loop.remove_reader(reader.descriptor)
            return
        self.rank_set.loop.remove_reader(reader.descriptor)
        self.replies[rank] = reply
        if reply.result is None:
            self.fail(Failure(rank, reply=reply))
        elif len(self.replies) == self.ranks:
            self.finish()

    def ended(self, end: RankEnd) -> None:
        """Record the end of a rank's process."""
        self.receive(end.rank)
        if end.rank in self.replies:
            if end.failed and end.known:
                self.odd_ends.append(end)
        elif not end.by_launcher:
            self.fail(Failure(end.rank, end=end))

    def fail(self, failure: Failure) -> None:
        """Record a failure; the first one starts the end of all ranks."""
        self.failures.append(failure)
        self.finish()

    def finish(self) -> None:
        """Let the ranks end: none of them has a reason to run for long from here on."""
        self.rank_set.loop.cancel("timeout")
        self.rank_set.end_soon()

    def time_out(self) -> None:
        """End the ranks because the timeout has expired."""
        self.late = [rank for rank in range(self.ranks) if rank not in self.replies]
        self.rank_set.terminate()

    # --- conclusion -------------------------------------------------------------------------------

    def conclude(self) -> list[AnyObject]:
        """Return the results, or raise the error."""
        if self.late:
            raise DeadlineError(
                f"gpucoll.launch: {self.name} had not returned after {self.timeout_s:g} s on "
                f"{listed(self.late)} of {self.ranks}; all ranks were ended"
            )
        if self.failures:
            # The first failure in time, but preferably one that does not follow from another.
            self.raise_failure(min(self.failures, key=lambda failure: failure.follows))
        for end in self.odd_ends:
            how = "had to be ended afterwards" if end.by_launcher else f"{end.manner} afterwards"
            warnings.warn(
                f"gpucoll.launch: rank {end.rank} of {end.world_size} returned, but {how}",
                RuntimeWarning,
                stacklevel=5,
            )
        return [self.result(rank) for rank in range(self.ranks)]

    def result(self, rank: int) -> AnyObject:
        """Return the function's result on one rank."""
        try:
            return pickle.loads(self.replies[rank].result or b"")
        except Exception as error:
            raise LaunchError(
                f"rank {rank} of {self.ranks} returned a value that cannot be unpickled here "
                f"({type(error).__name__}: {error})"
            ) from error

    def raise_failure(self, failure: Failure) -> NoReturn:
        """Raise a rank's failure in the caller."""
        others = [
            f"rank {other.rank}: {other.manner}" for other in self.failures if other is not failure
        ]
        after = f" (after it, {'; '.join(others)})" if others else ""
        where = f"rank {failure.rank} of {self.ranks}"
        reply = failure.reply
        if reply is None:
            raise LaunchError(f"{failure.end} before {self.name} returned{after}")
        exception = revive(reply)
        if exception is None:
            raise LaunchError(
                f"{where} failed in {self.name} with {reply.kind}{after}\n\n{reply.text}"
            )
        if sys.version_info >= (3, 11):
            exception.add_note(f"raised on {where} of gpucoll.launch{after}")
        # The cause carries the traceback as text, which works in every Python version and notebook.
        raise exception from LaunchError(f"{where} failed in {self.name}{after}\n\n{reply.text}")


def rank_command(
    call: BinaryIO, reply_descriptor: int, environment: dict[str, str], cpus: frozenset[int]
) -> RankCommand:
    """Return the command of a rank."""
    descriptors = (call.fileno(), reply_descriptor)
    return RankCommand(
        arguments=[*interpreter(), str(FUNCTION_RANK), *map(str, descriptors)],
        environment=environment,
        cpus=cpus,
        inherited=descriptors,
    )
