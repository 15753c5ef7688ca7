"""gpucoll.launch when something goes wrong: what is raised, and that nothing is left over.

With a stand-in for the communicator, which starts faster.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from gpucoll.errors import AbortedError, DeadlineError, LaunchError, PeerLostError
from gpucoll.launcher import function as function_module
from gpucoll.launcher.launch_job import LaunchJob


def call(function, ranks=2, args=(), kwargs=None, timeout_s=60.0, join=None):
    """Call `gpucoll.launch` with a stand-in for the communicator: the rank's number."""
    stand_in = join or (lambda: contextlib.nullcontext(int(os.environ["GPUCOLL_RANK"])))
    return function_module.run(function, ranks, args, kwargs or {}, timeout_s, "auto", stand_in)


class SpecialError(Exception):
    """Does not survive ordinary pickling: its arguments are not those of its __init__."""

    def __init__(self, rank, reason):
        super().__init__(f"{reason} on {rank}")
        self.rank = rank


class TestFailures:
    def test_raise_what_the_rank_raised_with_its_traceback(self):
        def fail(rank):
            if rank == 1:
                raise ValueError("the reason")

        with pytest.raises(ValueError, match="the reason") as caught:
            call(fail)
        assert isinstance(caught.value.__cause__, LaunchError)
        shown = "".join(traceback.format_exception(caught.value))
        assert "rank 1 of 2 failed in" in shown
        assert 'raise ValueError("the reason")' in shown
        if sys.version_info >= (3, 11):
            assert "raised on rank 1 of 2 of gpucoll.launch" in caught.value.__notes__[0]

    def test_keep_their_class_if_it_is_the_callers(self):
        class LocalError(Exception):
            pass

        def fail(rank):
            raise LocalError(rank)

        with pytest.raises(LocalError):
            call(fail, 1)

    def test_keep_attributes_that_pickling_loses(self):
        def fail(rank):
            raise SpecialError(rank, "bad luck")

        with pytest.raises(SpecialError, match="bad luck on 0") as caught:
            call(fail, 1)
        assert caught.value.rank == 0

    def test_that_cannot_be_pickled(self):
        def fail(rank):
            raise RuntimeError("holds a lock", threading.Lock())

        with pytest.raises(
            LaunchError, match=r"(?s)rank 0 of 1 failed in .* RuntimeError.*holds a lock"
        ):
            call(fail, 1)

    @pytest.mark.parametrize("ending", [SystemExit(3), SystemExit(0), KeyboardInterrupt()])
    def test_exits_and_interrupts_do_not_end_the_caller(self, ending):
        def fail(rank):
            raise ending

        with pytest.raises(LaunchError, match=f"rank 0 of 1 failed in .*{type(ending).__name__}"):
            call(fail, 1)

    def test_a_signal(self):
        def fail(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
            call(fail)

    def test_a_crash_leaves_a_traceback(self, capsys):
        with pytest.raises(LaunchError, match="rank 0 of 1 was killed by SIGSEGV"):
            call(lambda rank: os.kill(os.getpid(), signal.SIGSEGV), 1)
        assert "Fatal Python error: Segmentation fault" in capsys.readouterr().err

    @pytest.mark.parametrize("code", [0, 3])
    def test_an_exit_without_a_result(self, code):
        with pytest.raises(LaunchError, match=f"rank 0 of 1 ended with exit code {code} before"):
            call(lambda rank: os._exit(code), 1)

    def test_a_result_that_cannot_be_pickled(self):
        with pytest.raises(LaunchError, match="a lock, cannot be pickled"):
            call(lambda rank: threading.Lock(), 1)

    def test_a_result_that_cannot_be_unpickled(self):
        class Broken:
            def __reduce__(self):
                return int, ("no number",)

        with pytest.raises(
            LaunchError, match="rank 0 of 1 returned a value that cannot be unpickled"
        ):
            call(lambda rank: Broken(), 1)

    def test_arguments_that_cannot_be_unpickled(self):
        class Broken:
            def __reduce__(self):
                return int, ("no number",)

        with pytest.raises(LaunchError, match="cannot be loaded in a fresh process"):
            call(lambda rank, x: x, 1, (Broken(),))

    def test_in_joining(self):
        def join():
            raise OSError("no such communicator")

        with pytest.raises(OSError, match="no such communicator"):
            call(lambda rank: rank, join=join)

    def test_in_leaving(self):
        @contextlib.contextmanager
        def join():
            yield 0
            raise OSError("an operation nobody waited for")

        with pytest.raises(OSError, match="nobody waited for"):
            call(lambda rank: rank, 1, join=join)

    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("kind", [PeerLostError, AbortedError])
    def test_the_cause_goes_before_what_follows_from_it(self, kind, tmp_path):
        fifo = str(tmp_path / "fifo")
        os.mkfifo(fifo)

        def fail(rank):
            if rank == 0:
                os.open(fifo, os.O_WRONLY)  # closed when this process has ended
                try:
                    raise kind("rank 1 of 2 has ended")
                except kind:
                    raise RuntimeError("while tidying up")  # noqa: B904
            Path(fifo).read_text()
            raise ValueError("the cause")

        with pytest.raises(ValueError, match="the cause") as caught:
            call(fail)
        assert "rank 0: RuntimeError" in str(caught.value.__cause__)

    def test_others_are_ended_after_the_grace_time(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_GRACE_S", "0.2")

        def fail(rank):
            if rank == 1:
                raise ValueError("the reason")
            signal.pause()

        with pytest.raises(ValueError, match="the reason"):
            call(fail)


class TestDeadline:
    def test_names_the_ranks_that_had_not_finished(self, monkeypatch):
        class JobThatIsLate(LaunchJob):
            """Its time is over at the moment when rank 1 has replied."""

            def receive(self, rank):
                super().receive(rank)
                if list(self.replies) == [1]:
                    self.time_out()

        def wait(rank):
            if rank != 1:
                signal.pause()

        monkeypatch.setattr(function_module, "LaunchJob", JobThatIsLate)
        with pytest.raises(DeadlineError, match="had not returned after 60 s on ranks 0, 2 of 3"):
            call(wait, 3, timeout_s=60.0)

    def test_kills_those_that_do_not_listen(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_GRACE_S", "0.2")

        def wait(rank):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()

        with pytest.raises(DeadlineError, match="on rank 0 of 1"):
            call(wait, 1, timeout_s=0.5)

    def test_is_no_matter_after_a_failure(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_GRACE_S", "0.3")

        def fail(rank):
            if rank == 0:
                raise ValueError("the reason")
            signal.pause()

        with pytest.raises(ValueError, match="the reason"):
            call(fail, timeout_s=60)


class TestAfterTheResult:
    def test_a_crash_is_a_warning(self):
        def crash(rank):
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
            return rank

        with pytest.warns(RuntimeWarning, match=r"rank 0 of 1 returned, but was killed by SIGSEGV"):
            assert call(crash, 1) == [0]

    def test_a_rank_that_does_not_end_is_ended(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_GRACE_S", "0.2")

        def linger(rank):
            threading.Thread(target=threading.Event().wait).start()
            return rank

        with pytest.warns(RuntimeWarning, match="rank 0 of 1 returned, but had to be ended"):
            assert call(linger, 1) == [0]

    def test_an_exit_code_that_the_caller_threw_away(self):
        # With SIGCHLD ignored the kernel keeps no exit codes; the results are there all the same.
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            assert call(lambda rank: rank) == [0, 1]
        finally:
            signal.signal(signal.SIGCHLD, before)

    def test_what_a_rank_started_is_ended(self, watched):
        def leave(rank):
            return subprocess.Popen(["sleep", "600"]).pid

        for pid in call(leave):
            watched.add_if_running(pid)
        assert watched.all_ended()
