"""Copies of the checkout with faults in them, and runs of pytest there that always end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mutation_faults
from mutation_faults import Fault

HERE = Path(__file__).resolve().parent
MARK = "MUTATION_RUN"
WARM_S = 900.0
RELATED = {
    "backends/cpu/wires": ("tests/group/world/test_messages.py", "tests/group/world/test_calls.py"),
    "backends/cpu/world": ("tests/group/world/test_collectives.py",),
    "backends/direct": ("tests/calls/gpu",),
    "backends/gpu": ("tests/calls/gpu",),
    "backends/nccl": ("tests/calls/gpu",),
    "src/gpucoll/entries": ("tests/api", "tests/calls"),
    "src/gpucoll/group": ("tests/api/test_shrink.py", "tests/rendezvous"),
    "src/gpucoll/group/host": ("tests/backends/cpu", "tests/faults", "tests/api/test_shrink.py"),
    "src/gpucoll/transport/shared": ("tests/group/host", "tests/backends/cpu", "tests/faults"),
}
"""Tests of folders, beside those in the folder of the same name."""


@dataclass
class Ran:
    """How a run of pytest ended.

    Attributes
    ----------
    stopped : str
        Why the run was ended: ``"silent"``, ``"limit"``, or empty.
    failed : list of (str, str)
        What happened to tests that failed, in order: ``"test"`` or ``"timeout"``, and their names.
    running : list of str
        Tests that had not ended.
    """

    code: int = 0
    stopped: str = ""
    failed: list[tuple[str, str]] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)

    @property
    def is_sound(self) -> bool:
        """Whether nothing failed, as far as the run went."""
        has_ended = not self.stopped and self.code in (0, 5)
        return not self.failed and (has_ended or self.stopped == "limit")

    @property
    def verdict(self) -> tuple[str, str]:
        """How a fault was noticed, and by which test; its name is empty if it is unknown."""
        unknown = ("timeout" if self.stopped else "start", [*self.running, ""][0])
        return self.failed[0] if self.failed else unknown


class Tree:
    """A copy of the checkout in a folder of its own, with its cache of compiled code.

    Parameters
    ----------
    source : Path
        The checkout, or another copy of it.
    place : Path
        The folder; it should have a short name, because tests make sockets below it.
    test_limit_s : float
        How long one test may take.
    """

    def __init__(self, source: Path, place: Path, test_limit_s: float) -> None:
        self.root, self._place, self._test_limit_s = place / "tree", place, test_limit_s
        self.cache = place / "cache"
        self._original: dict[Path, str] = {}
        self._edits = 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=source, check=True, capture_output=True).stdout
        for name in filter(None, names.decode().split("\0")):
            if (source / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name, follow_symlinks=False)
        command = [sys.executable, "tools/link_tree.py"]
        subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.DEVNULL)

    @property
    def output(self) -> str:
        """What the last run printed."""
        return (self._place / "output").read_text(encoding="utf-8", errors="replace")

    def put(self, faults: Iterable[Fault]) -> None:
        """Take all faults out, and put these in."""
        for path, text in self._original.items():
            self._write(path, text)
        self._original = {}
        for fault in faults:
            path = self.root / fault.file
            text = path.read_text(encoding="utf-8")
            self._original.setdefault(path, text)
            self._write(path, mutation_faults.mutated(text, fault))

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._edits += 1  # Python compares a file's age in whole seconds and its size
        os.utime(path, (self._edits * 10, self._edits * 10))

    def fill_cache(self, base: Tree | None = None) -> bool:
        """Compile what tests need, or copy from another tree's cache what is the same there."""
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir(mode=0o700)
        program = [str(HERE / "mutation_cache.py"), str(self.cache)]
        return self._run(program + ([str(base.cache)] if base else []), WARM_S, WARM_S).code == 0

    def pytest(
        self, arguments: Sequence[str], limit_s: float, leave_out: Iterable[str] = ()
    ) -> Ran:
        """Run pytest in the tree, `limit_s` at most; leave no process behind."""
        log, left = self._place / "log", self._place / "left"
        log.write_text("")
        left.write_text("\n".join(leave_out))
        options = ["-q", "-p", "no:cacheprovider", "-p", "mutation_plugin"]
        options += [f"--timeout={self._test_limit_s:.0f}", f"--basetemp={self._place / 't'}"]
        ran = self._run(["-m", "pytest", *options, *arguments], limit_s, self._test_limit_s + 60)
        begun: dict[str, None] = {}
        for line in log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that was cut off
                event, test = json.loads(line)
                if event == "begun":
                    begun[test] = None
                elif event == "ended":
                    begun.pop(test, None)
                elif event == "passed":
                    ran.passed.add(test)
                else:
                    ran.failed.append((event, test))
        ran.running = list(begun)
        ran.passed -= {test for _, test in ran.failed}
        return ran

    def _run(self, arguments: list[str], limit_s: float, silence_s: float) -> Ran:
        temporary, output, log = (self._place / name for name in ("tmp", "output", "log"))
        temporary.mkdir(exist_ok=True)
        mark = f"{os.getpid()}-{self._place}"
        environment = os.environ | {
            MARK: mark,
            "GPUCOLL_CACHE_DIR": str(self.cache),
            "MUTATION_LEAVE_OUT": str(self._place / "left"),
            "MUTATION_LOG": str(log),
            "PYTHONPATH": f"{self.root / 'build/link_tree'}{os.pathsep}{HERE}",
            "TMPDIR": str(temporary),
        }
        ran_s = heard_s = 0.0  # without the time that both processes were suspended
        heard, stopped, last_s = -1, "", time.monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(OSError):  # if memory runs out, these are the first to go
                    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
                while process.poll() is None and not stopped:
                    time.sleep(0.1)
                    ran_s += min(time.monotonic() - last_s, 1.0)
                    last_s = time.monotonic()
                    size = output.stat().st_size + (log.stat().st_size if log.exists() else 0)
                    heard, heard_s = (heard, heard_s) if size == heard else (size, ran_s)
                    if ran_s - heard_s > silence_s:
                        stopped = "silent"
                    elif ran_s > limit_s:
                        stopped = "limit"
            finally:
                end_all(mark)
        shutil.rmtree(temporary, ignore_errors=True)
        return Ran(process.wait(), stopped)


