"""However the command is ended, nothing is left: no rank, no file."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 20.0
ENDLESS = ["--ranks", "2", "-b", "4", "-e", "1M", "-i", "4", "-n", "5", "-w", "1", "--rounds", "3"]


def children(pid):
    """Return the processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def measuring(tmp_path):
    """Return the command in the middle of measuring, and descriptors of its ranks."""
    store, temporary = tmp_path / "store", tmp_path / "temporary"
    store.mkdir()
    temporary.mkdir()
    environment = {
        **os.environ,
        "BENCH_DOUBLE_STORE": str(store / "own"),
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    double = Path(__file__).with_name("double_command.py")
    command = [sys.executable, str(double), *ENDLESS]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            while "(elements)" not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
            ranks = [os.pidfd_open(pid) for pid in children(process.pid)]
            assert len(ranks) == 2
            yield process, ranks
            for rank in ranks:
                ended, _, _ = select.select([rank], [], [], DEADLINE_S)
                assert ended, "a rank is still there"
                os.close(rank)
        finally:
            process.kill()
    if process.returncode != -signal.SIGKILL:
        assert not list(temporary.iterdir())


def test_ctrl_c(measuring):
    process, _ = measuring
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert error == "gpucoll-bench: interrupted; every rank was ended\n"


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_terminated(measuring, sent):
    process, _ = measuring
    process.send_signal(sent)
    _, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + sent
    assert error == ""


def test_killed(measuring):
    process, _ = measuring
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_nobody_reads_any_more(measuring):
    process, _ = measuring
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 1
    assert process.stderr.read() == ""
