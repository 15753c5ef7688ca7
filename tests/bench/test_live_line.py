"""The line that shows how far a run is, on a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

DOUBLE = str(Path(__file__).with_name("double_command.py"))
STEP = re.compile(r"^(\[[# ]{16}\] )?\d+/\d+(, [\w. ]+ left)?: all_reduce float32 sum \d+ B, gpuc")
TEN_SIZES = [
    "--ranks",
    "2",
    "-b",
    "4",
    "-e",
    "40",
    "-i",
    "4",
    "-n",
    "5",
    "-w",
    "1",
    "--rounds",
    "3",
]
ENDLESS = [*TEN_SIZES[:-1], "1000000"]  # one size, whose line stays on the screen


@pytest.fixture
def terminals(tmp_path):
    """Start the command on the double in a terminal."""
    pytest.importorskip("pyte", reason="a terminal in a test needs pyte")
    from tests.observe.terminals import Terminal

    (tmp_path / "store").mkdir()
    started: list[Terminal] = []

    def start(width, *arguments, command=()):
        environment = {
            "BENCH_DOUBLE_STORE": str(tmp_path / "store" / "own"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "COLUMNS": "",
        }
        words = [*command, sys.executable, DOUBLE, *arguments]
        started.append(Terminal(words, width, 50, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


def last_line(terminal):
    return [line for line in terminal.lines if line][-1]


def until_line(terminal):
    """Read until the screen's last line is that of the progress."""
    terminal.until("(elements)")
    while not STEP.match(last_line(terminal)):
        terminal.until(" B, gpuc")
        terminal.read(0.05)


@pytest.mark.parametrize("width", [48, 120])
def test_ctrl_c_leaves_a_clean_line(terminals, width):
    terminal = terminals(width, *ENDLESS)
    until_line(terminal)
    assert ("[" in last_line(terminal)) is (width >= 80)
    terminal.press("\x03")
    assert terminal.end() == 130
    assert last_line(terminal) == "gpucoll-bench: interrupted; every rank was ended"
    assert not any(STEP.match(line) for line in terminal.lines)


def test_the_table_keeps_nothing_of_it(terminals):
    terminal = terminals(140, *TEN_SIZES)
    assert terminal.end() == 0
    text = "\n".join(terminal.lines)
    assert not re.search(r"\d/\d+[:,]", text)
    sizes = [line.split()[0] for line in terminal.lines if line.endswith("  gpucoll")]
    assert sizes == [str(size) for size in range(4, 44, 4)]
    assert b"1/10: all_reduce float32 sum 4 B, gpucoll, checking" in terminal.raw


def test_the_table_in_a_file_leaves_the_line_on_the_terminal(terminals, tmp_path):
    path = tmp_path / "table"
    terminal = terminals(100, *TEN_SIZES, command=["sh", "-c", f'"$@" > {path}', "sh"])
    assert terminal.end() == 0
    assert b"/10: all_reduce float32 sum " in terminal.raw
    assert not any(terminal.lines)
    assert "/10" not in path.read_text()


def test_a_pipe_stays_silent_on_the_terminal(terminals):
    terminal = terminals(100, *TEN_SIZES, command=["sh", "-c", '"$@" | wc -l', "sh"])
    assert terminal.end() == 0
    assert terminal.raw.strip().isdigit()
