"""gpucoll-run for a job over several hosts: each starts, numbers and watches its own ranks."""

from __future__ import annotations

import os
import socket

import pytest

from gpucoll.launcher.arguments import parse
from gpucoll.launcher.nodes import NodesError, Span, find_span
from gpucoll.rendezvous.meeting_points import TcpPoint

SECRET = "0123456789abcdef0123456789abcdef"
MEET = "tcp://127.0.0.1:29511"


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", SECRET)


class TestOptions:
    @pytest.mark.parametrize(
        ("counts", "node_rank", "ranks", "first", "world_size"),
        [([4], 0, 4, 0, 8), ([4], 1, 4, 4, 8), ([4, 2], 0, 4, 0, 6), ([4, 2], 1, 2, 4, 6)],
    )
    def test_which_ranks(self, secret, counts, node_rank, ranks, first, world_size):
        assert find_span(counts, 2, node_rank, "127.0.0.1:29511") == (
            ranks,
            Span(first, world_size, MEET),
        )

    def test_a_list_says_how_many_nodes(self, secret):
        assert find_span([1, 2, 3], None, 2, MEET) == (3, Span(3, 6, MEET))

    def test_one_host(self):
        assert find_span([3], None, None, None) == (3, None)
        assert find_span([3], 1, 0, "127.0.0.1:29511") == (3, None)
        assert find_span([3], None, 0, None) == (3, None)

    def test_the_meeting_point_of_the_environment(self, secret, monkeypatch):
        monkeypatch.setenv("GPUCOLL_MEET", MEET)
        assert find_span([1], 2, 1, None) == (1, Span(1, 2, MEET))
        monkeypatch.setenv("GPUCOLL_MEET", "http://x")
        with pytest.raises(NodesError, match="GPUCOLL_MEET must be tcp://HOST:PORT"):
            find_span([1], 2, 1, None)
        assert find_span([1], 2, 1, MEET) == (1, Span(1, 2, MEET))

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (([4], None, 1, None), "--node-rank 1 is for jobs over several hosts"),
            (([4], 1, 1, None), "--node-rank 1 is for jobs over several hosts"),
            (
                ([4], None, None, MEET),
                "--meet is for jobs over several hosts: add --nodes with their number",
            ),
            (([4, 2], 1, 0, MEET), "-n 4,2 has 2 numbers, but --nodes is 1"),
            (([4, 2], 3, 0, MEET), "-n 4,2 has 2 numbers, but --nodes is 3"),
            (([4], 3, None, MEET), "3 nodes need --node-rank: 0 on the host of rank 0, and 1 to 2"),
            (([4, 2], None, None, MEET), "2 nodes need --node-rank"),
            (([4], 2, 2, MEET), r"--node-rank must be in 0\.\.1; got 2"),
            (([4], 2, 0, None), "need --meet HOST:PORT, the same on each"),
            (([4], 2, 0, "node"), "--meet must be tcp.*'node': it has no port"),
            (([4], 2, 0, "203.0.113.7:80"), "rank 0 cannot listen at tcp://203.0.113.7:80"),
        ],
    )
    def test_what_does_not_go_together(self, secret, arguments, text):
        with pytest.raises(NodesError, match=text):
            find_span(*arguments)

    def test_without_a_secret(self, monkeypatch, tmp_path):
        monkeypatch.delenv("GPUCOLL_SECRET", raising=False)
        with pytest.raises(NodesError, match=r"export GPUCOLL_SECRET=\$\(python3 -c .* same value"):
            find_span([1], 2, 1, MEET)
        assert find_span([1], 2, 1, f"file://{tmp_path}/x")[1] == Span(1, 2, f"file://{tmp_path}/x")
        monkeypatch.setenv("GPUCOLL_SECRET", "short")
        with pytest.raises(NodesError, match="GPUCOLL_SECRET holds a secret of 5 bytes"):
            find_span([1], 2, 1, MEET)
        monkeypatch.delenv("GPUCOLL_SECRET")
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "secret").chmod(0o600)
        monkeypatch.setenv("GPUCOLL_SECRET_FILE", str(tmp_path / "secret"))
        assert find_span([1], 2, 1, MEET) == (1, Span(1, 2, MEET))

    @pytest.mark.parametrize(
        ("line", "part"),
        [
            ("-n 4,0 true", "'4,0' is neither a whole number of at least 1 nor a list of them"),
            ("-n 4, true", "'4,'"),
            ("-n 2 --nodes 0 true", "'0'"),
            ("-n 2 --nodes 2 --node-rank -1 true", "--node-rank"),
            ("-n 2 --nodes 2 --node-rank 0 --meet h true", "--meet must be"),
            ("-n 2 --nodes 2 --node-rank 0 --meet h:1 true", "does not resolve"),
        ],
    )
    def test_a_wrong_line_gets_one_line(self, secret, capsys, line, part):
        with pytest.raises(SystemExit) as exit_:
            parse(line.replace(" h", " no-such-host.invalid").split())
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert part in err
        assert err.count("\n") == 1

    def test_a_line(self, secret):
        options = parse(f"--nodes 2 --node-rank 1 --meet {MEET} -n 3,2 -- true -n 9".split())

        assert (options.ranks, options.span) == (2, Span(3, 5, MEET))
        assert options.command[1:] == ["-n", "9"]


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEET", "JOB")


