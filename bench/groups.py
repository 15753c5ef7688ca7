"""The ranks of one library as child processes, commanded over a socket.

While another library is measured they wait in a blocking read, which takes no CPU time.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from typing import Any, Protocol

from gpucoll.bench.rank_processes import (
    Answer,
    ConnectedRank,
    Start,
    StartedProcess,
    explain,
    last_lines,
    pidfd_of,
)

__all__ = ["GRACE_S", "Group", "GroupError", "ProcessGroup"]

GRACE_S = 0.5  # for the other ranks to report, once one of them has failed
END_S = 10.0  # for the ranks to leave by themselves


class GroupError(Exception):
    """A library's ranks cannot continue; the message names the rank, failure and command."""


class Group(Protocol):
    """The ranks of one library, wherever they run."""

    name: str
    ranks: int
    versions: dict[str, str]

    def call(self, do: str, timeout_s: float, **arguments: Any) -> list[Answer]:
        """Make every rank execute a command; return their answers in rank order."""
        ...

    def close(self) -> None:
        """End every rank."""
        ...


class ProcessGroup:
    """Ranks that this process starts and ends.

    Parameters
    ----------
    name : str
        The library's name, for messages and tables.
    ranks : int
        The number of ranks that will connect.
    starts : list of Start
        The processes that become these ranks.
    """

    def __init__(self, name: str, ranks: int, starts: list[Start]) -> None:
        self.name = name
        self.ranks = ranks
        self.versions: dict[str, str] = {}
        self._doing = "starting"
        self._broken = False
        self._ranks: list[ConnectedRank] = []
        self._processes: list[StartedProcess] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._selector = selectors.DefaultSelector()
        # The name is in the abstract namespace, so nothing is left of it however this process ends.
        address = f"gpucoll-bench-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind("\0" + address)
            self._listener.listen(ranks)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            for start in starts:
                self._spawn(start, address)
        except BaseException:
            self.close()
            raise

    # --- the driver's interface -------------------------------------------------------------------

    def join(self, timeout_s: float) -> None:
        """Wait until every rank has joined the library's other ranks."""
        self._wait(2, timeout_s)
        for rank in self._ranks:
            described = rank.inbox[1]
            rank.inbox.clear()
            rank.number = described["rank"]
            self.versions = described["versions"]
            if described["world_size"] != self.ranks:
                self._broken = True
                raise GroupError(
                    f"{self.name}: its ranks did not find each other: one counts "
                    f"{described['world_size']} instead of {self.ranks}"
                )
        self._ranks.sort(key=lambda rank: rank.number)

    def call(self, do: str, timeout_s: float, **arguments: Any) -> list[Answer]:
        """Make every rank execute a command; return their answers in rank order."""
        self._doing = " ".join([do, *(f"{key}={value}" for key, value in arguments.items())])
        self._tell({"do": do, **arguments})
        self._wait(1, timeout_s)
        return [rank.inbox.pop(0) for rank in self._ranks]

    def close(self) -> None:
        """End every rank, in good order if possible, and wait until it has ended."""
        try:
            if not self._broken and len(self._ranks) == self.ranks:
                self._tell({"do": "finish"})
                self._await_processes(END_S)
        finally:
            self._kill()

    # --- messages -------------------------------------------------------------------------------

    def _tell(self, command: Answer) -> None:
        line = json.dumps(command).encode() + b"\n"
        for rank in self._ranks:
            try:
                rank.connection.sendall(line)
            except OSError:
                pass  # the end of its stream will be noticed in turn

    def _wait(self, messages: int, timeout_s: float) -> None:
        """Wait until every rank has sent `messages` messages; raise if that cannot happen."""
        deadline = time.monotonic() + timeout_s
        failed = False
        while True:
            silent = [rank for rank in self._ranks if rank.awaited(messages)]
            everyone = len(self._ranks) == self.ranks and not silent
            if not failed and explain(self._processes, self._ranks, self.ranks):
                failed = True
                # The first report need not come from the rank that failed first.
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if everyone and not failed:
                return
            remaining_s = deadline - time.monotonic()
            if (everyone and not self._more_to_come()) or remaining_s <= 0:
                self._broken = True
                raise GroupError(self._why(messages, timeout_s))
            for key, _ in self._selector.select(remaining_s):
                key.data(key.fileobj)

    def _more_to_come(self) -> bool:
        """Return whether a rank is gone and the end of its process or mpiexec is not yet known."""
        gone = any(rank.gone for rank in self._ranks)
        return gone and not any(process.ended for process in self._processes)

    def _why(self, messages: int, timeout_s: float) -> str:
        """Return the failure, the command, and the last lines that the ranks have printed."""
        cause = explain(self._processes, self._ranks, self.ranks)
        if cause is None:
            answered = {rank.number for rank in self._ranks if len(rank.inbox) >= messages}
            silent = [str(rank) for rank in range(self.ranks) if rank not in answered]
            ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)} of {self.ranks}"
            cause = f"no answer from {ranks} within {timeout_s:g} s"
        first, *rest = cause.splitlines()
        text = "\n".join([f"{self.name}: {first} (while {self._doing})", *rest])
        return text + last_lines(self._log)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            connection.close()  # any process may connect to an abstract name
            return
        rank = ConnectedRank(connection, pidfd_of(pid))
        self._ranks.append(rank)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._receive(rank))

    def _receive(self, rank: ConnectedRank) -> None:
        try:
            received = rank.connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            rank.gone = True
            rank.failed_at = min(rank.failed_at, time.monotonic())
            self._selector.unregister(rank.connection)
            return
        *lines, rank.received = (rank.received + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            rank.number = message.get("rank", rank.number)
            rank.inbox.append(message)
            if "error" in message:
                rank.failed_at = time.monotonic()

    # --- processes ------------------------------------------------------------------------------

    def _spawn(self, start: Start, address: str) -> None:
        popen = subprocess.Popen(
            [part.replace("{connect}", address) for part in start.command],
            env=start.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # so that only the driver receives Ctrl-C, and ends the ranks in order
            start_new_session=True,
        )
        process = StartedProcess(start, popen, os.pidfd_open(popen.pid))
        self._processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda _: self._note(process))

    def _note(self, process: StartedProcess) -> None:
        process.ended = True
        self._selector.unregister(process.pidfd)

    def _await_processes(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _kill(self) -> None:
        """End what is left: the ranks, then the processes that started them, which may tidy up."""
        for rank in self._ranks:
            rank.connection.close()
            if rank.pidfd >= 0:
                try:
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                os.close(rank.pidfd)
        self._ranks.clear()
        for process in self._processes:
            process.popen.terminate()
        self._await_processes(GRACE_S)
        for process in self._processes:
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait()
            os.close(process.pidfd)
        self._processes.clear()
        self._selector.close()
        self._listener.close()
        self._log.close()
