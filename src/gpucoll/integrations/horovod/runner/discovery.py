"""Which hosts an elastic job may use: a script says so, again and again, or they are fixed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping

from gpucoll import LaunchError
from gpucoll.launcher.events import EventLoop

__all__ = ["Discovery"]

_LONGEST_S = 60.0
"""A script that runs for longer is ended."""
_READ_BYTES = 65536


class Discovery:
    """The hosts with their slots.

    Parameters
    ----------
    script : str or None
        A command of the shell, which prints a line ``host:slots`` or ``host`` for each host.
    slots : int
        Of hosts that the script prints without.
    hosts : mapping, optional
        The hosts, if there is no script.
    """

    def __init__(
        self, script: str | None, slots: int = 1, hosts: Mapping[str, int] | None = None
    ) -> None:
        self.script, self._slots = script, slots
        self._hosts = dict(hosts or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def find(self) -> dict[str, int]:
        """Return the hosts that there are now.

        Raises
        ------
        LaunchError
            The script fails.
        """
        if self.script is None:
            return dict(self._hosts)
        done = subprocess.run(
            self._command(), stdout=subprocess.PIPE, timeout=_LONGEST_S, check=False
        )
        return self._parsed(done.stdout, done.returncode)

    def wait_for(self, n_slots: int, limit_s: float, pause_s: float) -> dict[str, int]:
        """Return the hosts when they have so many slots.

        Raises
        ------
        LaunchError
            They have not in time, or the script fails.
        """
        give_up_s = time.monotonic() + limit_s
        while sum((hosts := self.find()).values()) < n_slots:
            if self.script is None or time.monotonic() > give_up_s:
                raise LaunchError(
                    f"{n_slots} ranks are to be started, but {hosts} has fewer slots"
                    + (f" after {limit_s:g} s (HOROVOD_ELASTIC_TIMEOUT)" if self.script else "")
                )
            time.sleep(pause_s)
        return hosts

    def ask(self, loop: EventLoop, found: Callable[[dict[str, int] | LaunchError], None]) -> None:
        """Run the script beside other things; call `found` with the hosts, or with its failure."""
        process = subprocess.Popen(self._command(), stdout=subprocess.PIPE, bufsize=0)
        self._process, self._said = process, b""
        assert process.stdout is not None
        output = process.stdout.fileno()

        def read() -> None:
            if data := os.read(output, _READ_BYTES):
                self._said += data
                return
            loop.remove_reader(output)
            loop.cancel(self)
            code = self.end()
            try:
                hosts = self._parsed(self._said, code)
            except LaunchError as error:
                found(error)
            else:
                found(hosts)

        loop.add_reader(output, read)
        loop.call_later(self, _LONGEST_S, process.kill)

    def end(self) -> int:
        """End the script if it runs; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdout is not None
        process.stdout.close()
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", str(self.script)]

    def _parsed(self, said: bytes, code: int) -> dict[str, int]:
        if code:
            raise LaunchError(
                f"Failed to execute discovery script: {self.script}. Exit code: {code}"
            )
        hosts = {}
        for line in said.decode(errors="replace").splitlines():
            name, colon, slots = line.strip().partition(":")
            if colon and not slots.isdecimal():
                raise LaunchError(f"{self.script} printed {line!r}, which is not HOST:SLOTS")
            if name:
                hosts[name] = int(slots) if colon else self._slots
        return hosts
