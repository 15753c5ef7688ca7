"""Kept results: what ``gpucoll-bench --json`` wrote, read again, and several files as one."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench.results import SIDES
from gpucoll.bench.summary import Entry, call_title

__all__ = [
    "MACHINE",
    "CannotReadError",
    "Content",
    "counted",
    "libraries",
    "machine",
    "public_command",
    "read",
]

Content = dict[str, Any]
"""The content of a file: ``results``, ``limit`` and ``environment`` (see `results.Results`)."""

NAMES = ("library", "placement", "collective", "type", "redop")
MACHINE = ("cpu", "usable_cpus", "array")
"""Keys of the environment in which the files of one report must agree."""


class CannotReadError(Exception):
    """A file holds no results of gpucoll-bench; the message says what it holds instead."""


def read(path: Path) -> Content:
    """Return the content of a file.

    Raises
    ------
    CannotReadError
        The file cannot be read, or is not what ``gpucoll-bench --json`` writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotReadError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CannotReadError(f"{path}: not JSON, or cut off: {error}") from error
    if isinstance(content, dict) and "steps" in content:
        raise CannotReadError(
            f"{path}: measured by tools/gpu_check.py; give a file that gpucoll-bench --json wrote"
        )
    try:
        check(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CannotReadError(
            f"{path}: not what gpucoll-bench --json writes ({wrong}); measure again"
        ) from error
    found: Content = content
    return found


def check(content: Content) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if something is missing."""
    about = content["environment"]
    for name in (*MACHINE, "ranks", "kernel", "python"):
        about[name]
    if not all(isinstance(about[name], str) for name in ("command", "date")):
        raise TypeError("a command or a date that is not text")
    if not all(isinstance(one["library"], str) for one in about["libraries"].values()):
        raise TypeError("a library that is not text")
    if not content["results"]:
        raise ValueError("no call was measured")
    for entry in [*content["results"], *content["limit"]]:
        if not all(isinstance(entry[name], str) for name in NAMES):
            raise TypeError(f"an entry whose {', '.join(NAMES)} are not all text")
        counts = (entry["size"], entry["ranks"], entry.get("list_length", 1))
        if not all(isinstance(one, int) and one >= 0 for one in counts):
            raise ValueError("sizes, ranks or lengths of lists that are not whole numbers")
        for side in filter(None, (entry[name] for name in SIDES)):
            samples = np.array(side["samples_us"], dtype=np.float64)
            if samples.ndim != 2 or not samples.size or not np.isfinite(samples).all():
                raise ValueError("samples_us that are not times by rank and round")
            side["nwrong"], side["bus_bw"]
            if not 0 < side["time"] < np.inf or samples.min() < 0:
                raise ValueError("times that are not above 0")


def counted(contents: Sequence[Content]) -> list[Content]:
    """Return what counts of several files, the oldest file first.

    If several files have the same call on the same number of ranks and with the same size, all
    entries of this size come from the newest of these files, because only times of one run can be
    compared. A file of which nothing counts is left out.

    Raises
    ------
    CannotReadError
        The files were measured on different machines or kinds of arrays.
    """
    newest_first = sorted(contents, key=lambda one: str(one["environment"]["date"]), reverse=True)
    for name in MACHINE:
        found = list(dict.fromkeys(str(one["environment"][name]) for one in newest_first))
        if len(found) > 1:
            raise CannotReadError(
                f"the files differ in {name} ({', '.join(found)}): make a report for each"
            )
    parts: list[Content] = []
    taken: set[tuple[str, int]] = set()
    for one in newest_first:
        keys = {key_of(entry) for entry in one["results"]} - taken
        taken |= keys
        part = {**one}
        for name in ("results", "limit"):
            part[name] = [entry for entry in one[name] if key_of(entry) in keys]
        if keys:
            parts.append(part)
    return parts[::-1]


def key_of(entry: Entry) -> tuple[str, int]:
    """Return what identifies a row of a table: the call with its number of ranks, and the size."""
    return call_title(entry, has_ranks=True), entry["size"]


def public_command(environment: Mapping[str, Any]) -> str:
    """Return the command of a run, without paths, which may be private."""
    try:
        words = shlex.split(environment["command"])
    except ValueError:  # older versions did not quote
        words = environment["command"].split()
    public: list[str] = []
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        option = name if equals else public[-1] if public else ""
        if option in ("--json", "--html", "--plot", "--csv"):
            value = "FILE"
        elif option == "--compare" or not name:
            value = re.sub(r"=[^,]+", "=PYTHON", value)
        public.append(name + equals + value)
    return shlex.join(public)


def machine(environment: Mapping[str, Any]) -> str:
    """Return where a run was measured."""
    return (
        f"{environment['cpu']}, {environment['ranks']} ranks on {environment['usable_cpus']} CPUs"
        f"{' (pinned)' if environment.get('pinned_cpus') else ''}, {environment['kernel']}, "
        f"Python {environment['python']}"
    )


def libraries(environment: Mapping[str, Any]) -> list[str]:
    """Return the libraries of a run with their versions."""
    return [one["library"] for one in environment["libraries"].values()]
