"""An elastic job: what fails is started again, and when the job ends all the same."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time

import pytest
from tests.elastic import PROGRAM, SAID

from gpucoll.errors import LaunchError
from gpucoll.launcher.arguments import parse
from gpucoll.launcher.elastic import Elastic, Members
from gpucoll.launcher.end_notices import EndNotices
from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.rank_process import RankCommand, RankEnd
from gpucoll.launcher.rank_set import RankSet
from gpucoll.rendezvous.notices import joined_place, notices_address, tell_joined

SHOWN = [f"[{name}] {said}" for name, said in zip(["0#2", "1#2", "2"], SAID[::-1], strict=True)]

HEAD = """
import os, signal, sys
from gpucoll.rendezvous.notices import tell_joined
place, is_new = int(os.environ['GPUCOLL_LOCAL_RANK']), 'GPUCOLL_JOIN' in os.environ
def await_end(): signal.pause()
def wait(name):
    open(FOLDER + name).read()
def tell(*names):
    for name in names: open(FOLDER + name, 'w').close()
def die(): os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def program(tmp_path):
    """Write a program for processes with and without a rank, which tell each other by pipes."""

    def program(text, pipes=()):
        for name in pipes:
            os.mkfifo(tmp_path / name)
        path = tmp_path / "program.py"
        path.write_text(f"FOLDER = {str(tmp_path)!r} + '/'\n{HEAD}{text}")
        return path

    return program


class TestJob:
    def test_what_failed_is_started_again(self, run, program):
        path = program(
            "if not is_new and place == 1: print(os.environ['GPUCOLL_JOB']); die()\n"
            "if not is_new: wait(f'go{place}'); sys.exit()\n"
            "tell_joined(); print(os.environ['GPUCOLL_JOB'])\n"
            "names = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'JOIN'}\n"
            "print(*sorted(n for n in names if 'GPUCOLL_' + n in os.environ))\n"
            "print(os.sched_getaffinity(0) == {int(cpu) for cpu in sys.argv[1:]})\n"
            "tell('go0', 'go2')\n",
            ("go0", "go2"),
        )
        cpus = sorted(os.sched_getaffinity(0))
        code, out, err = run("--elastic", "2:3", "--bind", "none", path, *cpus)

        assert code == 0
        first, *new = out.splitlines()
        assert new == [
            first.replace("[1]", "[1#2]"),
            "[1#2] JOIN LOCAL_RANK LOCAL_WORLD_SIZE",
            "[1#2] True",
        ]
        assert err == (
            "gpucoll-run: rank 1 of 3 was killed by SIGTERM; 1#2 is started in its place\n"
        )

    def test_who_has_joined_counts(self, run, program):
        path = program(
            "if is_new and place < 2: tell_joined()\n"
            "if is_new: tell(f'go{(place + 1) % 3}')\n"
            "elif place == 0: die()\n"
            "else: wait(f'go{place}'); sys.exit(7)\n"
            "if place == 0: wait('go0'); sys.exit(9)\n"
            "await_end()\n",
            ("go0", "go1", "go2"),
        )
        code, _, err = run("-n", 3, "--elastic", "2:3", "--grace", 0.1, path)

        assert "rank 1 of 3 ended with exit code 7; 1#2 is started in its place\n" in err
        assert "rank 2 of 3 ended with exit code 7; 2#2 is started in its place\n" in err
        assert "rank 0#2 ended with exit code 9; fewer than 2 members are left; the others" in err
        assert "rank 1#2 had to be ended, and was killed by SIGTERM\n" in err
        assert "rank 2#2 had not joined when the job ended\n" in err
        assert code == 9

    def test_a_failure_after_one_has_finished_is_not_made_good(self, run, program):
        path = program(
            "if place == 0: sys.exit()\n"
            "from gpucoll.rendezvous.ended_ranks import LauncherWatch\n"
            "from gpucoll.rendezvous.job import Job\n"
            "watch = LauncherWatch(Job(1, 2, 'x', 'x'), os.environ['GPUCOLL_JOB'])\n"
            "while watch.check({0}) is None: pass\n"
            "watch.close()\n"
            "sys.exit(3)\n"
        )
        code, _, err = run("--elastic", "1:2", path)
        assert (code, err) == (3, "gpucoll-run: rank 1 of 2 ended with exit code 3\n")

    def test_no_one_waits_for_what_is_over(self, run, program):
        path = program(
            "if is_new: tell('go0', 'go2'); await_end()\n"
            "if place == 1: die()\n"
            "wait(f'go{place}')\n",
            ("go0", "go2"),
        )
        code, _, err = run("--elastic", "1:3", path)

        assert code == 0
        assert err.splitlines()[1:] == ["gpucoll-run: rank 1#2 had not joined when the job ended"]

    def test_what_fails_again_and_again(self, start, program, tmp_path):
        """Its place stays empty, and the job goes on with the others."""
        running = start(
            [
                *(sys.executable, "-c", PATIENT.replace("SECONDS", "0.01")),
                *("--elastic", "1:2", "--restarts", "2", "--grace", "0.1"),
                program("if place == 1: sys.exit(5)\nwait('go0')\n", ("go0",)),
            ]
        )
        running.wait_for("stays empty", 2)
        (tmp_path / "go0").open("w").close()
        code, _, err = running.finish()

        assert code == 0
        assert [re.sub(r"^gpucoll-run: ", "", line) for line in err.splitlines()] == [
            "rank 1 of 2 ended with exit code 5; 1#2 is started in its place",
            "rank 1#2 ended with exit code 5; 1#3 is started in its place in 0.01 s",
            "rank 1#3 ended with exit code 5; --restarts 2 is used up, and its place stays empty",
        ]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_also_what_is_to_be_started(self, start, program, number):
        running = start(
            [
                *(sys.executable, "-c", PATIENT.replace("SECONDS", "600")),
                *("--elastic", "1:2", program("if place == 1: sys.exit(5)\nawait_end()\n")),
            ]
        )
        running.wait_for("1#3 is started in its place in 600 s", 2)
        running.send(number)
        code, _, err = running.finish()

        assert code == 128 + number
        assert f"rank 0 of 2 was killed by {number.name}\n" in err
        assert "0#2" not in err

    def test_lost_ranks_come_back(self, run, tmp_path):
        (tmp_path / "program.py").write_text(PROGRAM)
        code, out, err = run("--elastic", "2:3", tmp_path / "program.py")

        assert code == 0, err
        assert sorted(out.splitlines()) == SHOWN
        assert err.count("is started in its place\n") == err.count("\n") == 2


