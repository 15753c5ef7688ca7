"""gpucoll.launch: results, output, arguments.

Most of it uses a stand-in for the communicator, which starts faster; the last class uses the real
one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import gpucoll
from gpucoll.errors import ArgumentError, ArgumentTypeError, LaunchError
from gpucoll.launcher import function as function_module


def call(function, ranks=2, args=(), kwargs=None, timeout_s=60.0, join=None):
    """Call `gpucoll.launch` with a stand-in for the communicator: the rank's number."""
    stand_in = join or (lambda: contextlib.nullcontext(int(os.environ["GPUCOLL_RANK"])))
    return function_module.run(function, ranks, args, kwargs or {}, timeout_s, "auto", stand_in)


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
            ({"ranks": True}, ArgumentTypeError),
            ({"kwargs": 3}, ArgumentTypeError),
            ({"timeout_s": "5"}, ArgumentTypeError),
            ({"args": "ab"}, ArgumentTypeError),
            ({"args": 3}, ArgumentTypeError),
            ({"timeout_s": 0}, ArgumentError),
            ({"timeout_s": -1.0}, ArgumentError),
            ({"timeout_s": float("nan")}, ArgumentError),
            ({"bind": "cores"}, ArgumentError),
            ({"function": lambda comm, x: x, "args": (threading.Lock(),)}, ArgumentTypeError),
        ],
    )
    def test_that_cannot_serve(self, arguments, kind):
        with pytest.raises(kind, match=r"gpucoll\.launch: "):
            gpucoll.launch(**{"function": lambda comm: None, **arguments})

    @pytest.mark.soak(quick=2)
    @pytest.mark.parametrize("timeout_s", [float("inf"), 1e30, 10**400])
    def test_a_deadline_that_never_comes(self, timeout_s):
        assert call(lambda rank: rank, timeout_s=timeout_s) == [0, 1]

    def test_more_ranks_than_one_host_has(self):
        with pytest.raises(ArgumentError, match="100000 ranks: one host supports at most 256"):
            gpucoll.launch(print, ranks=100000)

    def test_a_number_of_ranks_of_numpy(self):
        assert gpucoll.launch(lambda comm: comm.world_size, np.int64(1)) == [1]  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", ["soon", "-1", "nan"])
    def test_a_wrong_grace_time_in_the_environment(self, monkeypatch, text):
        monkeypatch.setenv("GPUCOLL_GRACE_S", text)
        with pytest.raises(ArgumentError, match=f"GPUCOLL_GRACE_S .*{text}"):
            call(lambda rank: rank)


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
