"""What ranks are started with: environment, CPUs, kernels; and the set of ranks on its own."""

from __future__ import annotations

import errno
import os
import re
import resource
import select
import signal
import sys
import types

import pytest

from gpucoll.errors import LaunchError
from gpucoll.launcher import job
from gpucoll.launcher.rank_process import RankCommand, RankEnd
from gpucoll.launcher.rank_set import RankSet
from gpucoll.topology import cpu_sets, usable_cpus


class TestEnvironment:
    def test_tells_a_rank_who_it_is(self, run, script):
        program = script("print(*(f'{k}={v}' for k, v in os.environ.items() if 'GPUCOLL' in k))")
        _, out, _ = run("-n", 2, "--no-prefix", program)
        first, second = (
            dict(word.split("=", 1) for word in line.split()) for line in sorted(out.splitlines())
        )
        ranks = {first["GPUCOLL_RANK"], second["GPUCOLL_RANK"]}
        assert ranks == {"0", "1"}
        for environment in (first, second):
            assert environment["GPUCOLL_LOCAL_RANK"] == environment["GPUCOLL_RANK"]
            assert environment["GPUCOLL_WORLD_SIZE"] == "2"
            assert environment["GPUCOLL_LOCAL_WORLD_SIZE"] == "2"
        assert first["GPUCOLL_JOB"] == second["GPUCOLL_JOB"]
        assert len(first["GPUCOLL_JOB"]) >= 32

    def test_every_job_has_a_token_of_its_own(self):
        one, two = (job.rank_environments(1, "auto")[0]["GPUCOLL_JOB"] for _ in range(2))
        assert one != two

    def test_output_is_not_held_back_unless_asked_for(self, monkeypatch):
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        assert job.rank_environments(1, "auto")[0]["PYTHONUNBUFFERED"] == "1"
        monkeypatch.setenv("PYTHONUNBUFFERED", "")
        assert job.rank_environments(1, "auto")[0]["PYTHONUNBUFFERED"] == ""

    def test_thread_counts_are_left_alone(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert "OMP_NUM_THREADS" not in job.rank_environments(4, "auto")[0]


class TestLimits:
    def test_more_ranks_than_one_host_has(self, run):
        code, out, err = run("-n", 2000, "true")
        assert (code, out) == (2, "")
        assert err == "gpucoll-run: 2000 ranks: one host supports at most 256\n"

    @pytest.mark.parametrize(
        ("ranks", "limits", "text"),
        [
            (256, {}, ""),
            (257, {}, "257 ranks: one host supports at most 256"),
            (50, {resource.RLIMIT_NOFILE: 100}, "need 182 file descriptors .* limit is 100: raise"),
            (50, {resource.RLIMIT_NPROC: 49}, "50 ranks: the limit is 49 processes"),
            (50, {resource.RLIMIT_NPROC: 50}, ""),
        ],
    )
    def test_of_this_process(self, monkeypatch, ranks, limits, text):
        monkeypatch.setattr(
            resource, "getrlimit", lambda number: (limits.get(number, resource.RLIM_INFINITY), 0)
        )
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert re.search(text, job.obstacle_to(ranks, 3))
        assert bool(job.obstacle_to(ranks, 3)) is bool(text)


class TestBinding:
    SHOW = "print(*sorted(os.sched_getaffinity(0)), 'bind', os.environ['GPUCOLL_BIND'])"

    def shown(self, out):
        lines = [line.partition(" bind ") for line in sorted(out.splitlines())]
        return [{int(cpu) for cpu in cpus.split()[1:]} for cpus, _, _ in lines], {
            m for _, _, m in lines
        }

    def test_ranks_get_sets_of_their_own(self, run, script):
        _, out, _ = run("-n", 2, script(self.SHOW))
        everything = usable_cpus()
        expected = cpu_sets(2, everything) or [everything] * 2
        assert self.shown(out) == (expected, {"auto"})

    def test_more_ranks_than_cpus_are_not_bound(self, run, script):
        count = len(usable_cpus()) + 1
        if count > 9:
            count = 9  # sorting by prefix needs one digit
        _, out, _ = run(
            "-n",
            count,
            script(self.SHOW),
            preexec_fn=lambda: os.sched_setaffinity(0, {min(usable_cpus())}),
        )
        assert self.shown(out) == ([{min(usable_cpus())}] * count, {"auto"})

    def test_none(self, run, script):
        _, out, _ = run("-n", 2, "--bind", "none", script(self.SHOW))
        assert self.shown(out) == ([usable_cpus()] * 2, {"none"})

    def test_cpus_that_cannot_be_had(self, run):
        with RankSet(lambda *_: None, lambda _: None, 1.0) as ranks:
            output = []
            ranks._on_output = lambda rank, stream, data: output.append(data)
            ranks.start([RankCommand(["echo", "ran"], os.environ, cpus=frozenset({1 << 14}))])
            ranks.run()
        text = b"".join(output).decode()
        assert "ran\n" in text
        assert "cannot bind a rank to CPUs 16384" in text


class TestCompileKernels:
    @pytest.fixture
    def precompile(self, monkeypatch):
        module = types.ModuleType("gpucoll.backends.precompile")
        for name in ("gpucoll.backends", "gpucoll.backends.cpu"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    def test_passes_on_what_is_said(self, precompile):
        precompile.ensure_compiled = lambda report: report("compiling")
        lines: list[str] = []
        job.compile_kernels(lines.append)
        assert lines == ["compiling"]

    def test_a_failure_is_said_and_not_raised(self, precompile):
        def ensure_compiled(report):
            raise OSError("disk full")

        precompile.ensure_compiled = ensure_compiled
        lines: list[str] = []
        job.compile_kernels(lines.append)
        assert lines == ["gpucoll: could not compile the kernels beforehand (OSError: disk full)"]

    def test_comes_before_the_ranks(self, start):
        code = (
            "import sys; from gpucoll.launcher import cli\n"
            "cli.compile_kernels = lambda report: report('compiling')\n"
            "sys.exit(cli.main())"
        )
        command = [sys.executable, "-c", code, "-n", 1, "sh", "-c", "echo started >&2"]
        assert start(command).finish() == (0, "", "compiling\n[0] started\n")

    def test_can_be_interrupted(self, start):
        code = (
            "import signal, sys; from gpucoll.launcher import cli\n"
            "def compile_kernels(report): report('compiling'); signal.pause()\n"
            "cli.compile_kernels = compile_kernels\n"
            "sys.exit(cli.main())"
        )
        running = start([sys.executable, "-c", code, "-n", 1, "true"])
        running.wait_for("compiling\n", 2)
        running.send(signal.SIGINT)
        assert running.finish() == (130, "", "compiling\n")


def shell(*texts):
    return [RankCommand(["sh", "-c", text], os.environ) for text in texts]


class TestRankSet:
    def test_ends_that_are_seen_together_come_signals_first(self):
        ends: list[RankEnd] = []
        with RankSet(lambda *_: None, ends.append, 1.0) as ranks:
            ranks.start(shell("exit 1", "kill -SEGV $$", "exit 2"))
            for process in ranks._running.values():
                assert select.select([process.exit_watch.descriptor], [], [], 20)[0]
            ranks.run()
        assert [(end.rank, end.exit_code, end.signal_number) for end in ends] == [
            (1, None, signal.SIGSEGV),
            (0, 1, None),
            (2, 2, None),
        ]

    def test_output_comes_before_the_end(self):
        events: list[object] = []
        with RankSet(lambda *output: events.append(output), events.append, 1.0) as ranks:
            ranks.start(shell("echo last words"))
            ranks.run()
        assert events.index((0, 1, b"last words\n")) < events.index(RankEnd(0, 1, exit_code=0))

    def test_ranks_are_asked_to_end_after_the_grace_time(self):
        program = (
            "import signal\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
            "print('ready', flush=True)\n"
            "signal.sigwait({signal.SIGTERM})\n"
            "print('asked to end', flush=True)\n"
        )
        output = b""
        ends: list[RankEnd] = []

        def on_output(rank, stream, data):
            nonlocal output
            output += data
            if output == b"ready\n":  # which may come in pieces
                ranks.end_soon()
                ranks.grace_s = 600.0  # before the next step, which is not to come

        with RankSet(on_output, ends.append, grace_s=0.1) as ranks:
            ranks.start([RankCommand([sys.executable, "-c", program], os.environ)])
            ranks.run()
        assert output == b"ready\nasked to end\n"
        assert ends == [RankEnd(0, 1, exit_code=0, by_launcher=True)]

    def test_stopped_ranks_are_killed(self):
        ends: list[RankEnd] = []
        with RankSet(lambda *_: None, ends.append, grace_s=0.1) as ranks:
            ranks.start(shell("kill -STOP $$"))
            os.waitid(os.P_PID, ranks._running[0].pid, os.WSTOPPED)
            ranks.end_soon()
            ranks.run()
        assert ends == [RankEnd(0, 1, signal_number=signal.SIGKILL, by_launcher=True)]

    def test_leaving_it_ends_what_runs(self, watched):
        with RankSet(lambda *_: None, lambda _: None, 1.0) as ranks:
            ranks.start(shell("sleep 600", "sleep 600"))
            for process in ranks._running.values():
                watched.add(process.pid)
        assert watched.all_ended()

    def test_an_error_in_a_callback_ends_what_runs(self, watched):
        def fail(*_):
            raise ValueError("callback")

        def run_ranks():
            with RankSet(fail, lambda _: None, 1.0) as ranks:
                ranks.start(shell("echo x; sleep 600", "sleep 600"))
                for process in ranks._running.values():
                    watched.add(process.pid)
                ranks.run()

        with pytest.raises(ValueError, match="callback"):
            run_ranks()
        assert watched.all_ended()

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
    def test_without_pidfd(self, monkeypatch, number):
        def pidfd_open(pid, flags=0):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        ends: list[RankEnd] = []
        with RankSet(lambda *_: None, ends.append, 1.0) as ranks:
            ranks.start(shell("exit 3", "read line; kill -ABRT $$"))
            ranks.run()
        assert {(end.rank, end.status) for end in ends} == {(0, 3), (1, 128 + signal.SIGABRT)}

    def test_leaving_it_without_pidfd(self, monkeypatch):
        monkeypatch.delattr(os, "pidfd_open")
        with RankSet(lambda *_: None, lambda _: None, 1.0) as ranks:
            ranks.start(shell("sleep 600"))

    def test_no_descriptor_left_for_watching(self, monkeypatch):
        def pidfd_open(pid, flags=0):
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        ranks = RankSet(lambda *_: None, lambda _: None, 1.0)
        with ranks, pytest.raises(LaunchError, match="rank 0 of 1 could not be started"):
            ranks.start(shell("sleep 600"))

    def test_an_exit_code_that_somebody_else_collected(self):
        ends: list[RankEnd] = []
        with RankSet(lambda *_: None, ends.append, 1.0) as ranks:
            ranks.start(shell("exit 3"))
            os.waitpid(ranks._running[0].pid, 0)
            ranks.run()
        assert [(end.exit_code, end.failed, end.status) for end in ends] == [(None, True, 1)]
        assert "another part of this process collected its exit code" in str(ends[0])


class TestRankEnd:
    @pytest.mark.parametrize(
        ("end", "text"),
        [
            (RankEnd(2, 4, exit_code=3), "rank 2 of 4 ended with exit code 3"),
            (RankEnd(2, 4, signal_number=signal.SIGSEGV), "rank 2 of 4 was killed by SIGSEGV"),
            (RankEnd(0, 1, signal_number=40), "rank 0 of 1 was killed by signal 40"),
        ],
    )
    def test_says_how(self, end, text):
        assert str(end) == text

    def test_a_kill_may_be_for_want_of_memory(self):
        assert "memory" in str(RankEnd(0, 1, signal_number=signal.SIGKILL))
        assert "memory" not in str(RankEnd(0, 1, signal_number=signal.SIGKILL, by_launcher=True))
