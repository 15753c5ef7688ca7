"""`gpucoll top` on ranks of which one makes the others wait: in a terminal, and in a pipe."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.waiting import is_stopped, until

from gpucoll.observe import gpus, table, top
from gpucoll.observe.look import RankLook
from gpucoll.observe.processes import Process
from gpucoll.observe.sampler import Communicator, RankRow, Sampler, Snapshot, state_of
from gpucoll.observe.segments import find
from gpucoll.observe.watch import CALL

COMMAND = [sys.executable, "-m", "gpucoll", "top"]
NO_PID = 1 << 30
SHORT = np.ones(4, np.float32)

OBSERVED_S = 150.0
"""How long a job goes on at most: longer than those who look at it may take."""


def wait_elsewhere(comm, go):
    """Let rank 1 come when the file `go` is there, the others wait for it."""
    comm.all_reduce(SHORT)
    if comm.rank == 1:
        until(go.exists, limit_s=OBSERVED_S)
    comm.barrier()


def train(comm, go):
    """Rank 1 is a little late to each call."""
    with comm.split(comm.rank // 2) as half:
        while not comm.all_reduce(int(go.exists()), "max"):
            if comm.rank == 1:
                time.sleep(0.02)  # its part of the work
            half.barrier()


def has_communicator(pid):
    """Return whether a process has got its first communicator."""
    found = find([pid])
    found.close()
    return bool(found.segments)


@pytest.fixture
def job(rank_server, tmp_path):
    """Ranks in a function that ends when the file `go` is there; their processes."""
    go, pools = tmp_path / "go", list[Any]()

    def start(function, count=4):
        pool = rank_server.fork(count)
        pools.append(pool)
        pool.start(function, go, timeout_s=OBSERVED_S)
        pids = [rank.pid for rank in pool.ranks]
        until(lambda: all(map(has_communicator, pids)))
        return pids

    yield start
    go.touch()
    for pool in pools:
        with pool:
            pool.collect()


def sampled_until(sampler, condition):
    """Look until the snapshot is as expected; return it."""
    found: list[Snapshot] = []

    def is_there():
        sampler.find()
        sampler.sample()
        found[:] = [sampler.snapshot(30.0)]
        return condition(found[0])

    until(is_there)
    return found[0]


def test_a_rank_that_is_elsewhere(job):
    pids = job(wait_elsewhere)
    with Sampler(pids[2]) as sampler:
        shown = sampled_until(sampler, lambda one: sum(row.waiting > 0.5 for row in one.rows) == 3)
    assert [row.rank for row in shown.rows] == [0, 1, 2, 3]
    assert [row.pid for row in shown.rows] == pids
    assert [row.held_up > 0.5 for row in shown.rows] == [False, True, False, False]
    assert shown.rows[0].state.startswith("in barrier")
    assert shown.rows[1].state in ("sleeps", "computes")
    assert all(row.rss_bytes > 1 << 20 for row in shown.rows)
    assert shown.communicators[0].slowest == 1


def is_late_in_all(shown):
    """Return whether rank 1 is seen to be late, and calls of all ranks and communicators."""
    late = max(shown.rows, key=lambda row: row.held_up)
    is_late = late.rank == 1 and late.held_up > 0.1
    has_calls = all(row.calls_per_s > 0 and row.bytes_per_s > 0 for row in shown.rows)
    is_named = any(one.slowest == 1 for one in shown.communicators)
    return is_late and has_calls and is_named and len(shown.communicators) == 3


def test_a_rank_that_is_late_each_time(job):
    pids = job(train)
    with Sampler(pids[0]) as sampler:
        shown = sampled_until(sampler, is_late_in_all)
    assert shown.communicators[0].last in ("all_reduce", "split")
    assert sorted(one.n_ranks for one in shown.communicators) == [2, 2, 4]
    assert sampler.calls_of(pids[0]).size == 0  # closed


ALIVE = Process(1, "python", "S", 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "changed", "expected"),
    [
        ("waiting in all_reduce(op=sum) (#3)", {"since_s": 12.34}, "in all_reduce, 12.3 s"),
        ("in all_reduce(op=sum) (#3)", {"since_s": 0.1}, "in all_reduce"),
        ("waiting in recv or probe(source=1, tag=2)", {}, "in recv or probe"),
        ("waiting in a call (#3)", {}, "in a call"),
        ("in a call that cannot be read", {}, "in a call"),
        (
            "waiting for other hosts, barrier()",
            {"awaits_other_hosts": True},
            "waits for other hosts",
        ),
        ("waiting on the GPU in all_reduce() (#3)", {"stream": "in"}, "GPU: in all_reduce"),
        (
            "waiting on the GPU for work before all_reduce() (#3)",
            {"stream": "before"},
            "GPU: before all_reduce",
        ),
        ("in no call of this communicator", {"is_in_call": False}, "sleeps"),
        ("no longer in it", {"is_in_call": False, "closed": ""}, "has closed"),
    ],
)
def test_states(text, changed, expected):
    look = replace(RankLook(0, 1, 1, text, True), **changed)
    assert state_of([look], ALIVE, 0.0) == expected


def test_states_of_processes():
    assert state_of([], None, 0.0) == state_of([], replace(ALIVE, state="Z"), 0.0) == "has ended"
    assert state_of([], replace(ALIVE, state="T"), 0.0) == "stopped"
    assert state_of([], ALIVE, 0.9) == "computes"


# --- text -----------------------------------------------------------------------------------------

ROW = RankRow(1, 4711, "in all_reduce, 12.3 s", 123456.0, 2.5e9, 0.9, 0.5, 0.123, 1.5, 130 << 20)
SHOWN = Snapshot(
    "train.py",
    [ROW, RankRow(0, 9, "computes", 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)],
    [
        Communicator("all ranks", 2, 123456.0, 1, 0.123, "all_reduce", 4096),
        Communicator("half", 2, 0.0, None, 0.0, "", 0),
    ],
    True,
    6,
    1,
)
PLAIN = """\
NOW  2 ranks of train.py, 6 more on other hosts (1 more job: gpucoll top PID)
                                                         in         makes
