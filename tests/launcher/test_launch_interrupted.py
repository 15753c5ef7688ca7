"""gpucoll.launch when its caller is interrupted or killed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

# A program that calls launch, for what cannot be done to the process that runs the tests.
CALLER = """
import contextlib, os, signal, sys, threading
from gpucoll.launcher.function import run

def wait(rank):
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
    {before}
    print("pid", os.getpid(), "end")
    {then}
    while True:
        pass

before = sorted(os.listdir("/proc/self/fd"))
try:
    run(wait, 2, (), {{}}, None, "auto", lambda: contextlib.nullcontext(0))
except KeyboardInterrupt:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        clean = threading.active_count() == 1 and sorted(os.listdir("/proc/self/fd")) == before
        print("interrupted and", "clean" if clean else "unclean")
"""


class TestInterrupt:
    def start(self, start, watched, before="pass", then="pass", **environment):
        code = CALLER.format(before=before, then=then)
        running = start([sys.executable, "-c", code], env={**os.environ, **environment})
        for _ in range(2):
            watched.add(running.wait_for(" end").split()[1])
        return running

    def test_ends_the_ranks_and_is_raised(self, start, watched):
        running = self.start(start, watched)
        running.send(signal.SIGINT)
        code, out, err = running.finish()
        assert (code, err) == (0, "")
        assert out.endswith("interrupted and clean\n")
        assert watched.all_ended()

    def test_kills_ranks_that_do_not_listen(self, start, watched):
        ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
        running = self.start(start, watched, ignore, GPUCOLL_GRACE_S="0.2")
        running.send(signal.SIGINT)
        assert running.finish()[1].endswith("interrupted and clean\n")
        assert watched.all_ended()

    def test_a_second_one_kills_at_once(self, start, watched):
        block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"
        wait = "signal.sigwait({signal.SIGINT}); print('not now')"
        running = self.start(start, watched, block, wait, GPUCOLL_GRACE_S="600")
        running.send(signal.SIGINT)
        running.wait_for("not now\n")
        running.wait_for("not now\n")
        running.send(signal.SIGINT)
        assert running.finish()[1].endswith("interrupted and clean\n")
        assert watched.all_ended()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_the_ranks_die_with_the_caller(self, start, watched, number):
        running = self.start(start, watched)
        running.send(number)
        assert watched.all_ended()
