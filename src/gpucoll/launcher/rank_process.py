"""One rank's process: started, signalled and reaped without confusing reused process ids."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpucoll.launcher import exec_rank
from gpucoll.launcher.exec_rank import set_up

__all__ = ["STDERR", "STDOUT", "RankCommand", "RankEnd", "RankProcess", "label_of", "listed"]

STDOUT = 1
STDERR = 2
READ_BYTES = 65536  # the usual capacity of a pipe
# at most 4 MiB, so that a process that writes without end cannot block the launcher
DRAIN_READS = 64
KILLED_WAIT_S = (
    10.0  # a killed process is gone at once, unless it hangs in the kernel (a dead NFS server)
)


class RankCommand(NamedTuple):
    """The command of one rank, and its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cpus: frozenset[int] = frozenset()
    """CPUs to bind to; empty for none."""
    stdin: int | None = subprocess.DEVNULL
    """A descriptor, or None to share the launcher's."""
    inherited: tuple[int, ...] = ()
    """Descriptors that the rank inherits under the same numbers."""
    attempt: int = 1
    """The number of this process among those started in the rank's place, from 1 on."""


class RankEnd(NamedTuple):
    """How a rank's process ended."""

    rank: int
    world_size: int
    exit_code: int | None = None
    signal_number: int | None = None
    by_launcher: bool = False
    """Whether the rank ended after the launcher had begun to end all ranks, so that the manner of
    its end is irrelevant."""
    attempt: int = 1
    """The number of the process among those started in the rank's place."""

    @property
    def failed(self) -> bool:
        """Whether it ended other than with exit code 0."""
        return self.exit_code != 0

    @property
    def known(self) -> bool:
        """Whether it is known how it ended."""
        return self.exit_code is not None or self.signal_number is not None

    @property
    def status(self) -> int:
        """The exit code for this end: the rank's own, or 128 + the signal's number."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return 1 if self.exit_code is None else self.exit_code

    @property
    def manner(self) -> str:
        """The manner of the end, as the rest of a sentence."""
        if self.signal_number is not None:
            unasked = self.signal_number == signal.SIGKILL and not self.by_launcher
            hint = (
                (" (by the kernel because memory ran out, or by another process)")
                if unasked
                else ""
            )
            return f"was killed by {signal_name(self.signal_number)}{hint}"
        if not self.known:
            return "ended, and another part of this process collected its exit code"
        return f"ended with exit code {self.exit_code}"

    @property
    def label(self) -> str:
        """The process's name in the output."""
        return label_of(self.rank, self.attempt)

    def __str__(self) -> str:
        of_all = f" of {self.world_size}" if self.attempt == 1 else ""
        return f"rank {self.label}{of_all} {self.manner}"


def label_of(rank: int, attempt: int) -> str:
    """Return the name of a process: its rank, or "1#3" for the third process in rank 1's place.

    What was started again has another rank, which the launcher does not know.
    """
    return str(rank) if attempt == 1 else f"{rank}#{attempt}"


def signal_name(number: int) -> str:
    """Return a signal's name; real-time signals without a name get their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def listed(ranks: Sequence[object]) -> str:
    """Format ranks for a sentence."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class ExitWatch:
    """A descriptor that becomes readable when a child ends, without collecting its status."""

    def __init__(self, pid: int) -> None:
        self._thread: threading.Thread | None = None
        try:
            self.descriptor = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                raise
            self.descriptor = self._watch_by_thread(pid)
        except AttributeError:  # Linux only
            self.descriptor = self._watch_by_thread(pid)

    def _watch_by_thread(self, pid: int) -> int:
        """Watch with a thread, for Linux before 5.3 and sandboxes that forbid pidfd_open."""
        read_end, write_end = os.pipe()

        def watch() -> None:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                # another part of the process collected the status: the child has ended all the same
                pass
            finally:
                os.close(write_end)

        self._thread = threading.Thread(target=watch, name=f"gpucoll-exit-{pid}", daemon=True)
        self._thread.start()
        return read_end

    def wait(self, timeout_s: float) -> bool:
        """Return whether the child ends in time."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the descriptor."""
        if self._thread is not None:
            self._thread.join(KILLED_WAIT_S)
        os.close(self.descriptor)


