"""Tracebacks of ranks that fail at once, and what stands last when a job has failed."""

from __future__ import annotations

import sys

from gpucoll.launcher.output import OutputRelay
from gpucoll.launcher.whole_tracebacks import TracebackHold

FIRST = b"Traceback (most recent call last):"
SOURCE = b'  File "train.py", line 1, in <module>'
STDERR = 2


class TestTracebackHold:
    def test_a_traceback_comes_whole(self):
        hold = TracebackHold()
        assert hold.feed([b"before", FIRST]) == [b"before"]
        assert hold.feed([SOURCE]) == []
        assert hold.feed([b"ValueError: no", b"after"]) == [
            FIRST,
            SOURCE,
            b"ValueError: no",
            b"after",
        ]
        assert hold.is_empty
        assert hold.error == b"ValueError: no"

    def test_the_last_error_is_the_one(self):
        hold = TracebackHold()
        lines = [FIRST, SOURCE, b"KeyError: 1", b"", b"During ...:", b"", FIRST, SOURCE, b"E: 2"]
        assert hold.feed(lines) == lines
        assert hold.error == b"E: 2"

    def test_one_that_does_not_end(self):
        hold = TracebackHold()
        assert hold.feed([FIRST, FIRST, SOURCE]) == [FIRST]
        assert hold.release() == [FIRST, SOURCE]
        assert hold.release() == []
        assert hold.error == b""


def test_tracebacks_of_several_ranks_are_not_mixed(capfd):
    relay = OutputRelay(2, prefix=True)
    for line in (FIRST, SOURCE, b"ValueError: no"):
        for rank in range(2):
            relay.feed(rank, STDERR, line + b"\n")
    err = capfd.readouterr().err
    assert [line[:4] for line in err.splitlines()] == ["[0] "] * 3 + ["[1] "] * 3


def test_the_end_of_the_stream_ends_a_traceback(capfd):
    relay = OutputRelay(1, prefix=False)
    relay.feed(0, STDERR, FIRST + b"\n" + SOURCE)
    relay.feed(0, STDERR, b"")
    assert capfd.readouterr().err.encode() == FIRST + b"\n" + SOURCE + b"\n"


def test_what_only_looks_like_one_is_shown_at_once(start_run, script):
    program = script(
        "print('Traceback (most recent call last):', file=sys.stderr, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    running = start_run("-n", "1", program, stdin=-1)
    running.wait_for("[0] Traceback", stream=2)
    assert running.finish()[0] == 0


class TestLastLine:
    def run_until_cause(self, start_run, script, end, tmp_path):
        """Have rank 1 fail, and then the others; return the exit code and the last line."""
        flag = tmp_path / "flag"
        program = script(
            f"if rank == 1: {end}\n"
            f"while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
            "raise RuntimeError('lost rank 1')\n"
        )
        running = start_run("-n", "3", program)
        running.wait_for("the others have 5 s", stream=2)
        flag.touch()
        code, _, err = running.finish()
        assert "gpucoll-run: ranks 0, 2 ended with exit code 1\n" in err
        return code, err.splitlines()[-1]

    def test_names_a_signal(self, start_run, script, tmp_path):
        end = "os.kill(os.getpid(), signal.SIGKILL)"
        code, line = self.run_until_cause(start_run, script, end, tmp_path)
        assert code == 137
        assert line.startswith("gpucoll-run: the cause: rank 1 of 3 was killed by SIGKILL")

    def test_names_an_error(self, start_run, script, tmp_path):
        end = "raise ValueError('the reason')"
        code, line = self.run_until_cause(start_run, script, end, tmp_path)
        assert code == 1
        said = "rank 1 of 3 ended with exit code 1: ValueError: the reason"
        assert line == f"gpucoll-run: the cause: {said}"

    def test_is_said_once(self, run):
        code, _, err = run("-n", "1", sys.executable, "-c", "raise SystemExit(3)")
        assert code == 3
        assert err == "gpucoll-run: rank 0 of 1 ended with exit code 3\n"
