"""`gpucoll metrics`: what is counted, and how Prometheus gets it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from gpucoll.collectives import Collective
from gpucoll.errors import MismatchError, PeerLostError
from gpucoll.observe import metrics
from gpucoll.observe.counters import METRICS, Durations, Numbers
from gpucoll.observe.follow import Follower
from gpucoll.observe.meetings import Meetings
from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.spans import SpanKind

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHORT = np.ones(4, np.float32)


def value(samples, name, /, **labels):
    """Return the sum of a metric's values that have these labels; None if there are none."""
    found = [
        one.value
        for one in samples
        if one.metric.name == name
        and labels.items() <= dict(zip(one.label_names, one.labels, strict=True)).items()
    ]
    return sum(found) if found else None


def calls_of(*rows, missed=(0, 0)):
    """Return calls of {rank, kind, collective, size, begun, ended}."""
    calls = np.zeros(len(rows), CALL)
    names = ("rank", "kind", "collective", "size_bytes", "begun_ns", "ended_ns")
    for place, name in enumerate(names):
        calls[name] = [row[place] for row in rows]
    return Calls(None, calls, np.array(missed))  # type: ignore[arg-type]


# --- numbers --------------------------------------------------------------------------------------


def test_calls_are_counted():
    numbers = Numbers("7")
    one, whole, part, gpu = (
        *(SpanKind.COLLECTIVE, SpanKind.SEVERAL_HOSTS),
        *(SpanKind.PART, SpanKind.GPU),
    )
    reduce, barrier = Collective.ALL_REDUCE, Collective.BARRIER
    rows = [
        (0, one, reduce, 100, 0, 1000),
        (0, one, reduce, 128, 0, 1001),
        (1, whole, reduce, 100, 0, 10**12),
        (1, part, reduce, 100, 0, 5),
        (1, gpu, barrier, 0, 0, 5),
        (1, one, Collective.ALL_REDUCE_LIST, 3, 0, 5),
        (1, SpanKind.SEND, 0, 8, 0, 5),
    ]
    for _ in range(2):
        numbers.add_calls("0", ["4", "5"], calls_of(*rows, missed=(0, 3)))
    samples = [*numbers.samples()]
    calls = "gpucoll_calls_total"
    assert value(samples, calls, job_id="7", communicator="0", rank="4") == 2 * 2
    assert value(samples, calls, rank="5", collective="all_reduce", device="host") == 2 * 2
    assert value(samples, calls, rank="5", collective="barrier", device="gpu") == 2
    assert value(samples, calls, rank="5", collective="unknown") == 2 * 3
    assert value(samples, calls, rank="5", collective="send", device="host") == 2
    assert value(samples, calls) == 2 * (6 + 3)
    assert value(samples, "gpucoll_input_bytes_total", rank="4") == 2 * 228
    (durations,) = [each.value for each in samples if each.labels[-1] == "128"]
    assert isinstance(durations, Durations)
    assert [*np.flatnonzero(durations.counts)] == [0, 1, 27]
    assert durations.counts.sum() == 2 * 3
    assert durations.seconds == pytest.approx(2 * (1000 + 1e-6 + 1.001e-6))
    assert {each.labels[-1] for each in samples if isinstance(each.value, Durations)} == {
        *("0", "4", "8", "128")
    }


def test_no_calls_are_no_series():
    numbers = Numbers("7")
    numbers.add_calls("0", ["0", "1"], calls_of())
    assert value(numbers.samples(), "gpucoll_calls_total") is None


def test_waits_are_counted():
    calls = np.zeros((1, 3), CALL)
    calls["begun_ns"], calls["ended_ns"] = [10, 20, 50], [60, 61, 62]
    numbers = Numbers("7")
    numbers.add_meetings("0", ["0", "1", "2"], Meetings(calls))
    samples = [*numbers.samples()]
    found = {
        name: [value(samples, f"gpucoll_{name}_total", rank=str(rank)) for rank in range(3)]
        for name in ("wait_seconds", "held_up_seconds", "last_arrivals")
    }
    assert found["wait_seconds"] == pytest.approx([40e-9, 30e-9, 0])
    assert found["held_up_seconds"] == pytest.approx([0, 0, 30e-9])
    assert found["last_arrivals"] == [0, 0, 1]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Abort.MESSAGE_DEADLINE, "deadline"),
        (Abort.LOST, "lost"),
        (Abort.BACKEND, "other"),
        (200, "other"),
    ],
)
def test_aborts_are_counted_by_reason(code, reason):
    numbers = Numbers("7")
    assert value(numbers.samples(), "gpucoll_aborts_total", reason=reason) == 0
    numbers.add_abort(code)
    assert value(numbers.samples(), "gpucoll_aborts_total", reason=reason) == 1