class RankProcess:
    """A started rank, in its own session and process group.

    Its end is noticed before its status is collected. Until `release` collects it, no other process
    can get its process id, so signals to it and to its group cannot reach a stranger.
    """

    def __init__(self, rank: int, world_size: int, command: RankCommand) -> None:
        self.rank = rank
        self.world_size = world_size
        self.attempt = command.attempt
        self._popen = started(command)
        pipes = {STDOUT: self._popen.stdout, STDERR: self._popen.stderr}
        self.outputs = {stream: pipe.fileno() for stream, pipe in pipes.items() if pipe is not None}
        """Stream -> descriptor, for streams that are still open."""
        try:
            for descriptor in self.outputs.values():
                os.set_blocking(descriptor, False)
            self.exit_watch = ExitWatch(self.pid)
        except BaseException:
            self._popen.kill()
            self._popen.wait()
            self.close_outputs()
            raise

    @property
    def label(self) -> str:
        """The process's name in the output."""
        return label_of(self.rank, self.attempt)

    @property
    def pid(self) -> int:
        """The process id, and the id of the rank's process group."""
        return self._popen.pid

    def read(self, stream: int) -> bytes | None:
        """Return what the rank wrote; empty at the stream's end; None if there is nothing yet."""
        try:
            return os.read(self.outputs[stream], READ_BYTES)
        except BlockingIOError:
            return None

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the rank, or to its whole group, unless it has ended."""
        try:
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # it has ended, or is a child that now belongs to another user, which we must not end
            pass

    def end(self, *, by_launcher: bool) -> RankEnd | None:
        """Return how the rank ended, without collecting it; None while it runs."""
        known = partial(
            RankEnd, self.rank, self.world_size, by_launcher=by_launcher, attempt=self.attempt
        )
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return known()
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return known(exit_code=status.si_status)
        return known(signal_number=status.si_status)

    def release(self) -> None:
        """Kill what is left of the rank's process group, and release everything."""
        self.send(signal.SIGKILL, group=True)
        if self.exit_watch.wait(KILLED_WAIT_S):
            self._popen.wait()
        self.exit_watch.close()
        self.close_outputs()

    def close_output(self, stream: int) -> None:
        """Stop reading one of the rank's streams."""
        pipe = self._popen.stdout if stream == STDOUT else self._popen.stderr
        if pipe is not None:
            pipe.close()
        self.outputs.pop(stream, None)

    def close_outputs(self) -> None:
        """Stop reading the rank's streams."""
        for stream in list(self.outputs):
            self.close_output(stream)


def started(command: RankCommand) -> subprocess.Popen[bytes]:
    """Start a rank, which sets itself up before it runs its program (see exec_rank.py)."""
    parent, cpus = os.getpid(), ",".join(str(cpu) for cpu in sorted(command.cpus)) or "-"
    options: dict[str, Any] = {
        "bufsize": 0,
        "stdin": command.stdin,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": command.environment,
        "pass_fds": command.inherited,
        # So Ctrl-C in a terminal reaches only the launcher, which forwards it once.
        "start_new_session": True,
    }
    if is_single_threaded():
        with contextlib.suppress(OSError):  # it cannot be run, which exec_rank reports as the rank
            setting_up = partial(set_up, parent, cpus)
            return subprocess.Popen(command.arguments, preexec_fn=setting_up, **options)
    wrapped = [sys.executable, "-I", "-S", exec_rank.__file__, str(parent), cpus]
    return subprocess.Popen([*wrapped, *command.arguments], **options)


def is_single_threaded() -> bool:
    """Return whether this process has certainly no other thread, not even one without Python."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
