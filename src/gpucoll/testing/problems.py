"""Failures of ranks as pytest shows them: each once, causes before their consequences.

The result consists of pytest's own parts (a chain of tracebacks), so that it passes through xdist
and keeps its colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)

Element = tuple[ReprTraceback, ReprFileLocation | None, str | None]
LONGEST_LINE = 400


@dataclass(frozen=True)
class Problem:
    """Why a rank did not pass."""

    rank: int
    kind: str
    """The exception's type, or a word in its place."""
    message: str
    shown: ExceptionChainRepr | str
    follows: bool = False
    """Whether the failure of another rank caused it."""

    @property
    def identity(self) -> tuple[str, object]:
        """Return a key that is equal for the same failure: type and place, but not values."""
        if isinstance(self.shown, str):
            return self.kind, without_addresses(self.shown)
        places = [
            (entry.reprfileloc.path, entry.reprfileloc.lineno)
            for trace, _, _ in self.shown.chain
            for entry in trace.reprentries
            if isinstance(entry, ReprEntry) and entry.reprfileloc is not None
        ]
        return self.kind, tuple(places) or self.message

    @property
    def line(self) -> str:
        """The problem in one line."""
        text = self.message.strip().partition("\n")[0]
        text = re.sub(rf"^[\w.]*\b{re.escape(self.kind)}(: |$)", "", text)
        text = f"{self.kind}: {text}"
        return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}..."

    @classmethod
    def of_report(cls, rank: int, report: pytest.TestReport) -> Problem:
        """Return the problem in a rank's report."""
        shown: Any = report.longrepr
        if not isinstance(shown, ExceptionChainRepr):
            shown = report.longreprtext
        message = ""
        if isinstance(shown, str):  # pytest marks the line with the error
            marked = [line[1:] for line in shown.splitlines() if line.startswith("E ")]
            message = (marked or [shown])[0].strip()
        elif shown.reprcrash is not None:
            message = shown.reprcrash.message
        kind = getattr(report, "gpucoll_kind", "Failed")
        return cls(rank, kind, message, shown, getattr(report, "gpucoll_follows", False))


def explain(
    problems: Sequence[Problem], remarks: Iterable[str], world_size: int, place: tuple[Path, int]
) -> ExceptionChainRepr:
    """Return the representation of a failed test.

    Parameters
    ----------
    problems : sequence of Problem
        In rank order.
    remarks : iterable of str
        Lines that precede everything else.
    world_size : int
        The number of ranks of the test.
    place : (Path, int)
        File and line of the test.
    """
    remarks = list(remarks)
    causes = [problem for problem in problems if not problem.follows]
    if not causes and not remarks:
        causes = list(problems)
    groups: dict[Any, list[Problem]] = {}
    for problem in causes:
        groups.setdefault(problem.identity, []).append(problem)
    elements: list[Element] = [written("".join(f"{line}\n" for line in remarks))]
    for group in groups.values():
        elements += shown_group(group, world_size)
    followers = [problem for problem in problems if problem not in causes]
    after = "".join(f"rank {item.rank} of {world_size}: {item.line}\n" for item in followers)
    summary = remarks[0] if remarks else ""
    if causes:
        first = next(iter(groups.values()))
        summary = f"{spans([item.rank for item in first])}: {first[0].message}"
        crash = first[0].shown.reprcrash if not isinstance(first[0].shown, str) else None
        if crash is not None:
            place = (Path(crash.path), crash.lineno)
    # pytest's one-line summary shows the place and message of the last element.
    end = ReprFileLocation(str(place[0]), place[1], summary)
    return ExceptionChainRepr([*elements, (written(after)[0], end, None)])


def shown_group(group: Sequence[Problem], world_size: int) -> list[Element]:
    """Return one failure of several ranks: in full for the first, differences for the others."""
    first = group[0]
    heading = written(f"{spans([problem.rank for problem in group])} of {world_size}:\n")
    shown = [written(first.shown)] if isinstance(first.shown, str) else list(first.shown.chain)
    others = [(problem.rank, differences(first, problem)) for problem in group[1:]]
    text = "".join(f"on rank {rank}: {'; '.join(lines)}\n" for rank, lines in others if lines)
    return [heading, *shown, written(text)]


def differences(first: Problem, other: Problem) -> list[str]:
    """Return the lines of another rank's failure that differ from the first one's."""
    lines = [] if other.message == first.message else [other.line]
    known = {without_addresses(line) for line in local_variables(first)}
    return lines + [
        line
        for line in local_variables(other)
        if without_addresses(line) not in known
        and "<gpucoll.Communicator rank" not in line  # repeats the rank
    ]


def local_variables(problem: Problem) -> list[str]:
    """Return the local variables at the place of the failure, one on each line."""
    if isinstance(problem.shown, str) or not problem.shown.reprtraceback.reprentries:
        return []
    entry = problem.shown.reprtraceback.reprentries[-1]
    shown = entry.reprlocals.lines if isinstance(entry, ReprEntry) and entry.reprlocals else []
    return [re.sub(r"\s+= ", " = ", line, count=1) for line in shown]


def without_addresses(text: str) -> str:
    """Return the text without what differs between processes."""
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def written(text: str) -> Element:
    """Return the text as a part of a chain of tracebacks."""
    entries = [ReprEntryNative([text if text.endswith("\n") else f"{text}\n"])] if text else []
    return ReprTraceback(entries, None, "native"), None, None


def spans(ranks: Iterable[int]) -> str:
    """Format ranks for a sentence: ``rank 1``, ``ranks 0-3, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"rank{'s' if len(parts) > 1 or len(parts[0]) > 1 else ''} {', '.join(texts)}"


def own_frames(trace: str) -> str:
    """Return faulthandler's text without pytest's frames, which called the test."""
    kept, is_below = [], False
    for line in trace.splitlines():
        if not line.startswith("  "):
            is_below = False
        is_below = is_below or "/_pytest/" in line or line.startswith("Extension modules:")
        if not is_below:
            kept.append(line)
    return "\n".join(kept) + "\n"