rank  process  state                  calls/s   GB/s  calls  waits   wait    CPU       RSS
   1     4711  in all_reduce, 12.3 s     123k   2.50    90%    50%    12%   150%   130 MiB
   0        9  computes                   2.0      -      -      -      -     0%       0 B
communicator  slowest of the last 10 s     calls/s  ranks  last call
all ranks     rank 1 made others wait 12%     123k      2  all_reduce, 4.0 KiB
half          -                                  0      2
More calls than ranks note: calls/s is exact, all else is of the newest calls."""


def test_plain_text():
    assert "\n".join(table.plain_lines(SHOWN, "makes-wait", "NOW")) == PLAIN


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_every_line_fits(width):
    made = table.Table(SHOWN, width)
    lines = [*made.headings(), *map(made.row, SHOWN.rows)]
    assert all(len(line) <= max(width, 30) for line in lines)
    assert made.place("rank") == (0, 4)


def test_sorting():
    def sorted_by(*how):
        return [row.rank for row in table.sort_rows(SHOWN.rows, *how)]

    assert sorted_by("rank") == sorted_by("calls", True) == sorted_by("state") == [0, 1]
    assert sorted_by("calls") == sorted_by("rank", True) == sorted_by("cpu") == [1, 0]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (table.of_number, 0, "0"),
        (table.of_number, 2.34, "2.3"),
        (table.of_number, 999, "999"),
        (table.of_number, 1234, "1.2k"),
        (table.of_number, 1.5e7, "15.0M"),
        (table.of_bytes, 4, "4 B"),
        (table.of_bytes, 1 << 20, "1.0 MiB"),
        (table.of_bytes, 130 << 20, "130 MiB"),
        (table.of_time, 1.5e-6, "1.5 us"),
        (table.of_time, 0.25, "250 ms"),
        (table.of_time, 2.5, "2.50 s"),
        (table.of_share, 0.004, "-"),
        (table.of_share, 1.0, "100%"),
    ],
)
def test_numbers(function, value, text):
    assert function(value) == text


# --- the screen, drawn without a terminal ---------------------------------------------------------

MANY = replace(SHOWN, rows=[replace(ROW, rank=rank, pid=1000 + rank) for rank in range(64)])


@pytest.fixture
def drawn():
    """Draw a view; return its lines."""
    console = pytest.importorskip("rich.console", reason="the screen needs rich")

    def draw(view, shown, width, height):
        text = io.StringIO()
        group = view.draw(shown, lambda pid: np.zeros(0, CALL), width, height)
        console.Console(file=text, width=width, height=height).print(group)
        lines = text.getvalue().splitlines()
        assert len(lines) == height
        assert all(len(line) <= width for line in lines)
        return lines

    return draw


@pytest.mark.parametrize("size", [(20, 6), (40, 10), (80, 24), (120, 40), (200, 100)])
def test_every_rank_can_be_reached(drawn, size):
    from gpucoll.observe.screen import View

    view, seen = View(), set()
    view.press("down")  # nothing is drawn yet
    drawn(view, MANY, *size)
    for key in ["home", *["page down"] * 64, "up", "end"]:
        assert view.press(key)
        rows = [line.split() for line in drawn(view, MANY, *size)]
        seen |= {int(row[0]) for row in rows if row and row[0].isdecimal()}
    assert seen == {*range(64)}
    if size == (80, 24):
        assert drawn(view, MANY, *size)[-1].endswith("-64 of 64")


def test_keys_of_the_screen(drawn):
    from gpucoll.observe.screen import View

    view, size = View(), (80, 24)
    drawn(view, SHOWN, *size)
    for key, sort in [("s", "process"), ("<", "rank"), ("<", "rss"), ("s", "rank")]:
        view.press(key)
        assert view.sort == sort
    view.press("r")
    assert [line.split()[0] for line in drawn(view, SHOWN, *size)[4:6]] == ["1", "0"]
    assert view.press("?")  # means nothing
    assert view.press("p")
    assert "paused" in drawn(view, SHOWN, *size)[0]
    view.press("home")
    view.press("enter")
    assert view.pid == 4711
    ended = replace(SHOWN, rows=SHOWN.rows[1:])
    assert drawn(view, ended, *size)[-1].startswith("q quit  s sort")  # all ranks again
    assert not view.press("q")


# --- GPUs -----------------------------------------------------------------------------------------


class NVMLError(Exception):
    """What pynvml raises."""


def library(**changed):
    """Return what stands for pynvml: two GPUs, of which process 7 uses both."""
    one = SimpleNamespace(pid=7, usedGpuMemory=1 << 30)
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda place: place,
        "nvmlDeviceGetUtilizationRates": lambda place: SimpleNamespace(gpu=40 + place),
        "nvmlDeviceGetComputeRunningProcesses": lambda place: [one],
    }
    return SimpleNamespace(**functions | changed)


def fails(*_):
    raise NVMLError


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, gpus.GpuUse(0.41, 2 << 30)),
        ({"nvmlInit": fails}, None),
        ({"nvmlDeviceGetCount": fails}, None),
        ({"nvmlDeviceGetUtilizationRates": fails}, None),
    ],
)
def test_gpus(monkeypatch, changed, expected):
    monkeypatch.setitem(sys.modules, "pynvml", library(**changed))
    seen = gpus.Gpus()
    seen.read()
    assert seen.used_by(7) == expected
    assert seen.used_by(8) is None
    seen.close()


def test_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen = gpus.Gpus()
    seen.read()
    assert seen.used_by(7) is None


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.soak
def test_in_a_pipe(job):
    pids = job(wait_elsewhere, 2)
    ended = subprocess.run(
        [*COMMAND, str(pids[0]), "--count", "2", "--interval", "0.3", "--sort", "makes-wait"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = ended.stdout.split("\n\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  2 ranks of ", first)
    lines = second.splitlines()
    assert lines[2].split()[:2] == ["rank", "process"]
    assert lines[3].split()[:2] == ["1", str(pids[1])]
    assert "\x1b" not in ended.stdout


def test_no_job(capsys):
    assert top.main([str(NO_PID)]) == 2
    expected = f"gpucoll top: there is no process {NO_PID} on this host\n"
    assert capsys.readouterr() == ("", expected)


def test_bad_interval(capsys):
    with pytest.raises(SystemExit) as ended:
        top.main(["--interval", "0"])
    assert ended.value.code == 2
    expected = "argument --interval: a number of seconds from 0.1 to 3600; got '0'"
    assert expected in capsys.readouterr().err


@pytest.fixture
def waiting(job):
    """Four processes, of which three wait for rank 1."""
    return job(wait_elsewhere)


@pytest.fixture
def terminals():
    """Start a command in a terminal that shows a job."""
    pytest.importorskip("rich", reason="the screen needs rich")
    pytest.importorskip("pyte", reason="a terminal in a test needs pyte")
    from tests.observe.terminals import Terminal

    started: list[Terminal] = []

    def start(pids, **environment):
        command = [*COMMAND, str(pids[0]), "--interval", "0.3"]
        started.append(Terminal(command, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def terminal(waiting, terminals):
    """A terminal that shows the ranks that wait; its shell has exported its first size."""
    return terminals(waiting, COLUMNS="80", LINES="24")


def row_of(lines, rank):
    """Return the words of a rank's line."""
    return next(line.split() for line in lines if re.match(rf" *{rank} +\d+ ", line))


