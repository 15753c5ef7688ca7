"""Probes in separate processes: one that hangs or crashes is ended and becomes a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

__all__ = ["Answer", "Question", "ask"]

PROBE = "gpucoll.doctor.probe"
"""The module that each process runs."""
Started = subprocess.Popen[str] | OSError
END_S = 2.0
"""How long to wait for a killed process; one that is blocked in the kernel is left behind."""


class Question(NamedTuple):
    """A probe of `gpucoll.doctor.probe`, its arguments, and its time limit."""

    probe: str
    arguments: tuple[str, ...]
    timeout_s: float


class Answer(NamedTuple):
    """The result of a probe, or None and the reason."""

    found: Any
    problem: str | None


def ask(questions: Sequence[Question]) -> list[Answer]:
    """Run all probes at once; return the answers in the same order when the slowest is done."""
    processes: list[Started] = []
    try:
        for question in questions:
            processes.append(_start(question))
        with ThreadPoolExecutor(max(len(questions), 1)) as threads:
            waiting: list[Future[Answer]] = [
                threads.submit(_wait, process, question.timeout_s)
                for process, question in zip(processes, questions, strict=True)
            ]
            try:
                return [future.result() for future in waiting]
            # on Ctrl-C, the threads would wait for the deadlines of their processes
            except BaseException:
                _kill(processes)
                raise
    finally:
        _kill(processes)


def _start(question: Question) -> Started:
    words = [question.probe, f"{question.timeout_s:g}", *question.arguments]
    # the same gpucoll as here, installed or not
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", PROBE, *words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return error


def _kill(processes: Sequence[Started]) -> None:
    for process in processes:
        if isinstance(process, subprocess.Popen) and process.poll() is None:
            process.kill()


def _wait(process: Started, timeout_s: float) -> Answer:
    if isinstance(process, OSError):
        return Answer(None, f"its process cannot be started: {process.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            return Answer(
                None, f"no answer within {timeout_s:g} s, and its process cannot be killed"
            )
        return Answer(None, f"no answer within {timeout_s:g} s; it was ended")
    if process.returncode < 0:
        number = -process.returncode
        known = number in {int(name) for name in signal.Signals}
        return Answer(None, f"killed by {signal.Signals(number).name if known else number}")
    try:
        answer = json.loads(output)
        return Answer(answer["found"], answer["problem"])
    except (KeyError, TypeError, ValueError):
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no word")
        return Answer(None, f"it ended with code {process.returncode}: {last}")
