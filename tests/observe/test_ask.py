"""`gpucoll why` asks the other hosts of a job through their leaders, and harms none of them."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.waiting import is_stopped, until

from gpucoll.group.world import observers
from gpucoll.observe import segments, why
from gpucoll.observe.ask import ask
from gpucoll.observe.look import jobs_of
from gpucoll.observe.processes import pids_here
from gpucoll.observe.verdict import judge
from gpucoll.rendezvous import frames

PATIENCE_S = 0.1
PATIENT_S = 30.0
SHORT = np.ones(4, np.float32)


def sleep_once(comm, sleeper, folder, go):
    observers.CHILD_S = observers.ANSWERING_S = PATIENT_S  # the machine may be busy
    comm.barrier()
    (folder / f"{comm.rank}").touch()
    if comm.rank == sleeper:
        until(go.exists)
    return int(comm.all_reduce(SHORT)[0])


@pytest.fixture
def waiting(hosts, rank_server, tmp_path, monkeypatch):
    """Two hosts of two ranks, which wait for rank 2; afterwards they go on."""
    monkeypatch.setattr(observers, "ANSWERING_S", PATIENT_S)
    go, there = tmp_path / "go", tmp_path / "there"
    there.mkdir()
    with rank_server.fork(4) as pool:
        hosts.start(pool, "aabb", sleep_once, 2, there, go, timeout_s=100.0)
        pids = [rank.pid for rank in pool.ranks]
        until(lambda: len(os.listdir(there)) == 4)
        yield pids
        for pid in pids:
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
        go.touch()
        assert pool.results() == [4] * 4


def parts_of(pids):
    """Return the communicators on several hosts that these processes have."""
    found = segments.find(pids)
    found.close()
    return [segment for segment in found.segments if segment.job.group]


def verdict_from(pids):
    """Return the verdict of a host that sees only these processes."""
    found = segments.find(pids)
    given = why.make_parser().parse_args(["--patience", str(PATIENCE_S)])
    try:
        jobs = [job for job in jobs_of(found.parts) if {*pids} & {*job[0].pids}]
        reports = [why._report(job, given) for job in jobs]
    finally:
        found.close()
    (report,) = why._with_other_hosts(jobs, reports)
    return judge(report.job, PATIENCE_S), report.job


def test_another_host_is_asked(waiting):
    seen: list[Any] = []

    def is_found():
        seen[:] = verdict_from(waiting[:2])
        return seen[0].kind == "waiting" and len(seen[1].hosts) == 2

    until(is_found)
    verdict, job = seen
    assert verdict.ranks == (2,)
    assert "for rank 2. It is in no call" in verdict.text
    assert (job.elsewhere, job.silent) == (0, {})
    until(lambda: not children_of(waiting))


def children_of(pids):
    parents = {pid: int(stat_of(pid)[1]) for pid in pids_here() if stat_of(pid)}
    return [pid for pid, parent in parents.items() if parent in pids]


def stat_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_host_that_does_not_answer(waiting):
    os.kill(waiting[2], signal.SIGSTOP)
    until(lambda: is_stopped(waiting[2]))
    (part,) = parts_of(waiting[:2])
    until(lambda: [*ask(part, 0.5)[1].values()] == [[2, 3]])  # the other leader may be slow


def test_observers_that_are_killed_or_send_rubbish(waiting):
    (part,) = parts_of(waiting[:2])
    before = len(os.listdir(f"/proc/{waiting[0]}/fd"))
    for sent in (b"", b"\xff" * 2000, b"\0\0\0\0\0\0\0\0"):
        for _ in range(4):
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(observers.observers_address(part.job.group, waiting[0]))
                end.send(sent) if sent else None
    until(lambda: len(os.listdir(f"/proc/{waiting[0]}/fd")) == before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_nothing(waiting):
    (part,) = parts_of(waiting[:2])
    address = observers.observers_address(part.job.group, waiting[0])
    program = (
        "import os, socket\n"
        "os.setuid(65533)\n"
        "end = socket.socket(socket.AF_UNIX)\n"
        f"end.connect({address!r})\n"
        "print(len(end.recv(100)))\n"
    )
    command = [sys.executable, "-I", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


@pytest.fixture
def leader():
    """A leader of one of two hosts, without ranks."""
    found = observers.Observers("a test", 0, ["a", "b"], [[0], [1]], lambda *_: None)
    yield found
    found.close()


def connected():
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(60)
    end.connect(observers.observers_address("a test", os.getpid()))
    return end


def is_readable(leader):
    poll = select.poll()
    for fd, events in leader.events():
        poll.register(fd, events)
    return bool(poll.poll(0))


def test_a_leader_without_descriptors_is_not_kept_busy(leader):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected() as end:
        resource.setrlimit(resource.RLIMIT_NOFILE, (end.fileno() + 1, limits[1]))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            assert is_readable(leader)
            leader.work()
            assert not is_readable(leader)
            assert 0 < leader.rest_s <= observers._PAUSE_S
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in held:
                os.close(fd)
        until(lambda: leader.work() or leader._asking)
        assert end.recv(1)


def test_more_observers_than_a_leader_serves_do_not_keep_it_busy(leader):
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected()) for _ in range(observers._MOST_OBSERVERS)]
        for _ in ends:
            leader.work()
        last = [stack.enter_context(connected()) for _ in range(2)]
        leader.work()
        assert last[0].recv(1) == b""
        assert not is_readable(leader)


def test_users_that_have_no_number_here_get_nothing(leader, monkeypatch):
    monkeypatch.setattr(frames, "_UNKNOWN", os.geteuid())
    monkeypatch.setattr(frames, "_user_namespace", str)  # another one for each process
    with connected() as end:
        leader.work()
        assert end.recv(1) == b""


def test_a_leader_that_is_not_there():
    class Part:
        pids = (os.getpid(),)

        class job:  # noqa: N801
            group = "nobody's"

    assert ask(Part()) == ([], {})  # type: ignore[arg-type]
