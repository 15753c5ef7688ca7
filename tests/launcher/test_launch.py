"""gpucoll.launch: results, failures, output, and nothing left over however it ends.

Most of it uses a stand-in for the communicator, which starts faster; the last class uses the real
one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest

import gpucoll
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    LaunchError,
    PeerLostError,
)
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


class TestResults:
    def test_come_in_rank_order(self):
        assert call(lambda rank, *a, **k: (rank, a, k), 3, (1, "x"), {"key": 2.5}) == [
            (rank, (1, "x"), {"key": 2.5}) for rank in range(3)
        ]

    def test_of_a_closure(self):
        factor = 7
        assert call(lambda rank: rank * factor) == [0, 7]

    def test_may_be_large_as_may_arguments(self):
        array = np.arange(2_000_000, dtype=np.float64)
        results = call(lambda rank, x: x + rank, args=(array,))
        assert all(np.array_equal(result, array + rank) for rank, result in enumerate(results))

    def test_are_taken_before_the_communicator_closes(self):
        class Join:
            def __enter__(self):
                self.values = [1, 2]
                return self

            def __exit__(self, *_):
                self.values.clear()

        assert call(lambda comm: comm.values, join=Join) == [[1, 2], [1, 2]]

    def test_one_rank(self):
        assert call(lambda rank: rank, 1) == [0]

    def test_from_another_thread(self):
        results = []
        thread = threading.Thread(target=lambda: results.append(call(lambda rank: rank)))
        thread.start()
        thread.join()
        assert results == [[0, 1]]

    def test_the_callers_surroundings(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path, "/only/here"])
        monkeypatch.setattr(sys, "argv", ["program", "--option"])
        monkeypatch.setenv("ONLY_HERE", "yes")
        look = lambda rank: (os.getcwd(), sys.path, sys.argv, os.environ["ONLY_HERE"])  # noqa: E731
        assert call(look, 1) == [(str(tmp_path), sys.path, ["program", "--option"], "yes")]

    def test_a_module_that_only_the_caller_can_reach(self, tmp_path, monkeypatch):
        (tmp_path / "far_away.py").write_text(
            "def double(x): return 2 * x\ndef function(rank): return double(rank)\n"
        )
        spec = importlib.util.spec_from_file_location("far_away", tmp_path / "far_away.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "far_away", module)
        spec.loader.exec_module(module)
        assert call(module.function) == [0, 2]

    def test_ranks_are_fresh_processes(self):
        marker = "test_launch_was_here"
        sys.modules[marker] = sys
        try:
            assert (
                call(lambda rank: (os.getppid(), marker in sys.modules))
                == [(os.getpid(), False)] * 2
            )
        finally:
            del sys.modules[marker]

    def test_standard_input_is_empty(self):
        assert call(lambda rank: sys.stdin.read()) == ["", ""]


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
            LaunchError, match="rank 0 of 1 returned something that cannot be unpickled"
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


class TestOutput:
    def test_goes_to_the_callers_streams_in_whole_lines(self):
        class Stream:
            def __init__(self):
                self.written = []

            def write(self, text):
                self.written.append(text)

            def flush(self):
                pass

        def talk(rank):
            for _ in range(100):
                for piece in (b"from ", b"%d" % rank, b"\n"):
                    os.write(1, piece)
            print("bad", rank, file=sys.stderr, end="")

        out, err = Stream(), Stream()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            call(talk)
        assert all(text.endswith("\n") for text in out.written)
        lines = "".join(out.written).splitlines()
        assert sorted(lines) == ["from 0"] * 100 + ["from 1"] * 100
        assert sorted(err.written) == ["bad 0\n", "bad 1\n"]

    def test_a_stream_that_fails_ends_the_ranks(self):
        closed = io.StringIO()
        closed.close()

        def talk(rank):
            print("x")
            signal.pause()

        with pytest.raises(ValueError, match="closed"), contextlib.redirect_stdout(closed):
            call(talk)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "kind"),
        [
            ({"function": "print"}, ArgumentTypeError),
            ({"ranks": 0}, ArgumentError),
            ({"ranks": -1}, ArgumentError),
            ({"ranks": 2.0}, ArgumentTypeError),
            ({"ranks": "2"}, ArgumentTypeError),
            ({"args": "ab"}, ArgumentTypeError),
            ({"args": 3}, ArgumentTypeError),
            ({"timeout_s": 0}, ArgumentError),
            ({"timeout_s": -1.0}, ArgumentError),
            ({"timeout_s": float("nan")}, ArgumentError),
            ({"bind": "cores"}, ArgumentError),
            ({"args": (threading.Lock(),)}, ArgumentTypeError),
        ],
    )
    def test_that_cannot_serve(self, arguments, kind):
        with pytest.raises(kind, match=r"gpucoll\.launch: "):
            gpucoll.launch(**{"function": lambda comm: None, **arguments})


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


class TestWithACommunicator:
    def test_ranks_reduce_together(self):
        def function(comm, x, scale):
            return comm.all_reduce(scale * (x + comm.rank)), comm.world_size

        for total, size in gpucoll.launch(
            function, 2, (np.arange(4.0),), {"scale": 2.0}, timeout_s=120
        ):
            assert np.array_equal(total, 2.0 * (2 * np.arange(4.0) + 1))
            assert size == 2

    def test_a_failing_rank_is_named_although_its_peer_lost_it(self):
        def function(comm):
            comm.barrier()
            if comm.rank == 1:
                raise ValueError("the cause")
            comm.all_reduce(np.ones(3))

        with pytest.raises(ValueError, match="the cause") as caught:
            gpucoll.launch(function, 2, timeout_s=120)
        assert "rank 0: PeerLostError" in str(caught.value.__cause__)

    def test_a_killed_rank_is_named(self):
        def function(comm):
            comm.barrier()
            if comm.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(np.ones(3))

        with pytest.raises(LaunchError, match="rank 0 of 2 was killed by SIGKILL") as caught:
            gpucoll.launch(function, 2, timeout_s=120)
        assert "rank 1: PeerLostError" in str(caught.value)

    def test_gpucoll_run(self, start, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            "import numpy, gpucoll\n"
            "with gpucoll.init() as comm:\n"
            "    print(comm.all_reduce(numpy.full(2, comm.rank + 1.0)).tolist())\n"
        )
        command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", 2, program]
        environment = {**os.environ, "PYTHONPATH": str(Path(gpucoll.__file__).parent.parent)}
        code, out, err = start(command, env=environment).finish()
        assert (code, sorted(out.splitlines())) == (0, ["[0] [3.0, 3.0]", "[1] [3.0, 3.0]"]), err
