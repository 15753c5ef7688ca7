"""Puts the traces of several hosts into one file, with their clocks aligned by common calls.

No rank can leave an all_reduce before the last one has come, nor can those of another host. So each
call that both hosts have bounds the difference of their clocks from both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from gpucoll.collectives import Collective, Flow, Operands
from gpucoll.observe.tracks import SEVERAL_HOSTS
from gpucoll.track_events import fields, packet, replaced

__all__ = ["MergeError", "Merged", "merge"]

_TOGETHER = {
    each.spelled
    for each in Collective
    if (each.reduces or each.gathers or each is Collective.BARRIER)
    and each.flow == Flow.ALL
    and each.operands == Operands.ALL
}
"""The calls that no rank leaves before all have come."""
_PID_STEP = 1 << 22
"""Above the largest process number of Linux."""

Key: TypeAlias = tuple[str, str, int]
"""A call: the name of its track, its own, its number."""


class MergeError(Exception):
    """Files that cannot be put together."""


@dataclass(frozen=True)
class Merged:
    """How the clock of a file was aligned with that of the first: what was added, and the error."""

    path: Path
    offset_ns: int
    error_ns: int
    n_calls: int


@dataclass
class _Trace:
    """What is needed of a file."""

    path: Path
    packets: list[bytes] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    last_begun_ns: dict[Key, int] = field(default_factory=dict)
    first_ended_ns: dict[Key, int] = field(default_factory=dict)
    _tracks: dict[int, str] = field(default_factory=dict)
    _names: dict[tuple[int, int], str] = field(default_factory=dict)
    _open: defaultdict[int, list[Key | None]] = field(default_factory=lambda: defaultdict(list))

    def read(self) -> _Trace:
        """Read the file, which `gpucoll trace` has written."""
        try:
            for number, content, _ in fields(self.path.read_bytes()):
                if number != 1 or not isinstance(content, bytes):
                    raise ValueError("it has a field that is no packet")
                self.packets.append(content)
                self._take(dict(_values(content)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise MergeError(f"{self.path} was not written by gpucoll trace: {error}") from None
        return self

    def _take(self, found: dict[int, Any]) -> None:
        if 60 in found:
            track = dict(_values(found[60]))
            self._tracks[track[1]] = track[2].decode()
            if 3 in track:
                self.pids.add(dict(_values(track[3]))[1])
        for kind, entry in _values(found.get(12, b"")):
            named = dict(_values(entry))
            self._names[kind, named[1]] = named[2].decode()
        if 11 in found:
            self._take_event(found[8], found[11])

    def _take_event(self, time_ns: int, data: bytes) -> None:
        event = dict(_values(data))
        running = self._open[event[11]]
        if event[9] == 1:
            key = self._key(event, data)
            running.append(key)
            if key is not None:
                self.last_begun_ns[key] = max(time_ns, self.last_begun_ns.get(key, time_ns))
        elif event[9] == 2:
            key = running.pop()
            if key is not None:
                self.first_ended_ns[key] = min(time_ns, self.first_ended_ns.get(key, time_ns))

    def _key(self, event: dict[int, Any], data: bytes) -> Key | None:
        """Return the call that a slice shows, if it tells of clocks."""
        name = self._names[2, event[10]]
        if name not in _TOGETHER:
            return None
        shown = [dict(_values(value)) for number, value in _values(data) if number == 4]
        arguments = {self._names[3, one[1]]: one for one in shown}
        if SEVERAL_HOSTS not in arguments:
            return None
        return self._tracks[event[11]], name, arguments["sequence"][4]


def _values(message: bytes) -> Iterator[tuple[int, Any]]:
    return ((number, value) for number, value, _ in fields(message))


def merge(paths: Sequence[Path], out: Path) -> list[Merged]:
    """Write one trace of several; return how each but the first was aligned.

    Raises
    ------
    MergeError
        A file is no trace, or has no call in common with the first, or their times contradict each
        other.
    """
    first, *others = (_Trace(path).read() for path in paths)
    aligned = [_align(first, other) for other in others]
    pids = set(first.pids)
    with out.open("wb") as file:
        for content in first.packets:
            file.write(packet(content))
        for number, (other, how) in enumerate(zip(others, aligned, strict=True), 1):
            step = number * _PID_STEP if pids & other.pids else 0
            pids |= {pid + step for pid in other.pids}
            for content in other.packets:
                file.write(packet(_moved(content, how.offset_ns, step)))
    return aligned


def _moved(content: bytes, offset_ns: int, pid_step: int) -> bytes:
    """Return a packet in the first file's time. Snapshots of other clocks are left out."""
    content = b"".join(raw for number, _, raw in fields(content) if number != 6)
    content = replaced(content, [8], lambda time_ns: time_ns + offset_ns)
    return replaced(content, [60, 3, 1], lambda pid: pid + pid_step) if pid_step else content


def _align(first: _Trace, other: _Trace) -> Merged:
    common = first.first_ended_ns.keys() & other.first_ended_ns.keys()
    if not common:
        raise MergeError(
            f"{first.path} and {other.path} have no call in common that all ranks must have come "
            "to, such as an all_reduce of several hosts: record both at the same time"
        )
    least = max(first.last_begun_ns[key] - other.first_ended_ns[key] for key in common)
    most = min(first.first_ended_ns[key] - other.last_begun_ns[key] for key in common)
    if least > most:
        raise MergeError(
            f"the calls of {first.path} and {other.path} contradict each other by "
            f"{(least - most) / 1e3:.1f} us: the files are not of one job, or not of one time"
        )
    return Merged(other.path, (least + most) // 2, (most - least + 1) // 2, len(common))
