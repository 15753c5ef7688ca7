"""What was found out about a job on one host, and how it is written as JSON and read again."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from gpucoll.observe.look import Job, RankLook
from gpucoll.observe.processes import Process
from gpucoll.observe.stacks import Stack
from gpucoll.observe.verdict import Verdict
from gpucoll.version import __version__

__all__ = ["FORMAT", "Report", "ReportError", "as_json", "from_json"]

T = TypeVar("T")

FORMAT = 1
"""The version of the JSON. Raise it with every change of what is written."""


class ReportError(Exception):
    """A text that is no report which this version can read; completes "FILE ..."."""


@dataclass
class Report:
    """A job on one host, or on several after `gpucoll.observe.merge.merge`.

    Attributes
    ----------
    job : Job
        The looks.
    stacks : dict
        The stacks that were read, by process.
    parts : list of Report
        What it was merged from; empty if it is of one host.
    """

    job: Job
    stacks: dict[int, Stack]
    parts: list[Report] = field(default_factory=list)


# --- writing --------------------------------------------------------------------------------------


def as_json(found: Iterable[tuple[Report, Verdict]]) -> str:
    """Return everything that was found, as JSON: for each job the verdict, and each of its hosts.

    Processes are numbered as on their host; only numbers of ranks mean the same on all hosts.
    """
    jobs = [
        {
            "verdict": asdict(verdict) | {"is_healthy": verdict.is_healthy},
            "silent": report.job.silent,
            "hosts": [_host_facts(part) for part in report.parts or [report]],
        }
        for report, verdict in found
    ]
    return json.dumps({"format": FORMAT, "gpucoll": __version__, "jobs": jobs}, indent=2)


def _host_facts(report: Report) -> dict[str, Any]:
    job = report.job
    return {
        "host": job.hosts[0],
        "program": job.program,
        "taken_s": job.taken_s,
        "communicators": [
            {"name": name, "group": group, "ranks": total}
            for name, group, total in zip(job.names, job.groups, job.totals, strict=True)
        ],
        "ranks": [asdict(one) for one in job.ranks],
        "processes": {
            pid: None if process is None else asdict(process) | {"cpu": job.cpu.get(pid, 0.0)}
            for pid, process in job.processes.items()
        },
        "stacks": {pid: asdict(stack) for pid, stack in report.stacks.items()},
        "ranks_elsewhere": job.elsewhere,
    }


# --- reading --------------------------------------------------------------------------------------


def from_json(text: str) -> list[Report]:
    """Return the reports of all hosts in one or several outputs of `as_json`.

    Raises
    ------
    ReportError
        It is of another format, or damaged.
    """
    found: list[Report] = []
    for document in _documents(text):
        try:
            found += [_report(host) for job in document["jobs"] for host in job["hosts"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ReportError(f"is damaged: {error!r}") from None
    return found


def _documents(text: str) -> Iterator[dict[str, Any]]:
    decoder, rest = json.JSONDecoder(), text.lstrip()
    if not rest:
        raise ReportError("is empty: gpucoll why --json has found no job there")
    while rest:
        try:
            document, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            raise ReportError("is not what gpucoll why --json prints, or not all of it") from None
        rest = rest[end:].lstrip()
        is_known = isinstance(document, dict) and type(document.get("format")) is int
        if not is_known or "gpucoll" not in document:
            raise ReportError(
                f"is not what gpucoll why --json of gpucoll {__version__} prints: it has no format"
            )
        if document["format"] != FORMAT:
            raise ReportError(
                f"has format {document['format']}, of gpucoll {document['gpucoll']}; this is "
                f"gpucoll {__version__}, which reads format {FORMAT}: use one version on all hosts"
            )
        yield document


def _report(facts: dict[str, Any]) -> Report:
    """Return the report of one host; KeyError, TypeError or ValueError if it cannot be."""
    processes, cpu = dict[int, Process | None](), dict[int, float]()
    for pid, given in facts["processes"].items():
        processes[int(pid)] = None
        if given is not None:
            cpu[int(pid)] = _checked(given["cpu"], float, "cpu")
            own = {name: each for name, each in given.items() if name != "cpu"}
            processes[int(pid)] = _made(Process, own)
    communicators = [_made(_Communicator, each) for each in facts["communicators"]]
    job = Job(
        processes,
        cpu,
        [_made(RankLook, each) for each in facts["ranks"]],
        [each.name for each in communicators],
        _checked(facts["ranks_elsewhere"], int, "ranks_elsewhere"),
        [each.group for each in communicators],
        [each.ranks for each in communicators],
        _checked(facts["program"], str, "program"),
        _checked(facts["taken_s"], float, "taken_s"),
        [_checked(facts["host"], str, "host")],
    )
    for one in job.ranks:
        if not 0 <= one.communicator < len(communicators):
            raise ValueError(f"communicator {one.communicator} of {len(communicators)}")
        if {one.pid, *one.awaited} - processes.keys():
            raise ValueError(f"rank {one.rank} is, or waits for, a process that it does not have")
    if processes.keys() - {one.pid for one in job.ranks} or not job.ranks:
        raise ValueError("processes that are no rank, or no rank")
    return Report(job, {int(pid): _made(Stack, each) for pid, each in facts["stacks"].items()})


@dataclass(frozen=True)
class _Communicator:
    name: str | None
    group: str
    ranks: int


def _made(kind: type[T], given: object) -> T:
    """Return an object of a dataclass from what `asdict` has made of one; check all types."""
    if not isinstance(given, dict):
        raise TypeError(f"{kind.__name__}: {given!r:.80}")
    hints = typing.get_type_hints(kind)
    values = {name: _checked(value, hints[name], name) for name, value in given.items()}
    wanted = [each for each in dataclasses.fields(typing.cast(Any, kind)) if each.init]
    if missing := {each.name for each in wanted} - values.keys():
        raise KeyError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
    return kind(**values)


def _checked(value: object, hint: Any, name: str) -> Any:
    """Return a value of JSON as the type that an annotation demands; TypeError: it is another."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (hint,) = [each for each in inner if each is not type(None)]
        return _checked(value, hint, name)
    if kind in (list, tuple) and isinstance(value, list):
        return kind(_checked(each, inner[0], name) for each in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{name} is {value!r:.80}")
    return value
