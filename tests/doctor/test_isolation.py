"""A probe that hangs, crashes or fails becomes a sentence, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from gpucoll.doctor import isolation
from gpucoll.doctor.isolation import Answer, Question, ask

PATIENCE_S = 60.0

DOUBLES = """
import ctypes, os, sys, time
def answers(text): print("a word of a library"); os.write(1, b"another"); return {"got": text}
def fails(): raise ValueError("a reason")
def crashes(): ctypes.string_at(0)
def exits(): os._exit(3)
def talks(): sys.stderr.write("its last words"); sys.stderr.flush(); os._exit(0)
def is_much(): return "x" * 1_000_000
def hangs(path):
    os.open(path, os.O_RDONLY)  # a FIFO that nobody writes to
"""


@pytest.fixture
def doubles(tmp_path, monkeypatch):
    """Put doubles of probes where a process for a probe finds them."""
    (tmp_path / "doctor_doubles.py").write_text(DOUBLES)
    # The table of probes is read in the other process: its start adds the doubles to it.
    names = ("answers", "fails", "crashes", "exits", "talks", "is_much", "hangs")
    table = {name: f"doctor_doubles:{name}" for name in names}
    (tmp_path / "doctor_with_doubles.py").write_text(
        "import sys; from gpucoll.doctor import probe;"
        f"probe.PROBES = {{**probe.PROBES, **{table!r}}}; probe.main(sys.argv[1:])"
    )
    monkeypatch.setattr(isolation, "PROBE", "doctor_with_doubles")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ask_one(name, *arguments, timeout_s=PATIENCE_S):
    (answer,) = ask([Question(name, arguments, timeout_s)])
    return answer


def test_answers_come_in_order_and_prints_do_not_disturb(doubles):
    questions = [Question("answers", (text,), PATIENCE_S) for text in "abc"]
    assert ask(questions) == [Answer({"got": text}, None) for text in "abc"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fails", "ValueError: a reason"),
        ("crashes", "killed by SIGSEGV"),
        ("exits", "it ended with code 3: no word"),
        ("talks", "it ended with code 0: its last words"),
    ],
)
def test_failures_are_sentences(doubles, name, problem):
    assert ask_one(name) == Answer(None, problem)


def test_no_process_can_be_started(doubles, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(doubles / "none"))
    answer = Answer(None, "its process cannot be started: No such file or directory")
    assert ask_one("answers", "a") == answer


def test_an_answer_larger_than_a_pipe(doubles):
    assert ask_one("is_much").found == "x" * 1_000_000


def test_one_that_hangs_is_ended(doubles):
    os.mkfifo(doubles / "fifo")
    start = time.monotonic()
    answer = ask_one("hangs", str(doubles / "fifo"), timeout_s=0.5)
    assert answer == Answer(None, "no answer within 0.5 s; it was ended")
    assert time.monotonic() - start < PATIENCE_S
    assert children() == set()


def test_a_probe_ends_itself_when_nobody_does(doubles):
    os.mkfifo(doubles / "fifo")
    command = [
        sys.executable,
        "-c",
        f"from gpucoll.doctor import probe;"
        f"probe.GRACE_S = 0; probe.PROBES = {{'hangs': 'doctor_doubles:hangs'}};"
        f"probe.main(['hangs', '0.1', {str(doubles / 'fifo')!r}])",
    ]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.run(command, env=environment, timeout=PATIENCE_S, capture_output=True)
    assert process.returncode == -14  # SIGALRM


def test_ctrl_c_ends_all_probes(doubles, monkeypatch):
    os.mkfifo(doubles / "fifo")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupt)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask([Question("hangs", (str(doubles / "fifo"),), 10 * PATIENCE_S)])
    assert time.monotonic() - start < PATIENCE_S
    assert children() == set()


def children():
    """Return the processes that run a probe of this test's, zombies excepted."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"doctor_with_doubles" in path.read_bytes():
                found.add(path.parent.name)
    return found
