"""What tools/gpu_check.py finds, and how it is kept: two files, written anew after each step."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Keeper", "Outcome", "Report"]

SCHEMA = 1
RESERVE_BYTES = 32 << 20
"""Held free on the disk for the files that come back: a step may have filled the rest."""
UNFINISHED = ("killed", "not run")
"""What `--again` makes up for."""


@dataclass
class Outcome:
    """How a step went: "passed", "failed", "killed" or "not run"."""

    name: str
    status: str
    elapsed_s: float = 0.0
    detail: str = ""
    lines: list[str] = field(default_factory=list)
    """The end of the output of one that did not pass."""
    run: int = 0
    """In which of the report's runs."""


@dataclass
class Report:
    """What is written: see ``bench/results/README.md``."""

    schema: int = SCHEMA
    status: str = "running"
    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Outcome] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return what an earlier run wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {found.get('schema')!r}, and {SCHEMA} is needed")
        found["steps"] = [Outcome(**step) for step in found["steps"]]
        return cls(**found)

    @property
    def environment(self) -> dict[str, Any]:
        """What the newest run found of the machine."""
        found: dict[str, Any] = self.runs[-1]["environment"]
        return found

    def add(self, outcome: Outcome) -> None:
        """Add a step's outcome, in the place of an earlier one of that step."""
        outcome.run = len(self.runs) - 1
        for place, step in enumerate(self.steps):
            if step.name == outcome.name:
                self.steps[place] = outcome
                return
        self.steps.append(outcome)

    def is_finished(self, name: str) -> bool:
        """Return whether a step was done, well or not."""
        return any(step.name == name and step.status not in UNFINISHED for step in self.steps)

    def finish(self) -> None:
        """Say how it all went."""
        passed = all(step.status == "passed" for step in self.steps)
        self.status = "passed" if passed else "failed"
        if "no_gpu" in self.environment:
            self.status = "no GPU"


class Keeper:
    """Writes ``gpu_check.json``, and ``gpu_check.tar.gz`` of all that the steps wrote.

    Parameters
    ----------
    folder : Path
        For these two.
    work : Path
        Where the steps write their results and their output goes.
    """

    def __init__(self, folder: Path, work: Path) -> None:
        self._folder, self._work = folder, work
        self._reserve: int | None = None
        self._hold()

    def write(self, report: Report) -> None:
        """Write both; what cannot be written is said, and tried again after the next step."""
        content = json.dumps(asdict(report), indent=1).encode()
        self._write("gpu_check.json", content)
        self._write("gpu_check.tar.gz", self._archive())
        self._hold()

    def close(self) -> None:
        """Give back the room that was held free."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _hold(self) -> None:
        """Hold room, by a file that has no name."""
        if self._reserve is not None:
            return
        path = self._folder / ".reserve"
        try:
            self._reserve = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            path.unlink()
            os.posix_fallocate(self._reserve, 0, RESERVE_BYTES)
        except OSError:  # there is none: then it was not held
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
                archive.add(path, path.name, recursive=False)
        return memory.getvalue()


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())
