"""The results of tools/gpu_check.py, in two files that are rewritten after each step."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Keeper", "Outcome", "Report", "spelled"]

SCHEMA = 1
RESERVE_BYTES = 32 << 20
"""Disk space reserved for the two files, since a step may fill the rest."""
LINE_CHARACTERS = 400
DIGITS = 5
"""Significant digits of a measured number."""
UNFINISHED = ("killed", "not run")
"""The status of steps that `--again` repeats."""


@dataclass
class Outcome:
    """The result of a step: "passed", "failed", "killed" or "not run"."""

    name: str
    status: str
    elapsed_s: float = 0.0
    detail: str = ""
    lines: list[str] = field(default_factory=list)
    """The end of its output if it did not pass."""
    run: int = 0
    """The index of its run in the report."""


@dataclass
class Report:
    """The contents of the report: see ``bench/results/README.md``."""

    schema: int = SCHEMA
    status: str = "running"
    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Outcome] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report that an earlier run has written."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {found.get('schema')!r}, and {SCHEMA} is needed")
        found["steps"] = [Outcome(**step) for step in found["steps"]]
        return cls(**found)

    @property
    def environment(self) -> dict[str, Any]:
        """What the newest run found on the machine."""
        found: dict[str, Any] = self.runs[-1]["environment"]
        return found

    def add(self, outcome: Outcome) -> None:
        """Add a step's result, in place of an earlier one of the same step."""
        outcome.run = len(self.runs) - 1
        for place, step in enumerate(self.steps):
            if step.name == outcome.name:
                self.steps[place] = outcome
                return
        self.steps.append(outcome)

    def is_finished(self, name: str) -> bool:
        """Return whether a step has run to its end, successfully or not."""
        return any(step.name == name and step.status not in UNFINISHED for step in self.steps)

    def finish(self) -> None:
        """Set the overall result."""
        passed = all(step.status == "passed" for step in self.steps)
        self.status = "passed" if passed else "failed"
        if "no_gpu" in self.environment:
            self.status = "no GPU"


class Keeper:
    """Writes ``gpu_check.json``, and ``gpu_check.tar.gz`` with everything that the steps wrote.

    Parameters
    ----------
    folder : Path
        The folder of these two files.
    work : Path
        The folder of the steps' results and output.
    """

    def __init__(self, folder: Path, work: Path) -> None:
        self._folder, self._work = folder, work
        self._reserve: int | None = None
        self._hold()

    def write(self, report: Report) -> None:
        """Write both files; report a failure, and try again after the next step."""
        content = spelled(asdict(report)).encode()
        self._write("gpu_check.json", content)
        self._write("gpu_check.tar.gz", self._archive())
        self._hold()

    def close(self) -> None:
        """Release the reserved disk space."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _hold(self) -> None:
        """Reserve disk space with an anonymous file."""
        if self._reserve is not None:
            return
        path = self._folder / ".reserve"
        try:
            self._reserve = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            path.unlink()
            os.posix_fallocate(self._reserve, 0, RESERVE_BYTES)
        except OSError:  # there is no free space, so none is reserved
            self.close()

    def _write(self, name: str, content: bytes) -> None:
        new = self._folder / f"{name}.new"
        for is_last in (False, True):
            try:
                new.write_bytes(content)
                new.replace(self._folder / name)
            except OSError as error:
                new.unlink(missing_ok=True)
                self.close()
                if is_last:
                    print(f"{name} could not be written: {error}", flush=True)
            else:
                return

    def _archive(self) -> bytes:
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w:gz") as archive:
            for path in _files(self._work):
                content = path.read_bytes()  # at once: a step may be writing it
                entry = tarfile.TarInfo(path.name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return memory.getvalue()


def spelled(value: Any, indent: str = "") -> str:
    """Return JSON in which a short object, or a list of numbers, takes one line."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.{DIGITS}g}"))
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    further = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {spelled(each, further)}" for key, each in value.items()]
    else:
        parts = [spelled(each, further) for each in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    is_plain = isinstance(value, list) and not any(isinstance(x, (dict, list, str)) for x in value)
    line = f"{first}{', '.join(parts)}{last}"
    if is_plain or (len(line) <= LINE_CHARACTERS and "\n" not in line):
        return line
    return f"{first}\n{further}" + f",\n{further}".join(parts) + f"\n{indent}{last}"


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())
