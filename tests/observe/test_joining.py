"""`gpucoll why` on ranks that have no communicator yet: who waits in init, and who has not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from tests.observe.test_why import MOMENT_S, PATIENCE_S, run, verdict_of_kind
from tests.waiting import is_stopped, until

from gpucoll import config
from gpucoll.group.host import joining as host_joining
from gpucoll.observe import joining, segments
from gpucoll.observe.look import jobs_of, look
from gpucoll.observe.verdict import judge
from gpucoll.rendezvous import marks
from gpucoll.rendezvous.environments import launched_as
from gpucoll.rendezvous.meet import meet

PROGRAM = """
import os, sys, time
def load(go):
    while not os.path.exists(go):
        time.sleep(0.01)
if int(os.environ["GPUCOLL_RANK"]) in {late}:
    load({go!r})
import gpucoll
gpucoll.init(timeout_s=20).close()
"""


@pytest.fixture
def launched(ranks, tmp_path):
    """Ranks of a program as a launcher starts them; those that are late come with the file `go`.

    The fixture `ranks` has compiled the kernels.
    """
    go, started = tmp_path / "go", []

    def start(count, late):
        for rank in range(count):
            environment = {
                **os.environ,
                config.RANK: str(rank),
                config.WORLD_SIZE: str(count),
                config.LOCAL_WORLD_SIZE: str(count),
                config.JOB: f"a word that is not shown {tmp_path}",
            }
            program = PROGRAM.format(late=late, go=str(go))
            started.append(subprocess.Popen([sys.executable, "-c", program], env=environment))
        return [one.pid for one in started]

    yield start
    go.touch()
    for one in started:
        if one.poll() is None and is_stopped(one.pid):
            one.send_signal(signal.SIGCONT)
    assert [one.wait(40) for one in started] == [0] * len(started)


def test_a_rank_that_has_not_called_init(launched, capsys):
    pids = launched(3, late=(1,))
    found, seen = verdict_of_kind(pids, "waiting", "Ranks 0, 2 have been waiting for")
    assert found.ranks == (1,)
    assert f" s in init for rank 1. It is not in init yet; process {pids[1]} " in found.text
    assert seen.pids == [pids[0], pids[1], pids[2]]

    code, out, err = run(capsys, pids[0], "--patience", PATIENCE_S)
    assert code == 1
    rows = out.splitlines()
    assert any(row.startswith("  rank 1: not in init yet") for row in rows)
    assert any(row.startswith("  ranks 0, 2: waiting in init, for ") for row in rows)
    assert "a word that is not shown" not in out + err


def test_no_rank_has_called_init(launched):
    pids = launched(2, late=(0, 1))
    found, _ = verdict_of_kind(pids, "outside")
    assert found.text.startswith("No rank is in a communicator: none has called init, or ")
    assert found.is_healthy


@pytest.mark.soak
def test_a_rank_that_is_stopped_before_init(launched):
    pids = launched(2, late=(1,))
    verdict_of_kind(pids, "waiting")
    os.kill(pids[1], signal.SIGSTOP)
    found, _ = verdict_of_kind(pids, "stopped", "for rank 1. It is stopped by a signal")
    assert found.ranks == (1,)


def join_late(seat, late, go):
    if seat.rank == late:
        until(go.exists)
    seat.init().close()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_whose_process_nobody_knows(rank_server, tmp_path, late):
    go = tmp_path / "go"
    with rank_server.fork(3) as pool:
        pool.start(join_late, late, go, gives="seat")
        try:
            pids = [rank.pid for rank in pool.ranks]
            found, seen = verdict_of_kind(pids, "missing", " have been waiting for ")
            assert found.ranks == (late,)
            assert f" s in init for rank {late}. No process of it is found here: " in found.text
            assert len(seen.processes) == 2
        finally:
            go.touch()
            pool.collect()


def duplicate_late(comm, go):
    def meet_late(*args, **options):
        until(go.exists)
        return meet(*args, **options)

    with mock.patch.object(host_joining, "meet", meet_late if comm.rank == 1 else meet):
        comm.duplicate().close()


def test_a_rank_that_is_late_within_duplicate(rank_server, tmp_path):
    go = tmp_path / "go"
    with rank_server.fork(3) as pool:
        pool.start(duplicate_late, go)
        try:
            pids = [rank.pid for rank in pool.ranks]
            found, seen = verdict_of_kind(
                pids, "waiting", " s in duplicate for rank 1. It is not in duplicate yet; "
            )
            assert found.text.startswith("Ranks 0, 2 have been waiting for ")
            assert (found.ranks, seen.pids) == ((1,), pids)
        finally:
            go.touch()
            pool.results()


def test_marks_end_with_the_meeting(ranks):
    pids = ranks.call(2, lambda comm: os.getpid())
    assert not [mark for pid in pids for mark in marks_of(pid)]


def marks_of(pid):
    links = [(path, link) for path, link in segments._paths(pid)]
    return [path for path, link in links if link.startswith(marks.MARK_LINK)]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"pid": 1}',
        b"[" * 100_000,
        b'{"pid":1,"rank":5,"numbers":[0],"call":"","since_ns":0,"group":"","spans_hosts":0}',
        b'{"pid":1,"rank":0,"numbers":{},"call":"","since_ns":1e999,"group":"","spans_hosts":0}',
    ],
)
def test_garbage_is_no_mark(tmp_path, text):
    path = tmp_path / "mark"
    path.write_bytes(text)
    assert marks.read_mark(str(path)) is None


def mark_of(rank, numbers, pid, **given):
    return marks.Mark(
        **{
            "pid": pid,
            "rank": rank,
            "numbers": numbers,
            "call": "init",
            "since_ns": 1,
            "group": "a",
            "spans_hosts": False,
            **given,
        }
    )


def verdict_on_marks(*given):
    parts = joining.joining_of(given, [], {})
    (job,) = jobs_of(parts)
    return judge(look(job, MOMENT_S), PATIENCE_S)


def test_ranks_of_other_hosts():
    found = verdict_on_marks(mark_of(0, (0, 1, 2), os.getpid(), spans_hosts=True))
    assert found.kind == "elsewhere"
    assert "in init for ranks of other hosts. Run gpucoll why --json there" in found.text


def test_the_inner_one_of_two_meetings_counts():
    """Ranks of two hosts have met; on this one, rank 1 has not come to the meeting of its host."""
    me, other = os.getpid(), os.getppid()
    outer = [
        mark_of(rank, (0, 1, 2), pid, spans_hosts=True, since_ns=rank + 1)
        for rank, pid in ((0, me), (1, other))
    ]
    inner = mark_of(0, (0, 1), me, group="b", since_ns=5)
    found = joining.joining_of([*outer, inner], [], {})
    assert [(one.world_size, [*one.waiting]) for one in found] == [(3, [1]), (2, [0])]
    assert found[1].missing == [1]


# --- as which rank a launcher has started a process -----------------------------------------------


@pytest.mark.parametrize(
    ("environment", "rank", "is_gpucolls"),
    [
        ({"GPUCOLL_RANK": "1", "GPUCOLL_WORLD_SIZE": "4", "GPUCOLL_JOB": "x"}, 1, True),
        ({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2, False),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "PMIX_NAMESPACE": "n",
                "PMIX_RANK": "3",
            },
            3,
            False,
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, 0, False),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
            },
            1,
            False,
        ),
    ],
)
def test_environments_of_launchers(environment, rank, is_gpucolls):
    found: Any = launched_as(environment, lambda: 17)
    assert (found.rank, found.world_size, found.is_gpucolls) == (rank, 4, is_gpucolls)
    other: Any = launched_as({**environment, "GPUCOLL_JOB": "y"}, lambda: 18)
    assert (other.job == found.job) == ("GPUCOLL_JOB" not in environment and rank != 0)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1"},
        {"GPUCOLL_RANK": "4", "GPUCOLL_WORLD_SIZE": "4"},
        {"GPUCOLL_RANK": "x", "GPUCOLL_WORLD_SIZE": "4"},
    ],
)
def test_environments_without_a_rank(environment):
    assert launched_as(environment, lambda: 17) is None
