"""A gpucoll-run to talk to while it runs, and the check that nothing is left over."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

WAIT_S = 20.0
"""Longer than anything here takes, shorter than a hanging CI job."""

# gpucoll-run without its first step: the launcher's tests need no kernels. It would honour nohup,
# under which the tests may run.
GPUCOLL_RUN = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from gpucoll.launcher import cli
cli.compile_kernels = lambda report: None
sys.exit(cli.main())
"""


class Running:
    """A started gpucoll-run, or a program that calls `launch`; its output is read as it comes."""

    def __init__(self, command, **options):
        self.process = subprocess.Popen(command, bufsize=0, **options)
        self.seen = {1: b"", 2: b""}
        self._position = {1: 0, 2: 0}

    @property
    def pid(self):
        return self.process.pid

    def send(self, number):
        os.kill(self.pid, number)

    def wait_for(self, text, stream=1):
        """Read until `text` has come after what was waited for last; return the line it ends in."""
        deadline = time.monotonic() + WAIT_S
        while True:
            at = self.seen[stream].find(text.encode(), self._position[stream])
            if at >= 0:
                self._position[stream] = at + len(text)
                return self.seen[stream][
                    self.seen[stream].rfind(b"\n", 0, at) + 1 : at + len(text)
                ].decode()
            assert self._read_more(stream, deadline), f"{text!r} did not come: {self.seen}"

    def wait_for_all(self, texts, stream=1):
        """Wait for several texts in any order."""
        start = self._position[stream]
        for text in texts:
            self._position[stream] = start
            self.wait_for(text, stream)

    def _read_more(self, stream, deadline):
        pipe = self.process.stdout if stream == 1 else self.process.stderr
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(pipe.fileno(), 65536) if ready else b""
        self.seen[stream] += data
        return bool(data)

    def finish(self):
        """Wait for the end; return exit code, and everything from stdout and stderr as text."""
        out, err = self.process.communicate(timeout=WAIT_S)
        self.seen[1] += out or b""
        self.seen[2] += err or b""
        return self.process.returncode, self.seen[1].decode(), self.seen[2].decode()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start():
    """Start a program; it is ended with the test."""
    started = []

    def start(command, **options):
        options = {"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1, **options}
        started.append(Running([str(word) for word in command], **options))
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def start_run(start):
    """Start gpucoll-run with these arguments."""

    def start_run(*arguments, **options):
        return start([sys.executable, "-c", GPUCOLL_RUN, *arguments], **options)

    return start_run


@pytest.fixture
def run(start_run):
    """Run gpucoll-run to its end; return exit code, stdout and stderr."""

    def run(*arguments, **options):
        return start_run(*arguments, **options).finish()

    return run


@pytest.fixture
def script(tmp_path):
    """Write a rank's program; `rank` and the usual modules are there."""

    def script(text, name="program.py"):
        path = tmp_path / name
        head = "import os, signal, sys, time\nrank = int(os.environ['GPUCOLL_RANK'])\n"
        path.write_text(head + text)
        return path

    return script


class Watched:
    """Processes that are not children, watched by pidfd."""

    def __init__(self):
        self._descriptors = {}

    def add(self, pid):
        self._descriptors[int(pid)] = os.pidfd_open(int(pid))

    def add_if_running(self, pid):
        with contextlib.suppress(ProcessLookupError):
            self.add(pid)

    def all_ended(self, timeout_s=WAIT_S):
        """Return whether all of them end within the time."""
        deadline = time.monotonic() + timeout_s
        return all(
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            for descriptor in self._descriptors.values()
        )

    def close(self):
        for descriptor in self._descriptors.values():
            if not select.select([descriptor], [], [], 0)[0]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


@pytest.fixture
def watched():
    """Watch processes; those that are left at the end of the test are killed."""
    processes = Watched()
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Compare this process's descriptors, threads and children before and after each test."""
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    before = children()
    yield
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads
    assert children() == before  # other tests' rank server may be one


def children():
    """Return the processes whose parent this one is, ended ones that nobody has waited for too."""
    threads = Path("/proc/self/task").iterdir()
    found: set[str] = set()
    for thread in threads:
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {*(thread / "children").read_text().split()}
    return found


def open_descriptors():
    """Return number -> what it is, without the one that lists them."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[int(path.name)] = os.readlink(path)
        except OSError:
            continue
    return found
