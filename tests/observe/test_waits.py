"""`gpucoll why` on ranks that wait in tables: for a clock, for a row's lock, for a version."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.observe.test_why import verdict_of_kind
from tests.tables.test_losses import lock_row
from tests.waiting import until

from gpucoll.observe import segments
from gpucoll.rendezvous import marks
from gpucoll.tables import Published, Staleness, Table


def wait_in_table(comm, kind, go):
    if kind == "latest":
        with Published(comm, np.zeros(3), 1) as published:
            if comm.rank == 1:
                until(go.exists)
                published.publish(np.ones(3))
            version, _ = published.latest(0, wait=True)
            comm.barrier()
            return version
    with Table(comm, 8, 2, "int64", mode=Staleness(1)) as table:
        if comm.rank == 1:
            if kind == "push":
                lock_row(table, 5)
            comm.barrier()
            until(go.exists)
            if kind == "push":
                release(table, 5)
        else:
            comm.barrier()
        if kind == "push":
            table.push([3, 5], np.ones((2, 2), np.int64))
        else:
            for _ in range(3):
                table.clock()
        comm.barrier()
        return table.clock()


def release(table, place):
    table._rows._locks[place] = 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("clock", " s in clock() of a table for clock 1 for rank 1. It "),
        ("push", " s in push() of a table for the lock of row 5 for rank 1. It "),
        ("latest", " s in latest() for a version newer than 0 for rank 1. It "),
    ],
)
def test_a_rank_that_waits_in_a_table(rank_server, tmp_path, kind, text):
    go = tmp_path / "go"
    with rank_server.fork(3) as pool:
        pool.start(wait_in_table, kind, go)
        try:
            pids = [rank.pid for rank in pool.ranks]
            found, _ = verdict_of_kind(pids, "waiting", "Ranks 0, 2 have been waiting for ")
            assert text in found.text
            assert found.ranks == (1,)
        finally:
            go.touch()
            pool.results()
        links = [link for pid in pids for _, link in segments._paths(pid)]
        assert not [link for link in links if link.startswith(marks.WAIT_LINK)]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid":1,"rank":0,"text":"","awaited":[1]}'])
def test_garbage_is_no_wait(tmp_path, text):
    path = tmp_path / "wait"
    path.write_bytes(text)
    assert marks.read_wait(str(path)) is None


def test_short_waits_are_not_marked():
    before = len(os.listdir("/proc/self/fd"))
    mark = marks.WaitMark(0)
    mark.note("waiting", {1: 2})
    assert len(os.listdir("/proc/self/fd")) == before

    def is_marked():
        mark.note("waiting", {1: 2})
        return mark._fd >= 0

    until(is_marked)
    found: Any = marks.read_wait(f"/proc/self/fd/{mark._fd}")
    assert found.awaited == {1: 2}
    mark.close()
    assert len(os.listdir("/proc/self/fd")) == before