def test_the_screen(terminal, waiting):
    lines = terminal.until("100%", "q quit", "rank 1 made others wait")
    assert lines[0].startswith("gpucoll top  4 ranks of ")
    assert lines[3].split()[:4] == ["rank", "process", "state", "calls/s"]
    assert [row_of(lines, rank)[1] for rank in range(4)] == list(map(str, waiting))
    at = next(place for place, line in enumerate(lines) if row_of(lines, 1) == line.split())
    cells = terminal.screen.buffer[at].values()
    assert {each.fg for each in cells if each.data != " "} == {"brown"}  # as pyte names yellow
    assert terminal.screen.buffer[at + 1][3].fg == "default"

    terminal.press("sssssssr")  # by "makes wait", upwards
    terminal.until("q quit")
    terminal.press("p")
    terminal.until("paused", "p go on")
    terminal.press("p")
    terminal.resize(40, 10)
    terminal.until("q quit  s sort", "rank state")
    assert all(len(line) <= 40 for line in terminal.lines)
    terminal.resize(80, 24)
    terminal.press("r")
    terminal.until("process state")

    terminal.press("\x1b[B\r")
    terminal.until("its stack", "Esc all ranks", f"process {waiting[1]}")
    terminal.press("\x1b")
    terminal.until("Enter details")
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.is_restored


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_the_terminal_is_restored(terminal, sent, code):
    terminal.until("q quit")
    assert terminal.end(sent) == code
    assert terminal.is_restored


@pytest.mark.soak
def test_it_can_be_stopped(terminal):
    terminal.until("q quit")
    terminal.press("\x1a")  # Ctrl-Z
    until(lambda: is_stopped(terminal.process.pid))
    terminal.read()
    assert terminal.is_restored
    terminal.screen.reset()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until("gpucoll top", "q quit")
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.is_restored


@pytest.mark.soak
def test_without_colours(waiting, terminals):
    shown = terminals(waiting, NO_COLOR="1")
    shown.until("rank 1 made others wait", "q quit")
    assert {cell.fg for line in shown.screen.buffer.values() for cell in line.values()} == {
        "default"
    }


@pytest.mark.soak
def test_the_end_of_the_job(terminal, tmp_path):
    terminal.until("q quit")
    (tmp_path / "go").touch()
    assert terminal.end() == 0
    assert "gpucoll top: the job has ended" in "\n".join(terminal.lines)
    assert terminal.is_restored