class TestRanks:
    @pytest.fixture
    def node(self, start_run):
        """Start one node's gpucoll-run."""

        def node(node_rank, program, *options, counts="2,3", meet=MEET):
            place = ("--nodes", 2, "--node-rank", node_rank, "--meet", meet, "-n", counts)
            return start_run(
                *place, *options, program, env={**os.environ, "GPUCOLL_SECRET": SECRET}
            )

        return node

    def test_know_who_they_are(self, node, script):
        program = script(f"print(*(os.environ['GPUCOLL_' + name] for name in {NAMES}))")
        lines = []
        for node_rank in (0, 1):
            code, out, err = node(node_rank, program).finish()
            assert (code, err) == (0, "")
            lines += sorted(line.split() for line in out.splitlines())

        assert [line[:-1] for line in lines] == [
            ["[0]", "0", "5", "0", "2", MEET],
            ["[1]", "1", "5", "1", "2", MEET],
            ["[2]", "2", "5", "0", "3", MEET],
            ["[3]", "3", "5", "1", "3", MEET],
            ["[4]", "4", "5", "2", "3", MEET],
        ]
        assert len({line[-1] for line in lines}) == 2  # each launcher's own

    def test_find_their_job(self, node, script):
        program = script(
            "from gpucoll.rendezvous.job import find_job\n"
            "job = find_job()\n"
            "print(job.rank, job.world_size, job.meet.text, find_job(0, 2).meet)\n"
        )
        code, out, err = node(1, program).finish()

        assert (code, err) == (0, "")
        assert sorted(out.splitlines()) == [f"[{r}] {r} 5 {MEET} None" for r in (2, 3, 4)]

    def test_all_ranks_meet(self, node, script):
        with socket.socket() as taken:  # a port that was free just now
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", 0))
            meet = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        program = script("import gpucoll; print(gpucoll.init().all_reduce(rank + 1))")
        nodes = [node(node_rank, program, counts="2,1", meet=meet) for node_rank in (0, 1)]
        outcomes = [started.finish() for started in nodes]

        assert [code for code, _, _ in outcomes] == [0, 0], outcomes
        lines = sorted(line for _, out, _ in outcomes for line in out.splitlines())
        assert lines == ["[0] 6", "[1] 6", "[2] 6"]

    def test_only_rank_0_reads_the_launchers_input(self, node, script):
        code, out, _ = node(1, script("print(repr(sys.stdin.read()))"), counts="1,1").finish()

        assert (code, out) == (0, "[1] ''\n")

    def test_a_failure_is_called_by_its_number_in_the_job(self, node, script):
        program = script("sys.exit(7 if rank == 3 else 0)")
        code, _, err = node(1, program).finish()

        assert code == 7
        assert "rank 3 of 5 ended with exit code 7" in err

    def test_who_waits_is_told_who_has_ended(self, node, script):
        program = script(
            "if rank != 2: sys.exit(0)\n"
            "from gpucoll.rendezvous.ended_ranks import LauncherWatch\n"
            "from gpucoll.rendezvous.job import Job\n"
            "watch = LauncherWatch(Job(2, 5, 'x', 'x'), os.environ['GPUCOLL_JOB'])\n"
            "deadline = time.monotonic() + 20\n"
            "while (found := watch.check({0, 1, 3})) is None:\n"
            "    assert time.monotonic() < deadline\n"
            "    time.sleep(0.01)\n"
            "print(*found)\n"
            "watch.close()\n"
        )
        code, out, err = node(1, program).finish()

        assert (code, err) == (0, "")
        assert out == "[2] 3 it ended with exit code 0 without having come\n"

    def test_nothing_is_started_where_rank_0_could_not_listen(self, node):
        code, out, err = node(0, "true", meet="203.0.113.7:80").finish()

        assert (code, out) == (2, "")
        assert err.startswith("gpucoll-run: rank 0 cannot listen at tcp://203.0.113.7:80")


def test_the_meeting_point_of_this_host_can_be_named():
    assert TcpPoint(socket.gethostname(), 80).listen_at()[1] == 80