class TestSeveralHosts:
    """A host's only rank is lost: others may have members."""

    def test_a_host_without_members_and_restarts_has_failed(self):
        members = Members(Elastic(1, 2, restarts=0), [1])
        members.leave(1)

        assert members.obstacle() == ("--restarts 0 is used up, and no member is left on this host")

    SECRET = "0123456789abcdef0123456789abcdef"

    @pytest.mark.soak
    def test_lost_ranks_come_back(self, start_run, tmp_path):
        (tmp_path / "program.py").write_text(PROGRAM)
        with socket.create_server(("127.0.0.1", 0)) as free:
            meet = f"127.0.0.1:{free.getsockname()[1]}"
        place = ("--nodes", 2, "--meet", meet, "-n", "1,2", "--elastic", "2:3")
        hosts = [
            start_run(
                *(*place, "--node-rank", node, tmp_path / "program.py"),
                env={
                    **os.environ,
                    "GPUCOLL_SECRET": self.SECRET,
                    "GPUCOLL_HOST_ID": f"host {node}",
                },
            )
            for node in range(2)
        ]
        outcomes = [host.finish() for host in hosts]

        assert [code for code, _, _ in outcomes] == [0, 0], outcomes
        lines = [line for _, out, _ in outcomes for line in sorted(out.splitlines())]
        assert lines == SHOWN

    def test_ctrl_c_while_no_process_runs(self, start, program):
        host = ("--nodes", 2, "--node-rank", 1, "--meet", "tcp://127.0.0.1:29511", "-n", 1)
        running = start(
            [
                *(sys.executable, "-c", PATIENT.replace("SECONDS", "600")),
                *(*host, "--elastic", "1:2", program("die()")),
            ],
            env={**os.environ, "GPUCOLL_SECRET": self.SECRET},
        )
        running.wait_for("1#3 is started in its place in 600 s", 2)
        running.send(signal.SIGINT)
        assert running.finish()[0] == 128 + signal.SIGINT


PATIENT = """
import signal, sys
from gpucoll.launcher import cli, elastic
cli.compile_kernels = lambda report: None
elastic.FIRST_PAUSE_S, elastic.LONGEST_PAUSE_S = SECONDS, 600.0
sys.exit(cli.main())
"""


