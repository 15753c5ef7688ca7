"""`gpucoll why` on ranks that hang in one way or another: it names who makes the others wait."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import is_stopped, until

from gpucoll.observe import segments, why
from gpucoll.observe.look import Job, RankLook, jobs_of, look
from gpucoll.observe.processes import Process, process_of
from gpucoll.observe.stacks import Stack, tree_of
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import judge
from gpucoll.transport.shared import layout

PATIENCE_S = 0.1
MOMENT_S = 0.05
SHORT = np.ones(4, np.float32)


def wait_for(go: Path) -> None:
    until(go.exists)


def hang(comm, kind, go):
    """Hang, until the file `go` is there; then end well, or by an error that is expected."""
    comm.all_reduce(SHORT)
    last = comm.world_size - 1
    if kind == "elsewhere" and comm.rank == 1:
        wait_for(go)
    if kind == "stopped" and comm.rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "killed" and comm.rank == 1:
        wait_for(go)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "closed" and comm.rank == 1:
        with comm.duplicate() as other:
            comm.barrier()
            other.barrier()
        wait_for(go)
    elif kind == "closed":
        other = comm.duplicate()
        comm.barrier()
        other.barrier()
        other.close()
    if kind == "message":
        if comm.rank == 0:
            comm.recv(like=SHORT, source=2, tag=7)
        else:
            wait_for(go)
        if comm.rank == 2:
            comm.send(SHORT, 0, 7)
    if kind == "circle":
        comm.recv(like=SHORT, source=(comm.rank + 1) % comm.world_size, tag=1, timeout_s=3.0)
    if kind == "communicators":
        with comm.duplicate() as other:
            (comm if comm.rank else other).barrier(timeout_s=3.0)
    if kind == "calls" and comm.rank == 0:
        comm.recv(like=SHORT, source=1, tag=1, timeout_s=3.0)
    if kind == "outside":
        wait_for(go)
    while kind == "moving" and not comm.all_reduce(int(go.exists()), "max"):
        pass
    comm.barrier()


@pytest.fixture
def hanging(rank_server, tmp_path):
    """Ranks that hang in a given way; afterwards they are let go."""
    go = tmp_path / "go"

    def start(kind, count=4):
        pool = rank_server.fork(count)
        pools.append(pool)
        pool.start(hang, kind, go)
        pids = [rank.pid for rank in pool.ranks]
        until(lambda: have_met(pids))
        return pids

    pools: list[Any] = []
    yield start
    go.touch()
    for pool in pools:
        for rank in pool.ranks:
            if process_of(rank.pid) is not None and is_stopped(rank.pid):
                os.kill(rank.pid, signal.SIGCONT)
        with pool:
            pool.collect()


def have_met(pids):
    found = segments.find(pids)
    found.close()
    return bool(found.segments) and not found.joining


def verdict_on(pids):
    """Return the verdict, and the looks that it stands on."""
    found = segments.find(pids)
    try:
        jobs = [job for job in jobs_of(found.parts) if {*pids} & {*job[0].pids}]
        seen = look(jobs[0], MOMENT_S) if jobs else None
        return (judge(seen, PATIENCE_S), seen) if seen else (None, None)
    finally:
        found.close()


def verdict_of_kind(pids, kind, text=""):
    """Look until the verdict is of a kind, with this text; return it, and the looks behind it."""
    found: list[Any] = []

    def is_found():
        found[:] = verdict_on(pids)
        return found[0] is not None and found[0].kind == kind and text in found[0].text

    until(is_found)
    return found


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize(
    ("kind", "verdict", "ranks", "text"),
    [
        ("elsewhere", "waiting", (1,), "Ranks 0, 2, 3 have been waiting for"),
        ("stopped", "stopped", (3,), "It is stopped by a signal; kill -CONT"),
        ("circle", "circle", (0, 1, 2, 3), "Ranks 0-3 wait for each other: rank 0 is waiting in"),
        ("outside", "outside", (), "No rank is in a call of gpucoll; "),
        ("moving", "moving", (), "No rank has been waiting for long"),
        ("message", "waiting", (2,), "in recv(float32, 16 bytes, source=2, tag=7) for rank 2."),
        ("communicators", "circle", (0, 1), "wait for each other: rank 0 is waiting in barrier()"),
        ("calls", "circle", (0, 1), "tag=1); rank 1 is waiting in barrier() (#"),
        ("closed", "waiting", (1,), "in barrier() (#"),
    ],
)
def test_the_verdict_names_the_rank(hanging, kind, verdict, ranks, text):
    found, seen = verdict_of_kind(hanging(kind), verdict, text)
    assert found.ranks == ranks
    assert len(seen.processes) == 4
    assert all(process is not None for process in seen.processes.values())


def test_an_ended_rank_is_named_even_before_the_others_notice(hanging):
    pids = hanging("elsewhere")
    verdict_of_kind(pids, "waiting")
    for pid in pids:
        if pid != pids[1]:
            os.kill(pid, signal.SIGSTOP)
    until(lambda: all(is_stopped(pid) for pid in pids if pid != pids[1]))
    os.kill(pids[1], signal.SIGKILL)
    found, _ = verdict_of_kind(pids, "ended")
    assert found.ranks == (1,)
    assert f"It has ended (process {pids[1]})" in found.text


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("count", "sleeper", "here", "there"),
    [
        (4, 0, ("waiting", (0,)), ("elsewhere", ())),
        (4, 1, ("waiting", (1,)), ("elsewhere", ())),
        (4, 2, ("elsewhere", ()), ("waiting", (2,))),
        (1 << 21, 2, ("elsewhere", ()), ("waiting", (2,))),
    ],
)
def test_between_hosts(hosts, rank_server, tmp_path, count, sleeper, here, there):
    go = tmp_path / "go"
    with rank_server.fork(4) as pool:
        hosts.start(pool, "aabb", sleep_once, count, sleeper, go)
        pids = [rank.pid for rank in pool.ranks]
        try:
            until(lambda: have_met(pids))
            for part, (kind, ranks) in ((pids[:2], here), (pids[2:], there)):
                assert verdict_of_kind(part, kind)[0].ranks == ranks
        finally:
            go.touch()
            pool.results()


def sleep_once(comm, count, sleeper, go):
    comm.barrier()
    if comm.rank == sleeper:
        wait_for(go)
    comm.all_reduce(np.ones(count))


def test_two_jobs_are_told_apart(hanging):
    here, there = hanging("elsewhere", 2), hanging("outside", 2)
    assert verdict_of_kind(here, "waiting")[0].ranks == (1,)
    assert verdict_of_kind(there, "outside")[1].pids == there


# --- the command ----------------------------------------------------------------------------------


def run(capsys, *arguments):
    code = why.main([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(hanging, capsys):
    pids = hanging("elsewhere", 3)
    verdict_of_kind(pids, "waiting")
    code, out, _ = run(capsys, pids[0], "--patience", PATIENCE_S)
    first, _, *rows = out.splitlines()
    assert code == why.EXIT_STUCK
    assert first.startswith("Ranks 0, 2 have been waiting for ")
    assert "for rank 1. It is in no call of this communicator; the last collective: " in first
    called = "all_reduce(op=sum, float32, shape (4,)) (#1)"
    assert f"  rank 1: in no call of this communicator; the last collective: {called}" in rows
    assert any(row.startswith("  ranks 0, 2: waiting in barrier() (#2), for ") for row in rows)


def test_the_command_as_json(hanging, capsys):
    pids = hanging("outside", 2)
    verdict_of_kind(pids, "outside")
    code, out, _ = run(capsys, pids[1], "--json")
    (job,) = json.loads(out)["jobs"]
    (host,) = job["hosts"]
    assert code == why.EXIT_HEALTHY
    assert job["verdict"]["kind"] == "outside"
    assert [one["pid"] for one in host["ranks"]] == pids
    assert {*host["processes"]} == {str(pid) for pid in pids}


def test_no_job(capsys):
    nobody = 1 << 22  # kernels number processes below that
    code, out, err = run(capsys, nobody)
    assert (code, out) == (why.EXIT_NONE, "")
    assert err == f"gpucoll why: there is no process {nobody} on this host\n"


# --- what it must bear ----------------------------------------------------------------------------


def open_segment(pid):
    path, _ = next(segments._paths(pid))
    return os.open(path, os.O_RDWR)


def test_another_version_is_named(hanging):
    pids = hanging("outside", 2)
    verdict_of_kind(pids, "outside")
    fd = open_segment(pids[0])
    os.pwrite(fd, (layout.LAYOUT_VERSION + 1).to_bytes(8, "little"), layout.EVENT_LAYOUT)
    found = segments.find(pids)
    assert found.segments == []
    assert f"with layout {layout.LAYOUT_VERSION + 1}; this is gpucoll" in found.unreadable[pids[0]]
    os.pwrite(fd, layout.LAYOUT_VERSION.to_bytes(8, "little"), layout.EVENT_LAYOUT)
    os.close(fd)


@pytest.mark.soak
def test_it_only_reads_and_leaves_nothing(hanging):
    pids = hanging("outside", 2)
    verdict_of_kind(pids, "outside")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        verdict_on(pids)
    assert len(os.listdir("/proc/self/fd")) == before
    found = segments.find(pids)
    address = found.segments[0].segment.address
    rows = Path("/proc/self/maps").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"{address:x}-")]
    assert " r--s " in row
    found.close()


# --- stacks ---------------------------------------------------------------------------------------


def test_stacks_are_one_tree():
    stacks = {
        0: Stack(("main (a.py:1)", "step (a.py:5)", "wait (/x/gpucoll/calls/work.py:9)")),
        1: Stack(("main (a.py:1)", "load (a.py:7)")),
        2: Stack(("main (a.py:1)", "step (a.py:5)", "wait (/x/gpucoll/calls/work.py:9)")),
        3: Stack(trouble="no such process"),
    }
    assert [*tree_of(stacks)] == [
        "rank 3",
        "  no stack: no such process",
        "ranks 0-2",
        "  main (a.py:1)",
        "  rank 1",
        "    load (a.py:7)",
        "  ranks 0, 2",
        "    step (a.py:5)",
        "    wait (/x/gpucoll/calls/work.py:9)",
    ]
    assert [stack.caller for stack in stacks.values()] == [
        "step (a.py:5)",
        "load (a.py:7)",
        "step (a.py:5)",
        "",
    ]


def test_the_report_says_where_ranks_outside_gpucoll_are():
    job = job_of([RankLook(0, rank, rank + 1, "in no call", False) for rank in (0, 1)])
    stacks = {1: Stack(("main (a.py:1)", "load (a.py:7)")), 2: Stack(("main (a.py:1)",))}
    first = next(lines_of(job, judge(job), stacks, False))
    assert first == (
        "No rank is in a call of gpucoll; 0 of 2 compute. They are at load (a.py:7), main (a.py:1)."
    )


def test_each_of_several_ranks_is_told_of():
    """Ranks 1 and 2 of four are elsewhere, one of them stopped; then both compute."""

    def process(pid, state="R"):
        return Process(pid, "python", state, 1, 0, 0)

    ranks = [RankLook(0, rank, rank, f"in no call {rank}", False) for rank in range(4)]
    for rank in (0, 3):
        ranks[rank] = RankLook(
            0, rank, rank, "waiting in barrier() (#1)", True, [1, 2], since_s=3.0
        )
    job = Job({pid: process(pid) for pid in range(4)}, {1: 0.9, 2: 0.9}, ranks, [""], 0)
    assert judge(job).text == (
        "Ranks 0, 3 have been waiting for 3.0 s in barrier() (#1) for ranks 1, 2. Rank 1 is in no "
        "call 1; process 1 uses 90% of a CPU. Rank 2 is in no call 2; process 2 uses 90% of a CPU."
    )
    job.processes[2] = process(2, "T")
    assert judge(job).text.endswith(
        "for rank 2. It is stopped by a signal; kill -CONT 2 lets it go on."
    )


def job_of(ranks):
    """Return a job of two processes that sleep, as its looks show it."""
    processes: dict[int, Process | None] = {
        pid: Process(pid, "python", "S", 1, 0, 0) for pid in (1, 2)
    }
    return Job(processes, {}, ranks, ["", ""], 0)


def test_only_the_communicator_that_others_wait_in_counts():
    """Rank 1 has closed a further communicator, and is not where rank 0 waits."""
    looks = [
        RankLook(0, 0, 1, "waiting in barrier() (#1)", True, [2], since_s=3.0),
        RankLook(0, 1, 2, "in no call of this communicator", False),
        RankLook(1, 1, 2, "no longer in this communicator", False, closed=""),
    ]
    found = judge(job_of(looks))
    assert (found.kind, found.ranks) == ("waiting", (1,))
    assert found.text.endswith("It is in no call of this communicator; process 2 sleeps.")
    looks[1].closed = "ValueError: no more"
    found = judge(job_of(looks))
    assert (found.kind, found.ranks) == ("closed", (1,))
    why = "because it raised ValueError: no more"
    assert f"It has already closed the communicator, {why} (process 2)." in found.text


def test_all_gpus_have_begun_a_call_that_does_not_end():
    looks = [RankLook(0, rank, rank + 1, "in no call", False) for rank in (0, 1)]
    text = "waiting on the GPU in all_reduce() (#3)"
    looks += [RankLook(0, rank, rank + 1, text, True, since_s=3.0, stream="in") for rank in (0, 1)]
    found = judge(job_of(looks))
    assert (found.kind, found.ranks) == ("still", (0, 1))
    assert found.text == (
        "Ranks 0, 1 have been waiting for 3.0 s on the GPU in all_reduce() (#3), which all GPUs "
        "have begun, and nothing moves."
    )
    looks[0].has_moved = True  # calls of host arrays go on; the GPUs do not
    assert judge(job_of(looks)).kind == "still"
    looks[2].has_moved = True
    found = judge(job_of(looks))
    assert found.kind == "moving"
    assert found.text == "Ranks 0, 1 wait for data that is on its way: slow, not stuck."


def test_a_rank_that_is_swapping():
    looks = [
        RankLook(0, 0, 1, "waiting in barrier() (#1)", True, [2], since_s=3.0),
        RankLook(0, 1, 2, "in no call of this communicator", False),
    ]
    job = job_of(looks)
    job.processes[2] = Process(2, "python", "D", 1, 0, 0, swap_bytes=64 << 20)
    found = judge(job)
    assert (found.kind, found.ranks) == ("swapping", (1,))
    assert found.text.endswith(
        "It is swapping (process 2, 64 MiB on the swap device): the host lacks memory."
    )


def test_a_job_that_ends_while_it_is_looked_at():
    """All its processes are gone: nobody waits any more."""
    looks = [
        RankLook(0, 0, 1, "waiting in barrier() (#1)", True, [2], since_s=3.0),
        RankLook(0, 1, 2, "no longer in this communicator", False, closed=""),
    ]
    job = job_of(looks)
    job.processes = {1: None, 2: Process(2, "python", "Z", 1, 0, 0)}
    found = judge(job)
    assert (found.kind, found.is_healthy) == ("over", True)
    job.elsewhere = 2  # ranks of other hosts may wait for these
    assert judge(job).kind == "ended"
