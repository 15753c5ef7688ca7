"""Programs that a library's own launcher starts anew for each sample: `rank.hello`.

A peer without a launcher has no program.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucoll.bench import rank as rank_package
from gpucoll.bench.groups import GRACE_S, GroupError
from gpucoll.bench.peers import LocatedPeer
from gpucoll.bench.rank.hello import field as kernel_figure
from gpucoll.bench.rank.message_passing import mpi_version
from gpucoll.bench.rank_processes import last_lines
from gpucoll.bench.starts import own_environment, peer_environment

__all__ = ["Program", "Run", "own_program", "peer_program"]

HELLO = str(Path(rank_package.__file__).parent / "hello.py")

Answer = dict[str, Any]


@dataclass
class Run:
    """The resources that one run of a program took.

    Attributes
    ----------
    wall_s, cpu_s : float
        Of the whole job: launcher, ranks, and everything that they started.
    answers : list of dict
        Each rank's results, in rank order.
    shared_bytes_before : int
        The machine's shared memory in use before the start.
    """

    wall_s: float
    cpu_s: float
    answers: list[Answer]
    shared_bytes_before: int

    @property
    def wrong(self) -> int:
        """The number of ranks whose sum over the ranks is wrong."""
        ranks = len(self.answers)
        return sum(answer["sum"] != ranks * (ranks - 1) // 2 for answer in self.answers)

    def slowest(self, name: str) -> float:
        """Return the largest value of a figure among the ranks."""
        return max(float(answer[name]) for answer in self.answers)


@dataclass
class Program:
    """A library's hello program, run by the library's own launcher.

    Attributes
    ----------
    name : str
        The library's name.
    library : str
        The library's name in `rank.hello`.
    ranks : int
        The number of ranks that the launcher starts.
    launcher : callable
        Arguments of a Python -> the command line that starts all ranks with them.
    signature : str
        Text that the library's version must contain.
    versions : dict
        The versions that the first run has reported.
    """

    name: str
    library: str
    ranks: int
    launcher: Callable[[list[str]], list[str]]
    environment: dict[str, str]
    signature: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def run(self, what: str, timeout_s: float) -> Run:
        """Run the program to its end.

        Raises
        ------
        GroupError
            The program failed, or took too long.
        """
        before = kernel_figure("/proc/meminfo", "Shmem")
        with tempfile.TemporaryDirectory(prefix="gpucoll-bench-") as folder:
            command = self.launcher([HELLO, self.library, what, folder])
            wall_s, cpu_s = self._run_to_end(command, what, timeout_s)
            answers = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        answers.sort(key=lambda answer: int(answer["rank"]))
        if [(one["rank"], one["ranks"]) for one in answers] != [
            (rank, self.ranks) for rank in range(self.ranks)
        ]:
            said = ", ".join(f"{one['rank']} of {one['ranks']}" for one in answers) or "nobody"
            raise GroupError(
                f"{self.name}: its ranks did not find each other: {self.ranks} were started, but "
                f"they counted {said} (while {what})"
            )
        self.versions = {"library": mpi_version(answers[0]["version"])}
        return Run(wall_s, cpu_s, answers, before)

    def _run_to_end(self, command: list[str], what: str, timeout_s: float) -> tuple[float, float]:
        """Run a command; return its elapsed and CPU time in seconds."""
        with tempfile.TemporaryFile() as log:
            begun = time.perf_counter()
            popen = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # so that only the driver receives Ctrl-C, and ends the ranks in order
                start_new_session=True,
            )
            try:
                with opened(os.pidfd_open(popen.pid)) as pidfd:
                    ended = bool(select.select([pidfd], [], [], timeout_s)[0])
                if not ended:
                    raise GroupError(
                        f"{self.name}: not done within {timeout_s:g} s (while {what})"
                        + last_lines(log)
                    )
                _, status, usage = os.wait4(popen.pid, 0)
                wall_s = time.perf_counter() - begun
                popen.returncode = os.waitstatus_to_exitcode(status)
            finally:
                end(popen)
            if popen.returncode:
                raise GroupError(
                    f"{self.name}: ended with exit code {popen.returncode} (while {what})"
                    + last_lines(log)
                )
        return wall_s, usage.ru_utime + usage.ru_stime


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def end(popen: subprocess.Popen[bytes]) -> None:
    """End a running launcher and with it its ranks, in good order if possible."""
    if popen.poll() is not None:
        return
    popen.terminate()
    try:
        popen.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def own_program(ranks: int) -> Program:
    """Return gpucoll's program, run by gpucoll-run."""
    launcher = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", str(ranks)]
    environment = own_environment()
    return Program("gpucoll", "gpucoll", ranks, lambda given: [*launcher, *given], environment)


def peer_program(located: LocatedPeer, ranks: int, folder: Path) -> Program:
    """Return a peer's program, run by its mpiexec; its temporary files go to `folder`."""
    return Program(
        located.name,
        located.peer.library,
        ranks,
        lambda given: located.command(ranks, given),
        peer_environment(located, folder),
        located.peer.signature,
    )