class TestMembers:
    @pytest.fixture
    def clock(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        return now

    def test_pauses_grow_while_it_fails_soon(self, clock):
        members = Members(Elastic(1, 2, 100), range(2))
        pauses = []
        for _ in range(9):
            pauses.append(members.pause_s(1))
            clock[0] += pauses[-1] + 0.1

        assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
        assert members.pause_s(0) == 0
        clock[0] += 100
        assert [members.pause_s(1) for _ in range(3)] == [0, 0, 1]

    def test_of_other_hosts_are_taken_to_be_there(self):
        members = Members(Elastic(3, 4), [2, 3])
        assert (members.leave(2), members.leave(2), members.obstacle()) == (True, False, "")
        assert members.leave(3)
        assert members.obstacle() == "fewer than 3 members are left"
        members.join(2)
        assert (members.any_here, members.obstacle()) == (True, "")


def shell(text, attempt=1):
    return RankCommand(["sh", "-c", text], os.environ, attempt=attempt)


class TestRankSet:
    def test_what_the_former_process_left_is_ended_first(self, watched):
        pids, ends = [], []

        def on_output(rank, stream, data):
            if data.startswith(b"pid"):
                pids.extend(data.split()[1:])

        def on_end(end):
            ends.append(end.label)
            if end.attempt == 1:
                watched.add(pids[0])
                ranks.start_again(end, make, 0.0)

        def make():
            assert watched.all_ended()
            return shell("true", 2)

        with RankSet(on_output, on_end, 1.0) as ranks:
            ranks.start([shell("trap '' TERM; sleep 600 & echo pid $!; exit 1")])
            ranks.run()
        assert ends == ["0", "0#2"]

    def test_what_cannot_be_started_has_failed(self, monkeypatch):
        output, ends = [], []

        def fail(rank, world_size, command):
            raise LaunchError("rank 0 of 1 could not be started: no memory")

        def on_end(end):
            ends.append(end)
            if end.attempt == 1:
                monkeypatch.setattr(ranks, "_start_one", fail)
                ranks.start_again(end, lambda: shell("true", 2), 0.0)

        with RankSet(lambda *given: output.append(given), on_end, 1.0) as ranks:
            ranks.start([shell("kill -TERM $$")])
            ranks.run()
        assert ends[1] == RankEnd(0, 1, exit_code=126, attempt=2)
        assert (0, 2, b"gpucoll: rank 0 of 1 could not be started: no memory\n") in output


class TestNotices:
    def test_of_what_has_joined(self, monkeypatch):
        places: list[int] = []
        token, loop = f"joined {os.getpid()}", EventLoop()
        notices = EndNotices(loop, token, 3, places.append)
        monkeypatch.setenv("GPUCOLL_JOB", token)
        monkeypatch.setenv("GPUCOLL_LOCAL_RANK", "2")
        monkeypatch.delenv("GPUCOLL_JOIN", raising=False)
        tell_joined()
        notices.hear()
        assert places == []
        monkeypatch.setenv("GPUCOLL_JOIN", "1")
        tell_joined()
        with socket.socket(socket.AF_UNIX) as other:  # it asks, and its process tells, too
            other.connect(notices_address(token))
            notices.hear()
            assert places == [2]
        notices.close()
        loop.close()
        tell_joined()  # nobody listens

    @pytest.mark.parametrize(
        "told", [b"", b"joined ", b"joined -1", b"joined x", b"2", b"joined 9" * 9]
    )
    def test_rubbish(self, told):
        assert joined_place(told) is None


class TestOptions:
    def test_elastic(self):
        for line in ("--elastic 2:4 true", "-n 4 --elastic 2:4 true"):
            options = parse(line.split())
            assert (options.ranks, options.elastic) == (4, Elastic(2, 4, 10))
        assert parse(["--elastic", "1:1", "--restarts", "0", "true"]).elastic == Elastic(1, 1, 0)
        assert parse(["-n", "1", "true"]).elastic is None

    def test_on_several_hosts(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_SECRET", "0123456789abcdef0123456789abcdef")
        host = "--nodes 2 --node-rank 1 --meet tcp://127.0.0.1:29511 --elastic 3:6 "
        options = parse((host + "-n 4,2 true").split())
        assert (options.ranks, options.elastic) == (2, Elastic(3, 6))
        with pytest.raises(SystemExit):
            parse((host + "true").split())

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("--elastic 4 true", "'4' is not MIN:MAX"),
            ("--elastic 0:4 true", "'0:4' is not MIN:MAX, two whole numbers with 1 <= MIN <= MAX"),
            ("--elastic 5:4 true", "'5:4' is not MIN:MAX"),
            ("--elastic 1:x true", "'1:x' is not MIN:MAX"),
            ("-n 3 --elastic 2:4 true", "--elastic 2:4 is a job of 4 ranks, but -n makes it 3"),
            ("-n 3 --restarts 2 true", "--restarts is for elastic jobs: add --elastic MIN:MAX"),
            ("--elastic 1:2 --restarts -1 true", "--restarts"),
            (
                "--nodes 2 --elastic 1:2 true",
                "counts the ranks of all hosts: with --nodes, give -n",
            ),
        ],
    )
    def test_contradictions(self, capsys, line, text):
        with pytest.raises(SystemExit) as exit_:
            parse(line.split())
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1