# --- real jobs ------------------------------------------------------------------------------------


def work(comm, go, kind):
    """Wait for the file `go`.1, make three calls and what `kind` says, and wait for `go`.2."""
    until(Path(f"{go}.1").exists)
    for _ in range(3):
        comm.all_reduce(SHORT)
    if kind == "mismatch":
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(4 + comm.rank))
    if kind == "abort" and comm.rank == 0:
        comm.abort()
    until(Path(f"{go}.2").exists)
    if kind != "abort":
        comm.barrier()


@pytest.fixture
def job(rank_server, tmp_path):
    """Start a job of two ranks that wait for a file; afterwards they are let go."""
    started: list[Any] = []

    def start(kind="calls", count=2):
        go, pool = tmp_path / f"go{len(started)}", rank_server.fork(count)
        started.append((go, pool))
        pool.start(work, go, kind)
        return go, [rank.pid for rank in pool.ranks]

    yield start
    for go, pool in started:
        for number in (1, 2):
            Path(f"{go}.{number}").touch()
        with pool:
            pool.collect()


def follow(follower, condition):
    """Look at jobs until the samples fulfil a condition; return them."""

    def is_there():
        follower.look()
        return condition(follower.samples)

    until(is_there)
    return follower.samples


def test_a_job_from_its_beginning_to_its_end(job):
    go, pids = job()
    follower = Follower(lambda: pids, kept_s=0.3)
    try:
        states = follow(follower, lambda found: value(found, "gpucoll_ranks") == 2)
        assert value(states, "gpucoll_job_stuck") == 0
        assert value(states, "gpucoll_communicator_ranks", communicator="0", name="") == 2
        assert value(states, "gpucoll_process_cpu_seconds_total", rank="1") > 0
        assert value(states, "gpucoll_process_resident_memory_bytes", rank="1") > 1 << 20
        Path(f"{go}.1").touch()
        named = {"job_id": str(pids[0]), "collective": "all_reduce"}
        found = follow(follower, lambda found: value(found, "gpucoll_calls_total", **named) == 6)
        assert value(found, "gpucoll_input_bytes_total", collective="all_reduce") == 6 * 16
        last = [value(found, "gpucoll_last_arrivals_total", rank=str(rank)) for rank in range(2)]
        assert sum(last) == 3
        Path(f"{go}.2").touch()
        # The last call is counted although the communicator is closed by then.
        ended = follow(follower, lambda found: value(found, "gpucoll_ranks") is None)
        assert value(ended, "gpucoll_calls_total", collective="barrier") == 2
        assert value(ended, "gpucoll_calls_total", **named) == 6
        follow(follower, lambda found: found == ())
    finally:
        follower.close()


@pytest.mark.soak
def test_two_jobs_are_told_apart(job):
    (go, here), (_, there) = job(), job(count=3)
    follower = Follower(lambda: here + there)
    try:
        Path(f"{go}.1").touch()
        found = follow(follower, lambda found: value(found, "gpucoll_ranks") == 5)
        assert value(found, "gpucoll_ranks", job_id=str(here[0])) == 2
        assert value(found, "gpucoll_ranks", job_id=str(there[0])) == 3
        assert value(found, "gpucoll_wait_seconds_total", job_id=str(there[0]), rank="2") == 0
    finally:
        follower.close()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("mismatch", "gpucoll_mismatches_total", {}),
        ("abort", "gpucoll_aborts_total", {"reason": "requested"}),
    ],
)
def test_failures_are_counted(job, kind, name, labels):
    go, pids = job(kind)
    follower = Follower(lambda: pids)
    try:
        follow(follower, lambda found: value(found, name, **labels) == 0)
        Path(f"{go}.1").touch()
        follow(follower, lambda found: value(found, name, **labels) == 1)
        follower.look()
        assert value(follower.samples, name, **labels) == 1
    finally:
        follower.close()


