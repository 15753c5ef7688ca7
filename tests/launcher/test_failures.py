"""A rank that fails ends the job: who is named, with which code, and what happens to the others."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from gpucoll.launcher.arguments import Options
from gpucoll.launcher.cli import Run


class TestExitCode:
    def test_all_well(self, run):
        assert run("-n", 3, "true") == (0, "", "")

    def test_of_the_rank_that_failed(self, run, script):
        code, _, err = run("-n", 3, script("sys.exit(7 if rank == 2 else 0)"))
        assert code == 7
        assert "gpucoll-run: rank 2 of 3 ended with exit code 7" in err

    @pytest.mark.soak(quick=2)
    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
    def test_of_a_signal(self, run, script, number):
        program = script(f"if rank == 1: os.kill(os.getpid(), {int(number)})")
        code, _, err = run("-n", 2, program)
        assert code == 128 + number
        assert f"gpucoll-run: rank 1 of 2 was killed by {number.name}" in err

    def test_of_a_module(self, run):
        code, _, err = run("-n", 2, "-m", "no_such_module_anywhere")
        assert code == 1
        assert "[0]" in err
        assert "[1]" in err
        assert "No module named no_such_module_anywhere" in err

    def test_of_a_program_that_cannot_be_run(self, run, tmp_path):
        program = tmp_path / "broken"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        code, _, err = run("-n", 1, program)
        assert code == 127
        assert f"[0] gpucoll: cannot run {program}: No such file or directory" in err


class TestOtherRanks:
    def test_end_by_themselves_within_the_grace_time(self, start_run, script, tmp_path):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        program = script(
            "if rank == 0: sys.exit(3)\n"
            f"open({str(fifo)!r}).readline()\n"
            "print('rank 0 is gone', file=sys.stderr)\n"
            "sys.exit(4)\n"
        )
        running = start_run("-n", 2, "--grace", 600, program)
        running.wait_for("gpucoll-run: rank 0 of 2 ended with exit code 3", stream=2)
        tell = os.open(fifo, os.O_RDWR)  # not for writing alone, which waits for the reader
        try:
            os.write(tell, b"go on\n")
            code, _, err = running.finish()
        finally:
            os.close(tell)
        assert code == 3
        assert "[1] rank 0 is gone" in err
        assert "gpucoll-run: rank 1 ended with exit code 4" in err

    def test_are_killed_if_they_do_not_listen(self, run, script, tmp_path):
        os.mkfifo(tmp_path / "ready")
        program = script(
            f"ready = {str(tmp_path / 'ready')!r}\n"
            "if rank == 1:\n"
            "    open(ready).read()\n"
            "    sys.exit(3)\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "open(ready, 'w').close()\n"
            "while True: signal.pause()\n"
        )
        code, _, err = run("-n", 2, "--grace", 0.2, program)
        assert code == 3
        assert "gpucoll-run: rank 0 had to be ended, and was killed by SIGKILL\n" in err

    def test_the_cause_goes_before_what_follows_from_it(self, run, script, tmp_path):
        # Rank 0 sees that rank 1 is lost and is gone before rank 1 is.
        os.mkfifo(tmp_path / "fifo")
        program = script(
            f"fifo = {str(tmp_path / 'fifo')!r}\n"
            "if rank == 0:\n"
            "    held = open(fifo, 'w')\n"
            "    print('gpucoll.errors.PeerLostError: rank 1 of 2 has ended', file=sys.stderr)\n"
            "    sys.exit(1)\n"
            "open(fifo).read()\n"
            "sys.exit(5)\n"
        )
        code, _, err = run("-n", 2, program)
        assert code == 5
        assert "rank 1 of 2 ended with exit code 5" in err


class TestTimeout:
    def test_names_the_late(self, capfd):
        class RunThatIsLate(Run):
            """Its time is over at the moment when rank 1 has ended."""

            def ended(self, end):
                super().ended(end)
                if end.rank == 1:
                    self.time_out()

        command = ["sh", "-c", "[ $GPUCOLL_RANK = 1 ] || exec sleep 600"]
        options = Options(3, "none", prefix=True, timeout_s=90.0, grace_s=20.0, command=command)
        assert RunThatIsLate(options).execute() == 124
        err = capfd.readouterr().err
        assert "gpucoll-run: ranks 0, 2 had not ended after 90 s (--timeout)" in err
        assert "gpucoll-run: ranks 0, 2 had to be ended, and were killed by SIGTERM" in err

    @pytest.mark.soak
    def test_counts_even_if_the_ranks_then_end_well(self, run, script):
        program = script(
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
            "signal.sigwait({signal.SIGTERM})\n"
        )
        assert run("-n", 1, "--timeout", 1, program)[0] == 124

    def test_that_is_not_reached(self, run):
        assert run("-n", 2, "--timeout", 60, "true") == (0, "", "")


class TestLeftovers:
    @pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
    def test_what_a_rank_started_ends_with_it(self, run, watched, trap):
        code, out, _ = run("-n", 2, "sh", "-c", f"{trap}sleep 600 & echo $!; exec true")
        assert code == 0
        for line in out.splitlines():
            watched.add_if_running(line.partition("] ")[2])
        assert watched.all_ended()

    def test_also_if_it_does_not_hold_the_output(self, run, watched):
        command = "sleep 600 >/dev/null 2>&1 & echo $!"
        code, out, _ = run("-n", 1, "sh", "-c", command)
        assert code == 0
        watched.add_if_running(out.partition("] ")[2])
        assert watched.all_ended()

    def test_its_last_words_are_heard(self, run, script):
        program = script(
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
            "if os.fork() == 0:\n"
            "    signal.sigwait({signal.SIGTERM})\n"
            "    print('last words')\n"
        )
        assert run("-n", 1, program) == (0, "[0] last words\n", "")

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
    def test_the_ranks_die_with_the_launcher(self, start_run, script, watched, number):
        program = script(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('pid', os.getpid(), 'end')\n"
            "while True: signal.pause()\n"
        )
        running = start_run("-n", 2, program)
        for _ in range(2):
            watched.add(running.wait_for(" end").split()[2])
        running.send(number)
        assert watched.all_ended()
        assert running.process.wait(20) == -number


def test_too_many_ranks_for_the_limits(start):
    code = (
        "import resource, sys; from gpucoll.launcher import cli\n"
        "cli.compile_kernels = lambda report: None\n"
        "cli.obstacle_to = lambda ranks, descriptors: ''  # as if others had them open\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "sys.exit(cli.main())"
    )
    exit_code, _, err = start([sys.executable, "-c", code, "-n", 50, "sleep", 600]).finish()
    assert exit_code == 1
    assert err.endswith(
        "of 50 could not be started: Too many open files "
        "(raise the limit of open files with ulimit -n)\n"
    )


def test_limits_are_seen_before_any_rank_is_started(start):
    code = (
        "import resource, sys; from gpucoll.launcher import cli\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "sys.exit(cli.main())"
    )
    exit_code, _, err = start([sys.executable, "-c", code, "-n", 50, "sleep", 600]).finish()
    assert exit_code == 2
    assert "50 ranks need 182 file descriptors in their launcher, but the limit is 100" in err
