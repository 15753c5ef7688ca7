"""A step of tools/gpu_check.py as a process: watched, and ended with all its descendants."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import link_tree

__all__ = ["Ended", "last_lines", "run_watched"]

MARK = "GPU_CHECK_STEP"
"""An environment variable that marks all processes of a step, whatever session they move to."""
KILL_WAIT_S = 10.0
LOOK_S = 0.05
MOST_LOG_BYTES = 64 << 20
"""A step that prints more than this is ended."""
KEPT_LOG_BYTES = 1 << 20
"""How much of a step's output is kept: its end."""
LEAST_FREE_BYTES = 256 << 20
"""If a step leaves less free space on the disk, it is ended and its files are removed."""


class Ended(NamedTuple):
    """The end of a step's process."""

    status: str
    """"passed", "failed" or "killed"."""
    elapsed_s: float
    detail: str
    """Its last line of output, and if it was killed the reason."""


def run_watched(command: Sequence[str], limit_s: float, log: Path) -> Ended:
    """Run a command in its own session, with its own folder for temporary files.

    Its output goes to the file `log`. When it ends, exceeds `limit_s` or fills the disk, all
    processes that it has started are killed, and its temporary files are removed.
    """
    token = secrets.token_hex(8)
    scratch = log.with_suffix(".tmp")
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, MARK: token, "TMPDIR": str(scratch)}
    places = [str(link_tree.DEFAULT_PLACE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    # so that the output of a killed step is not lost in a buffer
    environment.setdefault("PYTHONUNBUFFERED", "1")
    begin = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=link_tree.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # if memory runs out, the kernel kills the step rather than this process
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("500")
        reason = _watch(process, limit_s, log)
        _end(process, f"{MARK}={token}".encode())
    shutil.rmtree(scratch, ignore_errors=True)
    lines = last_lines(log, 1)
    _shorten(log)
    elapsed_s = time.monotonic() - begin
    if reason:
        return Ended("killed", elapsed_s, ": ".join([reason, *lines]))
    status = "passed" if process.returncode == 0 else "failed"
    if process.returncode < 0:
        lines = [f"ended by {signal.Signals(-process.returncode).name}", *lines]
    return Ended(status, elapsed_s, ": ".join(lines))


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a step's output that are not blank, each shortened."""
    with open(log, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - KEPT_LOG_BYTES, 0))
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip()[:500] for line in text.splitlines()]
    return [line for line in lines if line][-count:]


def _watch(process: subprocess.Popen[bytes], limit_s: float, log: Path) -> str:
    """Wait for a process; return why it must be killed, empty if it has ended."""
    deadline = time.monotonic() + limit_s
    least = min(LEAST_FREE_BYTES, shutil.disk_usage(log.parent).free // 2)
    while True:
        try:
            process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return ""
        if time.monotonic() > deadline:
            return f"not done after {limit_s:g} s"
        if log.stat().st_size > MOST_LOG_BYTES:
            return f"more than {MOST_LOG_BYTES >> 20} MiB of output"
        if (free := shutil.disk_usage(log.parent).free) < least:
            return f"the disk is full: {free >> 20} MiB are left"


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Kill what is left of a step; do not wait for a process that is blocked in a driver."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + KILL_WAIT_S
    while (left := _marked(mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
    try:
        process.wait(max(until - time.monotonic(), LOOK_S))
    except subprocess.TimeoutExpired:
        # or Popen would warn about the process, which ends with the machine
        process.returncode = -signal.SIGKILL


def _marked(mark: bytes) -> list[int]:
    """Return the running processes that have a mark in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
        except OSError:  # another user's process, or one that is gone
            pass
    return found


def _shorten(log: Path) -> None:
    """Keep only the end of a step's output."""
    if log.stat().st_size > KEPT_LOG_BYTES:
        kept = log.read_bytes()[-KEPT_LOG_BYTES:]
        log.write_bytes(kept)