def shrink(comm, go):
    until(Path(f"{go}.1").exists)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        comm.barrier()
    with comm.shrink() as rest:
        rest.all_reduce(SHORT)
        until(Path(f"{go}.2").exists)
        rest.barrier()


@pytest.mark.soak
def test_a_job_that_shrinks_goes_on_as_the_same(rank_server, tmp_path):
    go, pool = tmp_path / "go", rank_server.fork(3)
    with pool:
        pool.start(shrink, go)
        pids = [rank.pid for rank in pool.ranks]
        follower = Follower(lambda: pids)
        try:
            follow(follower, lambda found: value(found, "gpucoll_ranks") == 3)
            Path(f"{go}.1").touch()
            found = follow(follower, lambda found: value(found, "gpucoll_shrinks_total") == 1)
            assert {each.labels[0] for each in found} == {str(pids[0])}
            assert value(found, "gpucoll_aborts_total", reason="lost") == 1
        finally:
            follower.close()
            Path(f"{go}.2").touch()
            pool.collect()


def mapped_segments():
    return Path("/proc/self/maps").read_text().count("gpucoll-segment")


@pytest.mark.soak
def test_it_leaves_nothing(job):
    _, pids = job()
    follower = Follower(lambda: pids)
    before = len(os.listdir("/proc/self/fd")), mapped_segments()
    follow(follower, lambda found: value(found, "gpucoll_ranks") == 2)
    for _ in range(3):
        follower.look()
    follower.close()
    assert (len(os.listdir("/proc/self/fd")), mapped_segments()) == before


def see_between_hosts(comm):
    follower = Follower(lambda: [os.getpid()])
    follower.look()
    comm.barrier()
    comm.all_reduce(SHORT)
    comm.barrier()
    follower.read()
    found = follower.samples
    follower.close()
    (group,) = [each.labels[-1] for each in found if "group" in each.label_names]
    ranks = {each.labels[2] for each in found if each.metric.name == "gpucoll_calls_total"}
    name = "gpucoll_calls_total"
    return group, ranks, value(found, name, collective="all_reduce", rank=str(comm.rank))


def test_one_of_several_hosts(hosts):
    here, there = hosts.call("ab", see_between_hosts)
    assert here[0] == there[0] != ""
    assert (here[1:], there[1:]) == (({"0"}, 1), ({"1"}, 1))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def exporter():
    """Start the command; afterwards it is ended."""
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    started: list[Any] = []

    def start(*arguments):
        command = [sys.executable, "-m", "gpucoll", "metrics", *map(str, arguments)]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(running)
        return running

    yield start
    for running in started:
        running.kill()
        running.wait()
        running.stderr.close()


