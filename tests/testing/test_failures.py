"""Tests that fail, hang and crash on ranks: what pytest shows, and what comes after."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.testing.conftest import is_running
from tests.waiting import until

pytest_plugins = "pytester"

FAILURES = """
    import ctypes, os, pathlib, signal, subprocess, sys, threading, time
    import numpy as np
    import pytest

    @pytest.fixture(autouse=True)
    def pid(comm):
        folder = pathlib.Path("pids")
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()

    @pytest.mark.ranks(4)
    def test_everywhere(comm):
        mine = comm.rank * 10
        assert mine == 7

    @pytest.mark.ranks(4)
    def test_on_one(comm):
        special = [1, 2, 3]
        if comm.rank == 2:
            raise ValueError("something is odd")
        comm.barrier()

    @pytest.mark.ranks(2)
    def test_with_a_call_under_way(comm):
        if comm.rank == 0:
            comm.all_reduce(np.ones(3), async_op=True)
        assert comm.rank == 0
        comm.barrier()

    @pytest.mark.ranks(2)
    def test_two_ways(comm):
        assert comm.rank == 1
        pytest.fail("the other way")

    @pytest.mark.ranks(3)
    def test_mismatch(comm):
        comm.all_reduce(np.ones(4 if comm.rank == 1 else 3))

    @pytest.mark.ranks(2)
    def test_segfault(comm):
        print("last words")
        if comm.rank == 1:
            ctypes.string_at(0)
        comm.barrier()

    @pytest.mark.ranks(2)
    def test_exit(comm):
        if comm.rank == 0:
            os._exit(3)
        comm.barrier()

    @pytest.mark.ranks(2)
    def test_killed(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    @pytest.mark.ranks(2)
    def test_sys_exit(comm):
        sys.exit(4)

    @pytest.mark.ranks(2)
    def test_after_all_that(comm):
        assert comm.all_reduce(1) == 2
    """


def section(result, test):
    """Return the lines that pytest shows for a failed test."""
    lines = result.outlines
    first = next(i for i, line in enumerate(lines) if line.startswith("_") and f" {test} " in line)
    rest = lines[first + 1 :]
    return "\n".join(
        rest[: next(i for i, line in enumerate(rest) if line[:5] in ("_____", "====="))]
    )


@pytest.mark.soak
def test_failures(inner, pytester):
    result = inner(test_it=FAILURES)

    result.assert_outcomes(passed=1, failed=9)

    text = section(result, "test_everywhere")
    assert text.count("assert mine == 7") == 1
    assert text.startswith("ranks 0-3 of 4:")
    assert "E       assert 0 == 7" in text
    assert "on rank 3: AssertionError: assert 30 == 7; mine = 30" in text

    text = section(result, "test_on_one")
    assert text.startswith("rank 2 of 4:")
    assert len(re.findall(r"^E +ValueError: something is odd$", text, re.MULTILINE)) == 1
    assert text.count("rank 2 aborted it, because it raised ValueError: something is odd.") == 3
    assert "special    = [1, 2, 3]" in text
    assert [line[:27] for line in text.splitlines()[-3:]] == [
        f"rank {rank} of 4: AbortedError: " for rank in (0, 1, 3)
    ]

    text = section(result, "test_two_ways")
    assert "rank 0 of 2:" in text
    assert "rank 1 of 2:" in text
    assert "Failed: the other way" in text

    text = section(result, "test_mismatch")
    assert len(re.findall("^E +gpucoll.errors.MismatchError", text, re.MULTILINE)) == 1

    text = section(result, "test_segfault")
    assert "rank 1 of 2 was killed by SIGSEGV" in text
    assert "in test_segfault" in text
    assert "_pytest" not in text
    assert "rank 0 of 2: PeerLostError: " in text
    assert "last words" in text  # of the rank that crashed as well:
    assert "Captured stdout of ranks 0-1" in text

    assert "rank 0 of 2 ended with exit code 3" in section(result, "test_exit")
    assert "rank 0 of 2 was killed by SIGKILL" in section(result, "test_killed")
    assert "SystemExit: 4" in section(result, "test_sys_exit")
    result.stdout.fnmatch_lines(
        [
            "FAILED *::test_everywhere - ranks 0-3: assert 0 == 7*",
            "FAILED *::test_on_one - rank 2: ValueError: something is odd",
            "FAILED *::test_segfault - rank 1: * was killed by SIGSEGV",
        ]
    )
    # Each pool of four or two, and the one renewed after each crash: all have ended.
    pids = [int(name) for name in os.listdir(pytester.path / "pids")]
    assert len(pids) == 4 + 3 * 2
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.soak
def test_a_crash_and_a_hang(inner):
    result = inner(
        test_it="""
            import ctypes, time
            import pytest

            @pytest.mark.ranks(2)
            def test_crash(comm):
                if comm.rank == 1:
                    ctypes.string_at(0)
                comm.barrier()

            @pytest.mark.ranks(2)
            def test_ranks_have_started(comm): ...

            @pytest.mark.ranks(2, timeout_s=0.6)
            def test_hang(comm):
                while True:
                    time.sleep(0.01)
            """
    )

    result.assert_outcomes(passed=1, failed=2)
    text = section(result, "test_crash")
    assert "rank 1 of 2 was killed by SIGSEGV" in text
    assert "rank 0 of 2: PeerLostError: " in text
    text = section(result, "test_hang")
    assert text.startswith("ranks 0-1 of 2:\nnot done after 0.6 s")
    assert "in test_hang" in text


HANGS = """
    import os, pathlib, signal, subprocess, time
    import pytest

    def wait_for_ever():
        while True:
            time.sleep(0.01)

    @pytest.mark.ranks(3, timeout_s=4)
    def test_one_hangs(comm):
        if comm.rank == 1:
            with open("child", "w") as file:
                file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
            wait_for_ever()
        comm.barrier()

    @pytest.mark.ranks(2, timeout_s=20)
    def test_ranks_have_started(comm): ...

    @pytest.mark.ranks(2)
    def test_all_hang(comm):
        wait_for_ever()

    @pytest.mark.ranks(2)
    def test_stopped(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    @pytest.mark.ranks(2)
    def test_server_is_killed(comm):
        (pathlib.Path("orphans") / str(os.getpid())).touch()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        wait_for_ever()

    @pytest.mark.ranks(2)
    def test_passes(comm): ...
    """


@pytest.mark.soak
def test_hangs(inner, pytester):
    orphans = pytester.mkdir("orphans")
    start_s = time.monotonic()
    result = inner("-o", "gpucoll_timeout_s=0.7", test_it=HANGS)

    assert time.monotonic() - start_s < 40
    result.assert_outcomes(passed=2, failed=4)

    text = section(result, "test_one_hangs")
    assert "rank 1 of 3:\nnot done after 4 s; it stood at" in text
    assert "in wait_for_ever" in text
    assert "in test_one_hangs" in text
    assert "_pytest" not in text
    for rank in (0, 2):
        assert f"rank {rank} of 3: DeadlineError: " in text
    assert "rank 1 had not arrived" in text
    assert "3 ranks of " in text  # what `gpucoll why` found before they were killed

    text = section(result, "test_all_hang")
    assert text.startswith("ranks 0-1 of 2:\nnot done after 0.7 s")
    assert text.count("in wait_for_ever") == 1

    assert "the process is stopped (SIGSTOP)" in section(result, "test_stopped")
    assert not is_running(int((pytester.path / "child").read_text()))

    assert "the rank server has ended" in section(result, "test_server_is_killed")
    pids = [int(path.name) for path in orphans.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.soak
def test_a_file_that_is_another_one_in_a_rank(inner):
    result = inner(
        test_it="""
            import os
            import pytest

            if "GPUCOLL_CPU_ONLY" in os.environ:
                names = ["in a rank"]
            else:
                names = ["here"]

            @pytest.mark.ranks(2)
            @pytest.mark.parametrize("name", names)
            def test_it(name): ...
            """,
        test_other="""
            import os
            import pytest

            assert "GPUCOLL_CPU_ONLY" not in os.environ, "not in ranks"

            @pytest.mark.ranks(2)
            def test_it(): ...
            """,
    )

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*the tests of a file must be the same in every process*"])
    result.stdout.fnmatch_lines(["*AssertionError: not in ranks*"])


# --- nothing is left behind -----------------------------------------------------------------------

WAITING = """
    import os, pathlib, threading
    import pytest

    @pytest.mark.ranks(2)
    def test_it(comm):
        pathlib.Path(f"pid-{os.getpid()}-{os.getppid()}").touch()
        threading.Event().wait()
    """


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda item: item.name)
def test_ranks_end_with_pytest(inner, pytester, number):
    inner("--collect-only", test_it=WAITING)
    command = [sys.executable, "-m", "pytest", "-p", "gpucoll.testing.plugin"]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: len(list(pytester.path.glob("pid-*"))) == 2, 60)
            process.send_signal(number)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    names = [path.name for path in pytester.path.glob("pid-*")]
    pids = {int(pid) for name in names for pid in name.split("-")[1:]}

    assert len(pids) == 3  # two ranks and their server
    until(lambda: not [pid for pid in pids if is_running(pid)], 20)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in output
        assert process.returncode == pytest.ExitCode.INTERRUPTED
