"""`gpucoll trace`: the calls of a job's ranks, as tracks of Perfetto."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.track_events import read_trace
from tests.waiting import until

from gpucoll.collectives import Collective
from gpucoll.observe import recording, trace
from gpucoll.observe.recording import LeftOut, Recording, record
from gpucoll.observe.segments import find
from gpucoll.observe.tracks import encode
from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared.spans import SpanKind

SHORT = np.ones(4, np.float32)
NO_PID = 1 << 30
"""The kernel gives smaller numbers."""


class Segment:
    """A communicator of two ranks, made up."""

    class job:  # noqa: N801
        name = ""

    class layout:  # noqa: N801
        ends = 3

    pids = (100, 101, 102)
    world_size = 3
    n_elsewhere = 0

    def number(self, rank: int) -> int:
        return rank


def calls_of(*rows: dict[str, int]) -> Any:
    calls = np.zeros(len(rows), CALL)
    given = {"kind": SpanKind.COLLECTIVE, "collective": Collective.ALL_REDUCE, "operation": 1}
    for place, row in enumerate(rows):
        for name, value in (given | {"root": -1, "size_bytes": 16, "count": 4} | row).items():
            calls[place][name] = value
    return calls


def call(rank, sequence, begun_ns, ended_ns, **more):
    times = {"begun_ns": begun_ns, "ended_ns": ended_ns}
    return {"rank": rank, "sequence": sequence, **times, **more}


def file_of(*rows, left_out=()):
    segment: Any = Segment()
    recorded = Recording([segment], [calls_of(*rows)], list(left_out))
    return b"".join(encode(recorded))


def trace_of(*rows, left_out=()):
    return read_trace(file_of(*rows, left_out=left_out))


def test_a_call_that_waits():
    """Rank 1 comes last: the others wait for it, and arrows lead from its call to theirs."""
    found = trace_of(call(0, 7, 1_000, 9_000), call(1, 7, 6_000, 9_100), call(2, 7, 2_000, 9_050))
    slices = [(b.path[0], b.name, b.time_ns, e.time_ns) for b, e in found.slices()]
    assert sorted(slices) == [
        ("rank 0", "all_reduce", 1_000, 9_000),
        ("rank 0", "moves data", 6_001, 9_000),
        ("rank 0", "waits for rank 1", 1_000, 6_000),
        ("rank 1", "all_reduce", 6_000, 9_100),
        ("rank 2", "all_reduce", 2_000, 9_050),
        ("rank 2", "moves data", 6_001, 9_050),
        ("rank 2", "waits for rank 1", 2_000, 6_000),
    ]
    leaving = {f: e for e in found.events for f in e.flows}
    arriving = {f: e for e in found.events for f in e.ended_flows}
    assert leaving.keys() == arriving.keys()
    assert {(leaving[f].path[0], arriving[f].path[0]) for f in leaving} == {
        ("rank 1", "rank 0"),
        ("rank 1", "rank 2"),
    }
    assert all(leaving[f].time_ns < arriving[f].time_ns for f in leaving)
    arguments = next(e.arguments for e in found.events if e.path[0] == "rank 0" and e.arguments)
    assert arguments == {
        "bytes": 16,
        "dtype": "bool",
        "sequence": 7,
        "elements": 4,
        "op": "sum",
        "last rank": 1,
        "waited_us": 5.0,
    }


def test_a_rank_that_does_not_wait_gets_no_arrow():
    """The root of a broadcast is gone before the last rank comes."""
    rows = (call(0, 1, 0, 2_000), call(1, 1, 50_000, 51_000), call(2, 1, 10, 51_000))
    found = trace_of(*rows)
    assert {e.path[0] for e in found.events if e.ended_flows} == {"rank 2"}


def test_calls_that_overlap_have_lanes():
    rows = [call(0, n, 1_000 * n, 1_000 * n + 2_500) for n in range(4)]
    found = trace_of(*rows)
    slices = [(b.track, b.time_ns, e.time_ns) for b, e in found.slices()]
    assert [(begun, ended) for _, begun, ended in slices] == [
        (1_000 * n, 1_000 * n + 2_500) for n in range(4)
    ]
    assert len({track for track, _, _ in slices}) == 3
    assert {b.path for b, _ in found.slices()} == {("rank 0", "world")}


def test_messages_parts_and_gpus_have_tracks_of_their_own():
    found = trace_of(
        call(0, 1, 0, 9_000, kind=SpanKind.SEVERAL_HOSTS),
        call(0, 1, 10, 8_000, kind=SpanKind.PART),
        call(0, 2, 10, 8_000, kind=SpanKind.GPU),
        call(0, 0, 10, 8_000, kind=SpanKind.SEND, root=2, count=5),
    )
    shown = [(b.path[1], b.name) for b, _ in found.slices()]
    assert sorted(shown) == [
        ("world", "all_reduce"),
        ("world inside the host", "all_reduce"),
        ("world messages", "send"),
        ("world on GPU", "all_reduce"),
    ]
    (message,) = (e.arguments for e in found.events if e.name == "send")
    assert message == {"bytes": 16, "dtype": "bool", "other rank": 2, "tag": 5}


def test_garbage_is_shown_as_it_is():
    rows = [call(0, 1, 5, 6, collective=200, operation=99, dtype=30_000, root=1 << 40)]
    (begin, _), *_ = trace_of(*rows).slices()
    assert begin.name == "call of kind 200"
    assert begin.arguments["root"] == 1 << 40


def test_what_was_left_out_is_counted():
    missed = [LeftOut(0, 10, np.array([0, 5, 0])), LeftOut(0, 20, np.array([0, 7, 0]))]
    found = trace_of(left_out=missed)
    assert [(e.path, e.kind, e.value) for e in found.events] == [
        (("rank 1", "calls left out"), "count", 0),
        (("rank 1",), "instant", 0),
        (("rank 1", "calls left out"), "count", 5),
        (("rank 1", "calls left out"), "count", 12),
    ]


# --- real ranks -----------------------------------------------------------------------------------


def traced(comm, path, most):
    """Rank 0 traces the job while all ranks make calls, rank 1 the last to each."""
    if comm.rank:
        while comm.all_reduce(SHORT)[0] == comm.world_size - 1:
            pass
        return None
    found = find([os.getpid()])
    done = threading.Event()
    recorded = []

    def watch():
        recorded.append(record(found.segments, 0.3, most))
        done.set()

    thread = threading.Thread(target=watch)
    thread.start()
    while not done.is_set():
        comm.all_reduce(np.zeros(4, np.float32))
    comm.all_reduce(SHORT)
    thread.join()
    path.write_bytes(b"".join(encode(recorded[0])))
    found.close()
    return recorded[0].n_calls, recorded[0].n_left_out


def test_a_job(ranks, tmp_path):
    path = tmp_path / "job.pftrace"
    n_calls, _ = ranks.call(3, traced, path, 1_000)[0]
    found = read_trace(path.read_bytes())
    begun = [b for b, _ in found.slices() if b.name == "all_reduce"]
    assert len(begun) == n_calls > 0
    assert {b.path[0] for b in begun} == {"rank 0", "rank 1", "rank 2"}
    assert {b.arguments["bytes"] for b in begun} == {16}
    assert {b.arguments["dtype"] for b in begun} == {"float32"}
    processes = [track for track in found.tracks.values() if track.pid]
    assert sorted(track.name for track in processes) == ["rank 0", "rank 1", "rank 2"]


def test_memory_is_bounded(ranks, tmp_path):
    path = tmp_path / "job.pftrace"
    n_calls, n_left_out = ranks.call(2, traced, path, 50)[0]
    assert n_calls <= 50
    assert n_left_out > 0
    found = read_trace(path.read_bytes())
    assert max(e.value for e in found.events if e.kind == "count") > 0


def pid_of(comm):
    return os.getpid()


def wait_for(comm, ready, go):
    comm.all_reduce(SHORT)
    ready.touch()
    until(go.exists)
    comm.all_reduce(SHORT)


def run(ranks, tmp_path, path):
    """Return the exit code of the command beside a job of two ranks."""
    ready, go, codes = tmp_path / "ready", tmp_path / "go", []
    pid = ranks.call(2, pid_of)[0]

    def record():
        try:
            until(ready.exists)
            codes.append(trace.main(["--seconds", "0.2", "--out", str(path), str(pid)]))
        finally:
            go.touch()

    thread = threading.Thread(target=record)
    thread.start()
    ranks.call(2, wait_for, ready, go)
    thread.join()
    (code,) = codes
    return code


def test_the_command(ranks, tmp_path, capsys):
    """It finds the job by a process of it, and says what it has written."""
    path = tmp_path / "job.pftrace"
    assert run(ranks, tmp_path, path) == trace.EXIT_WRITTEN
    assert "job.pftrace: " in capsys.readouterr().out
    assert read_trace(path.read_bytes()).tracks


def test_no_job(tmp_path, capsys):
    assert trace.main(["--out", str(tmp_path / "x"), str(NO_PID)]) == trace.EXIT_NONE
    assert f"there is no process {NO_PID} on this host" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "much"])
@pytest.mark.parametrize("option", ["--seconds", "--most"])
def test_a_wrong_number(option, text, capsys):
    with pytest.raises(SystemExit):
        trace.main([f"{option}={text}"])
    said = capsys.readouterr().err
    assert said.startswith(f"gpucoll trace: argument {option}: ")
    assert f"{text!r}" in said
    assert "invalid" not in said  # argparse's own text, which names a function of this package


def test_a_full_disk(ranks, tmp_path, capsys):
    """A device is not removed."""
    assert run(ranks, tmp_path, "/dev/full") == trace.EXIT_FAILED
    expected = "gpucoll trace: /dev/full cannot be written: No space left on device\n"
    assert capsys.readouterr() == ("", expected)
    assert Path("/dev/full").exists()


def test_ctrl_c_ends_the_recording(monkeypatch):
    """What there is, is kept."""
    sleeps = itertools.count()

    def sleep(_: float) -> None:
        if next(sleeps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    looks = itertools.count()

    class Watch:
        def __init__(self, segments: Any) -> None:
            self._segments = segments

        def __enter__(self) -> Watch:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self) -> Any:
            calls = calls_of(call(0, next(looks), 1, 2))
            return [Calls(self._segments[0], calls, np.zeros(3, np.int64))]

    monkeypatch.setattr(recording, "Watch", Watch)
    segment: Any = Segment()
    recorded = record([segment], 1e-9, 100)
    assert recorded.n_calls == 1
    recorded = record([segment], 3600.0, 100_000_000_000)
    assert recorded.calls[0]["sequence"].tolist()[-1] == next(looks) - 1