def parsed(text):
    """Return the samples of a text in Prometheus's format, by name; counters never repeat."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    samples = [
        one for family in parser.text_string_to_metric_families(text) for one in family.samples
    ]
    keys = [(one.name, *sorted(one.labels.items())) for one in samples]
    assert len(keys) == len({*keys})
    return samples


def values(text, name, /, **labels):
    return [
        one.value
        for one in parsed(text)
        if one.name == name and labels.items() <= one.labels.items()
    ]


def test_the_endpoint_is_scraped(job, exporter):
    go, pids = job()
    running = exporter(*pids, "--listen", "127.0.0.1:0", "--interval", "0.2")
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", running.stderr.readline())

    def scraped():
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())

    until(lambda: values(scraped(), "gpucoll_job_info", job_id=str(pids[0])))
    Path(f"{go}.1").touch()
    calls = {"collective": "all_reduce", "device": "host"}
    until(lambda: sum(values(scraped(), "gpucoll_calls_total", **calls)) == 6)
    text = scraped()
    name = "gpucoll_call_duration_seconds"
    assert values(text, f"{name}_count", size_bytes="16", **calls) == [6]
    buckets = values(text, f"{name}_bucket", size_bytes="16", **calls)
    assert buckets == sorted(buckets)
    assert buckets[-1] == 6
    assert values(text, f"{name}_sum", size_bytes="16", **calls)[0] > 0
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    assert running.stderr.read() == ""


def test_the_textfile(job, exporter, tmp_path):
    _, pids = job()
    folder = tmp_path / "collector"
    folder.mkdir()
    running = exporter(*pids, "--textfile", folder, "--interval", "0.1")
    path = folder / metrics.FILE_NAME
    until(
        lambda: path.exists() and values(path.read_text(), "gpucoll_ranks", state="outside") == [2]
    )
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == metrics.EXIT_INTERRUPTED
    assert [*folder.iterdir()] == []


@pytest.mark.soak
def test_once(job, capsys, tmp_path):
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    _, pids = job()
    until(lambda: bool(printed_once(capsys, pids)))
    assert (
        metrics.main([str(pids[0]), "--once", "--interval", "0.1", "--textfile", str(tmp_path)])
        == 0
    )
    assert values((tmp_path / metrics.FILE_NAME).read_text(), "gpucoll_build_info") == [1]


def printed_once(capsys, pids):
    assert metrics.main([str(pids[0]), "--once", "--interval", "0.1"]) == 0
    return values(capsys.readouterr().out, "gpucoll_job_stuck", job_id=str(pids[0]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "nowhere to export to: give --textfile DIR or --listen HOST:PORT"),
        (["--listen", "9400"], "HOST:PORT expected, such as 127.0.0.1:9400; got '9400'"),
        (["--listen", "127.0.0.1:70000"], "HOST:PORT expected"),
        (["--listen", "127.0.0.1:0", "--once"], "--once writes a file or prints"),
        (["--textfile", "/no/such/folder"], "/no/such/folder is no folder"),
        (["--once", "--interval", "0"], "a number of seconds from 0.1 to 3600; got '0'"),
        (["--once", "--interval", "often"], "a number of seconds from 0.1 to 3600; got 'often'"),
    ],
)
def test_a_wrong_command_line(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        metrics.main(arguments)
    assert ended.value.code == metrics.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith("gpucoll metrics: ")
    assert text in said


def test_without_prometheus_client(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SystemExit) as ended:
        metrics.main(["--once"])
    assert ended.value.code == metrics.EXIT_USAGE
    assert "pip install 'gpucoll[observe]'" in capsys.readouterr().err


def test_a_port_in_use(capsys):
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = metrics.main([str(os.getpid()), "--listen", f"127.0.0.1:{port}"])
    assert code == metrics.EXIT_FAILED
    said = capsys.readouterr().err
    assert said == f"gpucoll metrics: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_folder_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")

    def refuse(path, registry):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(client, "write_to_textfile", refuse)
    code = metrics.main([str(os.getpid()), "--textfile", str(tmp_path)])
    assert code == metrics.EXIT_FAILED
    assert "Permission denied" in capsys.readouterr().err


def test_a_warning_of_an_open_address(exporter):
    running = exporter(os.getpid(), "--listen", "0.0.0.0:0")
    assert "0.0.0.0 is no loopback address, and there is no authentication" in (
        running.stderr.readline()
    )


# --- documents ------------------------------------------------------------------------------------


def exported_names():
    """Return the names of all series."""
    names = {"gpucoll_build_info"}
    for metric in METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    return names


def test_names_follow_the_conventions():
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter")
        assert "job" not in metric.labels  # Prometheus's own


def test_the_table_of_metrics_is_complete():
    rows = re.findall(
        r"^\| `(gpucoll_\w+)` \| (\w+) \| (.*?) \|", (DOCS / "watching.md").read_text(), re.M
    )
    assert {name: (kind, labels) for name, kind, labels in rows} == {
        metric.name: (metric.kind, ", ".join(f"`{label}`" for label in ("job_id", *metric.labels)))
        for metric in METRICS.values()
    } | {"gpucoll_build_info": ("gauge", "`version`")}


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads((DOCS / "grafana_dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if "query" in each and isinstance(each["query"], dict)
    ]
    known = exported_names()
    assert len(queries) >= len(panels) > 8
    for query in queries:
        found = re.findall(r"\bgpucoll_\w+", query)
        assert found, query
        assert {*found} <= known, query
        assert query.count("(") == query.count(")")
    labels = {label for metric in METRICS.values() for label in metric.labels} | {"job_id"}
    asked = {
        label
        for query in queries
        for each in re.findall(r"\bby \(([^)]*)\)", query)
        for label in re.split(r",\s*", each)
    }
    assert asked <= labels | {"le", "instance"}
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
