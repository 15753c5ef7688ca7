"""A rank's process: how it is set up, with and without other threads in its launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucoll.launcher import rank_process
from gpucoll.launcher.rank_process import RankCommand, RankProcess

SET_UP = """\
import ctypes, os
dies_with = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_with), 0, 0, 0)  # PR_GET_PDEATHSIG
print(dies_with.value, sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid())
"""
THREADS = """\
import threading
from gpucoll.launcher.rank_process import is_single_threaded
before, ended = is_single_threaded(), threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
print(before, is_single_threaded())
ended.set()
"""


@pytest.fixture(params=["between fork and exec", "by exec_rank"])
def command_of(request, monkeypatch):
    is_single = request.param == "between fork and exec"
    monkeypatch.setattr(rank_process, "is_single_threaded", lambda: is_single)

    def make(*arguments):
        cpu = max(os.sched_getaffinity(0))
        return RankCommand(arguments, os.environ, cpus=frozenset({cpu}))

    return make


def outputs_of(command):
    """Return what a rank writes to its streams, and its exit code."""
    process = RankProcess(0, 1, command)
    try:
        assert process.exit_watch.wait(20)
        texts = [(process.read(stream) or b"").decode() for stream in (1, 2)]
        end = process.end(by_launcher=False)
        return *texts, end and end.exit_code
    finally:
        process.release()


def test_it_dies_with_its_launcher_on_its_cpus(command_of):
    out, err, code = outputs_of(command_of(sys.executable, "-c", SET_UP))

    assert out == f"9 [{max(os.sched_getaffinity(0))}] True\n"
    assert (err, code) == ("", 0)


def test_a_signal_that_python_ignores_is_not_ignored(command_of):
    mask = outputs_of(command_of("grep", "SigIgn", "/proc/self/status"))[0].split()[1]

    for number in (2, 13, 25):  # SIGINT, SIGPIPE, SIGXFSZ
        assert not int(mask, 16) >> (number - 1) & 1


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [("no such program", 127, "No such file or directory"), ("/", 126, "Permission denied")],
)
def test_what_cannot_be_run_is_the_ranks_failure(command_of, name, code, why):
    assert outputs_of(command_of(name)) == ("", f"gpucoll: cannot run {name}: {why}\n", code)


def test_other_threads_are_seen():
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "True False\n"
