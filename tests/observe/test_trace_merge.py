"""Traces of several hosts in one file: their clocks are aligned by the calls that both have."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
from tests.observe.test_trace import SHORT, call, file_of
from tests.track_events import read_trace

from gpucoll.observe import trace
from gpucoll.observe.recording import record
from gpucoll.observe.segments import find
from gpucoll.observe.trace_merge import MergeError, merge
from gpucoll.observe.tracks import encode
from gpucoll.transport.shared.spans import SpanKind


def two_files(folder, seed, offset_ns):
    """Write traces of two hosts with three ranks each; the second clock is behind."""
    chance = random.Random(seed)
    rows: list[list[dict[str, int]]] = [[], []]
    now_ns = 10**9
    for number in range(50):
        begun = [now_ns + chance.randrange(500_000) for _ in range(6)]
        ended = [max(begun) + 1_000 + chance.randrange(30_000) for _ in range(6)]
        now_ns = max(ended)
        for rank in range(6):
            host = rank // 3
            times = (each[rank] - (offset_ns if host else 0) for each in (begun, ended))
            more = {"kind": SpanKind.SEVERAL_HOSTS}
            rows[host].append(call(rank % 3, number, *times, **more))
    paths = [folder / name for name in ("a.pftrace", "b.pftrace")]
    for path, own in zip(paths, rows, strict=True):
        path.write_bytes(file_of(*own))
    return paths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("offset_ns", [0, 123_456_789, -400_000_000])
def test_clocks_are_aligned_within_the_error(tmp_path, seed, offset_ns):
    paths, out = two_files(tmp_path, seed, offset_ns), tmp_path / "both.pftrace"
    (found,) = merge(paths, out)
    assert found.n_calls == 50
    assert abs(found.offset_ns - offset_ns) <= found.error_ns
    assert found.error_ns < 40_000
    both = read_trace(out.read_bytes())
    assert len(both.slices()) == 2 * 3 * 50
    second = read_trace(paths[1].read_bytes())
    moved = {e.time_ns + found.offset_ns for e in second.events}
    assert moved <= {e.time_ns for e in both.events}
    pids = [track.pid for track in both.tracks.values() if track.pid]
    assert len({*pids}) == len(pids) == 6
    assert len(both.clocks) == 3


def test_files_of_other_jobs(tmp_path):
    (first, _), other = two_files(tmp_path, 0, 0), tmp_path / "other.pftrace"
    rows = [call(0, 1, 10, 20, kind=SpanKind.SEVERAL_HOSTS)]
    other.write_bytes(file_of(*rows, call(0, 2, 10**10, 10**10 + 1, kind=SpanKind.SEVERAL_HOSTS)))
    with pytest.raises(MergeError, match=r"contradict each other by .* not of one job"):
        merge([first, other], tmp_path / "out")
    other.write_bytes(file_of(call(0, 1, 10, 20)))
    with pytest.raises(MergeError, match="have no call in common"):
        merge([first, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"{}", b"\x0a", b"\x0a\xff\xff\xff", os.urandom(200), b"\x0b"])
def test_garbage(tmp_path, content, capsys):
    path = tmp_path / "x"
    path.write_bytes(content)
    given = ["--merge", str(path), str(path), "--out", str(tmp_path / "out")]
    assert trace.main(given) == trace.EXIT_FAILED
    assert capsys.readouterr().err.startswith(f"gpucoll trace: {path} was not written by")


def traced(comm, path):
    """The first rank of each host records while all make calls."""
    local = comm._group.host.rank
    found = find([os.getpid()] if local == 0 else [])
    stop = threading.Event()

    def watch():
        recording = record(found.segments, 0.3, 1_000)
        (path / f"{comm.rank}").write_bytes(b"".join(encode(recording)))
        stop.set()

    thread = threading.Thread(target=watch)
    if local == 0:
        thread.start()
    else:
        stop.set()
    while comm.all_reduce(np.float32(stop.is_set())) < comm.world_size:
        comm.all_reduce(SHORT)
    if local == 0:
        thread.join()
    found.close()


def test_real_hosts(hosts, tmp_path, capsys):
    """Both are this machine, so that their clocks do not differ."""
    hosts.call("aab", traced, tmp_path)
    paths, out = [tmp_path / "0", tmp_path / "2"], tmp_path / "both.pftrace"
    (found,) = merge(paths, out)
    assert abs(found.offset_ns) <= found.error_ns
    both = read_trace(out.read_bytes())
    names = sorted(track.name for track in both.tracks.values() if track.pid)
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert both.slices()
    assert trace.main(["--merge", *map(str, paths), "--out", str(out)]) == trace.EXIT_WRITTEN
    assert "calls in common" in capsys.readouterr().out
