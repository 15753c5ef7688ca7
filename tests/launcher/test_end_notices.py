"""A rank that has ended before all have met: the launcher tells those that wait for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import gpucoll
from gpucoll.errors import LaunchError
from gpucoll.launcher import end_notices
from gpucoll.launcher.end_notices import EndNotices
from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.rank_process import RankEnd
from gpucoll.rendezvous.ended_ranks import LauncherWatch
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.notices import notices_address

WAIT_S = 20.0


class TestRanksThatNeverJoin:
    """With the real `gpucoll.init`, whose deadline is far away."""

    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_one_that_ends_with_0(self, run, script, gone):
        program = script(
            f"if rank == {gone}: sys.exit(0)\n"
            "import gpucoll\n"
            "start = time.monotonic()\n"
            "try: gpucoll.init(timeout_s=100)\n"
            "finally: print('soon' if time.monotonic() - start < 15 else 'late')\n"
        )
        code, out, err = run("-n", 3, program)

        assert code == 1
        assert sorted(out.split()) == sorted(
            word for rank in range(3) if rank != gone for word in (f"[{rank}]", "soon")
        )
        lost = f"lost rank {gone} in init: it ended with exit code 0 without having come"
        *ranks, last = [line for line in err.splitlines() if lost in line]
        assert sorted(line[:3] for line in ranks) == [f"[{n}]" for n in range(3) if n != gone]
        assert last == err.splitlines()[-1]
        assert f"because another rank was lost: rank {gone} had ended with exit code 0" in err

    def test_one_that_is_killed_before(self, run, script):
        program = script(
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
            "import gpucoll\n"
            "gpucoll.init(timeout_s=100)\n"
        )
        code, _, err = run("-n", 2, program, "--grace", 15)

        assert code == 128 + signal.SIGKILL
        assert "rank 0 of 2 lost rank 1 in init: it was killed by SIGKILL" in err

    def test_one_that_ends_after_the_others_have_met_disturbs_nobody(self, run, script):
        program = script(
            "import gpucoll\n"
            "with gpucoll.init(timeout_s=30) as comm:\n"
            "    total = comm.all_reduce(1)\n"
            "print(total)\n"
        )
        code, out, err = run("-n", 4, program)

        assert (code, err) == (0, "")
        assert sorted(out.split()) == sorted(["[0]", "[1]", "[2]", "[3]", *["4"] * 4])

    def test_the_next_init_does_not_wait_for_one_that_has_ended(self, run, script):
        program = script(
            "import gpucoll\n"
            "gpucoll.init(timeout_s=30).close()\n"
            "if rank == 0: sys.exit(0)\n"
            "try: gpucoll.init(timeout_s=100)\n"
            "except gpucoll.PeerLostError as error: print(error)\n"
        )
        code, out, _ = run("-n", 3, program)

        assert code == 0
        assert out.count("lost rank 0 in init: it ended with exit code 0") == 2

    def test_in_launch(self):
        def leave(comm):
            if comm.rank == 1:
                os._exit(0)
            with gpucoll.init(timeout_s=100):
                pass

        start = time.monotonic()
        with pytest.raises(
            LaunchError, match="rank 1 of 2 ended with exit code 0 before"
        ) as caught:
            gpucoll.launch(leave, 2)
        assert time.monotonic() - start < 60
        assert "rank 0: PeerLostError" in str(caught.value)


@pytest.fixture
def serving():
    """A loop, the notices that it serves, and a watch of this process."""
    loop = EventLoop()
    token = f"token {os.getpid()}"
    notices = EndNotices(loop, token, 3)
    watch = LauncherWatch(Job(0, 3, f"{token}#0", "test"), token)
    yield loop, notices, watch
    watch.close()
    notices.close()
    loop.close()


def end(rank, **how):
    return RankEnd(rank, 3, **how)


class TestNotices:
    def test_of_before_and_of_after(self, serving):
        loop, notices, watch = serving
        notices.add(end(1, exit_code=0))
        assert watch.check({1, 2}) is None  # asks
        loop.run_once()
        assert watch.check({2}) is None
        assert watch.check({1, 2}) == (1, "it ended with exit code 0 without having come")
        notices.add(end(2, signal_number=9))
        rank, how = watch.check({2})
        assert rank == 2
        assert "was killed by SIGKILL" in how
        watch.close()
        loop.run_once()
        assert not notices._asking

    def test_one_process_has_one_connection(self, serving):
        loop, notices, _ = serving
        ends = []
        for _ in range(50):
            ends.append(socket.socket(socket.AF_UNIX))
            ends[-1].connect(notices_address(f"token {os.getpid()}"))
        loop.run_once()
        assert len(notices._asking) == 1
        for other in ends:
            other.close()

    def test_others_than_the_latest_make_room(self, serving, monkeypatch):
        loop, notices, _ = serving
        numbers = iter(range(1, 1000))
        monkeypatch.setattr(end_notices, "peer_process", lambda end: next(numbers))
        ends = []
        for _ in range(60):
            ends.append(socket.socket(socket.AF_UNIX))
            ends[-1].connect(notices_address(f"token {os.getpid()}"))
        loop.run_once()
        assert len(notices._asking) == notices._most
        notices.add(end(1, exit_code=0))
        assert ends[-1].recv(100) == b'[1, "ended with exit code 0"]\n'
        for other in ends:
            other.close()

    def test_nobody_listens(self):
        watch = LauncherWatch(Job(0, 3, "nobody#0", "test"), f"nobody {os.getpid()}")
        assert watch.check({1, 2}) is None
        watch.close()

    def test_rubbish_is_skipped(self):
        token = f"rubbish {os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(notices_address(token))
            listener.listen()
            watch = LauncherWatch(Job(0, 3, "rubbish#0", "test"), token)
            watch.check({1})
            with listener.accept()[0] as other:
                other.sendall(
                    b'{}\n[1]\n5\nxx\n["1", "x"]\n' + b"[" * 10_000 + b'\n[2, "left"]\n[1'
                )
            assert watch.check({1, 2}) == (2, "it left without having come")
            watch.close()


def test_gpucoll_run_imports_next_to_nothing_more():
    """The launcher tells ranks without loading what only ranks need."""
    program = (
        "import sys, gpucoll.launcher.end_notices\n"
        "print(sorted({'numpy', 'numba'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n"