def end_all(mark: str) -> None:
    """Kill every process of a run: those with its mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)


def nearest_tests(root: Path, file: str) -> list[str]:
    """Return the tests that are nearest to a source file, nearest first.

    These are the files of the same name, those that import the module, those in the folder of the
    same name, and those in `RELATED`.
    """
    path = Path(file.removeprefix("src/gpucoll/"))
    parent = ".".join(("gpucoll", *path.parent.parts))
    importing = re.compile(
        rf"{re.escape(parent)}\.{path.stem}\b"
        rf"|from {re.escape(parent)} import (\([^)]*|[^\n(]*)\b{path.stem}\b"
    )
    tests = sorted((root / "tests").rglob("test_*.py"))
    mirrored = root / "tests" / path.parent
    while not any(mirrored.glob("test_*.py")):
        mirrored = mirrored.parent
    if mirrored == root / "tests" and path.parent.parts:
        mirrored = root / "tests/nowhere"
    related = [root / each for each in RELATED.get(str(Path(file).parent), ())]
    family = root / "tests" / path.parts[0]
    chosen = [each for each in tests if each.stem == f"test_{path.stem}"]
    chosen = [each for each in chosen if family in each.parents or not path.parent.parts]
    chosen += [each for each in tests if importing.search(each.read_text(encoding="utf-8"))]
    chosen += [each for each in tests if each.parent == mirrored]
    for place in related:
        chosen += [each for each in tests if each == place or place in each.parents]
    return list(dict.fromkeys(str(each.relative_to(root)) for each in chosen))
