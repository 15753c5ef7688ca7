"""``gpucoll-run``: start ranks, relay their output, end them together, report failures."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from gpucoll.errors import LaunchError
from gpucoll.launcher.arguments import Options, parse
from gpucoll.launcher.elastic import Members
from gpucoll.launcher.job import (
    compile_kernels,
    joining_environment,
    obstacle_to,
    rank_cpus,
    rank_environments,
)
from gpucoll.launcher.output import OutputRelay
from gpucoll.launcher.rank_process import STDERR, RankCommand, RankEnd, label_of, listed
from gpucoll.launcher.rank_set import RankSet
from gpucoll.launcher.signals import FORWARDED, handlers
from gpucoll.launcher.whole_tracebacks import HOLD_S

__all__ = ["main"]

EXIT_TIMEOUT = 124  # as in timeout(1)
EXIT_CANNOT_START = 1
EXIT_USAGE = 2
EXIT_CANNOT_WRITE = 1
DESCRIPTORS = 3  # open for each rank: its two streams, and one that becomes readable when it ends
DRAW_DELAY_S = 0.1  # a progress bar need not be redrawn more often

EXIT_UNCAUGHT = 1  # Python's exit code after an uncaught exception
LONGEST_ERROR = 300  # characters of the error in the line that names the cause

CONSEQUENCES = (b"gpucoll.errors.PeerLostError", b"gpucoll.errors.AbortedError")
"""The start of a traceback's last line if a rank failed only because another one had failed."""


class Run:
    """One job under gpucoll-run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.first = options.span.first if options.span else 0
        """The lowest rank that is started here."""
        self.relay = OutputRelay(options.ranks, prefix=options.prefix, first=self.first)
        self.rank_set = RankSet(self.show, self.ended, options.grace_s, self.joined)
        self.members = (
            Members(options.elastic, range(self.first, self.first + options.ranks))
            if options.elastic
            else None
        )
        """Of an elastic job; None if the first failure ends the job."""
        self.inquiries: list[subprocess.Popen[bytes]] = []
        """Processes that say who makes the job wait."""
        self.commands: list[RankCommand] = []
        """Of the first processes."""
        self.failures: list[RankEnd] = []
        self.first_note = ""
        """The line that reported the first failure."""
        self.obstacle = ""
        """Why the first failure was not made good, in an elastic job."""
        self.finished: list[RankEnd] = []
        """The ends of ranks with exit code 0 before the job had failed."""
        self.unjoined: list[RankEnd] = []
        """The ends of processes that the job, when it ended, had not taken in."""
        self.consequential: set[int] = set()
        self.ended_by_launcher: list[RankEnd] = []
        self.interrupts = 0
        self.stopped_by = 0
        """The signal with which the user ends the job; nothing is started again from then on."""
        self.timed_out = False
        self.exit_unwritten = 0
        """The exit code if output was lost, else 0."""

    def execute(self) -> int:
        """Run the job and return the exit code."""
        callbacks: dict[signal.Signals, Callable[[int], None]] = {
            **dict.fromkeys(FORWARDED, self.forward),
            signal.SIGINT: self.interrupted,
            signal.SIGTSTP: self.suspend,
            signal.SIGQUIT: self.ask_why,
        }
        # Signals that were ignored when the launcher started (nohup) stay ignored, in the ranks
        # too.
        heeded = {
            n: call for n, call in callbacks.items() if signal.getsignal(n) is not signal.SIG_IGN
        }
        with handlers(heeded), self.rank_set:
            world_size = self.options.span.world_size if self.options.span else None
            self.commands = self.first_commands()
            self.rank_set.start(self.commands, self.first, world_size)
            if self.options.timeout_s is not None:
                self.rank_set.loop.call_later("timeout", self.options.timeout_s, self.time_out)
            self.rank_set.run()
        self.relay.finish()
        for inquiry in self.inquiries:
            inquiry.kill()
            inquiry.wait()
        return self.conclude()

    def first_commands(self) -> list[RankCommand]:
        """Return the command of each rank's first process."""
        ranks, bind = self.options.ranks, self.options.bind
        environments = rank_environments(ranks, bind, self.options.span)
        return [
            RankCommand(
                arguments=self.options.command,
                environment=environment,
                cpus=cpus,
                stdin=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank, (environment, cpus) in enumerate(
                zip(environments, rank_cpus(ranks, bind), strict=True), self.first
            )
        ]

    # --- output -----------------------------------------------------------------------------------

    def show(self, rank: int, stream: int, data: bytes) -> None:
        """Relay what a rank wrote."""
        try:
            lines = self.relay.feed(rank, stream, data)
        except OSError as error:
            self.lose_output(stream, error)
            return
        if stream == STDERR and any(line.startswith(CONSEQUENCES) for line in lines):
            self.consequential.add(rank)
        loop = self.rank_set.loop
        if self.relay.holds_tracebacks and not loop.has_timer("hold"):
            loop.call_later("hold", HOLD_S, self.release_tracebacks)
        if self.relay.has_unfinished and not loop.has_timer("draw"):
            loop.call_later("draw", DRAW_DELAY_S, self.relay.draw_unfinished)

    def release_tracebacks(self) -> None:
        """Write the lines that have been held for long enough."""
        try:
            self.relay.release_tracebacks()
        except OSError as error:
            self.lose_output(STDERR, error)

    def lose_output(self, stream: int, error: OSError) -> None:
        """Record that a stream cannot be written to; end the job unless its reader has left."""
        self.rank_set.close_stream(stream)
        if isinstance(error, BrokenPipeError):
            # The reader has left (| head): the ranks notice it as on their own streams, with
            # SIGPIPE.
            self.exit_unwritten = self.exit_unwritten or 128 + signal.SIGPIPE
            return
        name = "stderr" if stream == STDERR else "stdout"
        ending = "; ending all ranks" if self.rank_set.running else ""
        self.relay.note(f"cannot write what the ranks print to {name}: {error.strerror}{ending}")
        self.exit_unwritten = EXIT_CANNOT_WRITE
        self.rank_set.terminate()

    # --- signals ----------------------------------------------------------------------------------

    def forward(self, number: int) -> None:
        """Forward a signal. SIGHUP goes to whole process groups, as when a terminal is closed."""
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self.stop(number)
        self.rank_set.send(number, group=number == signal.SIGHUP)

    def interrupted(self, number: int) -> None:
        """Forward Ctrl-C; kill the ranks at the second one."""
        self.interrupts += 1
        self.stop(number)
        if self.interrupts == 1:
            self.rank_set.send(number, group=True)
            return
        self.rank_set.kill()
        signal.signal(
            number, signal.SIG_DFL
        )  # if this does not help either, a third Ctrl-C ends this process

    def stop(self, number: int) -> None:
        """Start nothing again from here on, because the user ends the job."""
        self.stopped_by = number
        self.rank_set.start_none_again()

    def suspend(self, number: int) -> None:
        """Stop the ranks together with the launcher (Ctrl-Z), and continue with it."""
        # Not SIGTSTP, which the kernel discards for process groups that no shell manages.
        self.rank_set.send(signal.SIGSTOP, group=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.rank_set.send(signal.SIGCONT, group=True)

    def ask_why(self, number: int) -> None:
        """Show who makes the job wait, at SIGQUIT; it goes on."""
        command = [sys.executable, "-m", "gpucoll", "why", str(os.getpid())]
        self.inquiries.append(subprocess.Popen(command, stdout=2, stdin=subprocess.DEVNULL))

    # --- ends -------------------------------------------------------------------------------------

    def time_out(self) -> None:
        """End the ranks because the timeout has expired."""
        if self.failures:
            return
        self.timed_out = True
        late = listed(self.rank_set.running)
        self.relay.note(f"{late} had not ended after {self.options.timeout_s:g} s (--timeout)")
        self.rank_set.terminate()

    def ended(self, end: RankEnd) -> None:
        """Record a rank's end. The first failure starts the end of all, unless it is made good."""
        if self.members is None:
            self.take(end)
            return
        was_member = self.members.leave(end.rank)
        is_over = self.failures or self.finished or end.by_launcher
        if end.failed and is_over and not was_member and not self.stopped_by:
            self.unjoined.append(end)
        elif not end.failed or is_over or not self.start_again(end, self.members):
            self.take(end)
            self.rank_set.start_none_again()
        if (self.failures or self.finished) and not self.members.any_here:
            self.rank_set.terminate()  # those that wait to be taken in

    def take(self, end: RankEnd) -> None:
        """Record an end that is not made good."""
        if not end.failed:
            if not self.failures:
                self.finished.append(end)
        elif end.by_launcher:
            self.ended_by_launcher.append(end)
        else:
            self.fail(end)

    def fail(self, end: RankEnd) -> None:
        """Record a failure; the first one starts the end of all ranks."""
        self.failures.append(end)
        if len(self.failures) == 1:
            lost = self.why_lost() if end.rank in self.consequential else ""
            why = f"; {self.obstacle}" if self.obstacle else ""
            others = f"; the others have {self.options.grace_s:g} s to end by themselves"
            self.first_note = f"{end}{lost}{why}{others if self.rank_set.running else ''}"
            self.relay.note(self.first_note)
        self.rank_set.end_soon()

    def joined(self, rank: int) -> None:
        """Count the process in a rank's place as a member of the elastic job."""
        if self.members is not None:
            self.members.join(rank)

    def start_again(self, end: RankEnd, members: Members) -> bool:
        """Start a process in the place of one that failed; return False if the job ends instead."""
        self.obstacle = "" if self.stopped_by else members.obstacle()
        if self.stopped_by or self.obstacle:
            return False
        if members.is_used_up:
            used = f"--restarts {members.elastic.restarts} is used up"
            self.relay.note(f"{end}; {used}, and its place stays empty")
            return True
        pause_s = members.pause_s(end.rank)
        first = self.commands[end.rank - self.first]
        command = first._replace(
            environment=joining_environment(first.environment),
            stdin=subprocess.DEVNULL,
            attempt=end.attempt + 1,
        )
        when = f" in {pause_s:g} s" if pause_s else ""
        label = label_of(end.rank, command.attempt)
        self.relay.note(f"{end}; {label} is started in its place{when}")

        def make() -> RankCommand:
            self.consequential.discard(end.rank)
            self.relay.rename(end.rank, label)
            return command

        self.rank_set.start_again(end, make, pause_s)
        return True

    def why_lost(self) -> str:
        """Return why a rank that lost another one failed, and which ranks had succeeded."""
        ended = f": {listed(labels(self.finished))} had ended with exit code 0"
        return f" because another rank was lost{ended if self.finished else ''}"

    def conclude(self) -> int:
        """Report how the job ended, and return the exit code."""
        code, cause = 0, None
        if self.failures:
            # The first failure in time, but preferably one that does not follow from another
            # failure.
            cause = min(self.failures, key=lambda end: end.rank in self.consequential)
            code = cause.status
            self.tell([end for end in self.failures if end is not cause])
        elif self.timed_out:
            code = EXIT_TIMEOUT
        elif self.exit_unwritten:
            code = self.exit_unwritten
        elif self.ended_by_launcher:  # by the second Ctrl-C
            code = 128 + signal.SIGINT
        elif self.stopped_by and not self.finished:  # while no process ran
            code = 128 + self.stopped_by
        self.tell(self.ended_by_launcher, "had to be ended, and ")
        if self.unjoined:
            self.relay.note(f"{listed(labels(self.unjoined))} had not joined when the job ended")
        if cause is not None:
            self.tell_cause(cause)
        return code

    def tell_cause(self, cause: RankEnd) -> None:
        """Report the cause at the end, unless the last line already does so."""
        if self.interrupts or (
            cause is self.failures[0] and self.relay.last_note == self.first_note
        ):
            return  # the user has caused it
        error = self.relay.error_of(cause.rank) if cause.exit_code == EXIT_UNCAUGHT else ""
        shown = error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR]}..."
        self.relay.note(f"the cause: {cause}{f': {shown}' if shown else ''}")

    def tell(self, ends: Sequence[RankEnd], how: str = "") -> None:
        """Report how ranks ended, with one line for all that ended alike."""
        alike: dict[str, list[RankEnd]] = {}
        for end in ends:
            alike.setdefault(end.manner, []).append(end)
        for manner, same in alike.items():
            verb = manner.replace("was ", "were ", 1) if len(same) > 1 else manner
            self.relay.note(f"{listed(labels(same))} {how}{verb}")


def labels(ends: Sequence[RankEnd]) -> list[str]:
    """Return the names of processes, ordered by their places."""
    return [end.label for end in sorted(ends, key=lambda end: (end.rank, end.attempt))]


def open_standard_streams() -> None:
    """Open standard streams that were closed (``<&-``), or the next file would get their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, hence this one
            os.set_inheritable(descriptor, True)


def say(line: str) -> None:
    """Write a line to stderr, in one piece."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line ``gpucoll-run`` and return the exit code."""
    open_standard_streams()
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if obstacle := obstacle_to(options.ranks, DESCRIPTORS):
        say(f"gpucoll-run: {obstacle}")
        return EXIT_USAGE
    # A parent may have left it ignored, and the kernel would then discard the ranks' exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        compile_kernels(say)
        gc.freeze()  # what is loaded stays to the end: a collection at the exit would take 5 ms
        return Run(options).execute()
    except KeyboardInterrupt:  # only possible before the ranks are started
        return 128 + signal.SIGINT
    except (LaunchError, OSError) as error:
        say(f"gpucoll-run: {error}")
        return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
