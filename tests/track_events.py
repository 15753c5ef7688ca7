"""Read traces that `gpucoll.track_events` encodes for Perfetto, without its code or protobuf."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = {1: "begin", 2: "end", 3: "instant", 4: "count"}


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        elif kind == 1:
            yield number, data[at : at + 8]
            at += 8
        elif kind == 2:
            length = varint()
            assert at + length <= len(data)
            yield number, data[at : at + length]
            at += length
        else:
            raise AssertionError(f"wire type {kind} of field {number}")


@dataclass
class Track:
    """A track: its name, the one above it, its process; whether it counts."""

    name: str = ""
    parent: int = 0
    pid: int = 0
    is_counter: bool = False


@dataclass
class Event:
    """An event, with the names of its track and of those above it, topmost first."""

    kind: str
    time_ns: int
    track: int
    path: tuple[str, ...]
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)
    ended_flows: list[int] = field(default_factory=list)
    value: float = 0


@dataclass
class Trace:
    """What a file consists of."""

    tracks: dict[int, Track] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    def slices(self) -> list[tuple[Event, Event]]:
        """Return the beginning and the end of each slice, by beginning; check that they nest."""
        open_slices: dict[int, list[Event]] = {}
        found = []
        for event in sorted(self.events, key=lambda each: each.time_ns):  # stable, as in Perfetto
            own = open_slices.setdefault(event.track, [])
            if event.kind == "begin":
                own.append(event)
            elif event.kind == "end":
                found.append((own.pop(), event))
        assert not any(open_slices.values())
        return sorted(found, key=lambda pair: pair[0].time_ns)


def read_trace(data: bytes) -> Trace:
    """Return what a file consists of."""
    trace = Trace()
    names: dict[tuple[int, int], str] = {}
    for number, packet in fields(data):
        assert number == 1
        found = dict(fields(packet))
        if 59 in found:
            trace.clock = dict(fields(found[59]))[58]
            assert found[13] == 1
        for _, clock in fields(found.get(6, b"")) if 6 in found else []:
            if isinstance(clock, bytes):
                shown = dict(fields(clock))
                trace.clocks[shown[1]] = shown[2]
        if 60 in found:
            _add_track(trace, dict(fields(found[60])))
        for kind, entry in fields(found.get(12, b"")):
            named = dict(fields(entry))
            names[kind, named[1]] = named[2].decode()
        if 11 in found:
            assert found[13] == 2
            trace.events.append(_event(trace, found[8], found[11], names))
    return trace


def _add_track(trace: Trace, found: dict[int, Any]) -> None:
    process = dict(fields(found.get(3, b"")))
    assert found[1] not in trace.tracks
    trace.tracks[found[1]] = Track(
        found[2].decode(), found.get(5, 0), process.get(1, 0), is_counter=8 in found
    )


def _event(trace: Trace, time_ns: int, data: bytes, names: dict[tuple[int, int], str]) -> Event:
    every = list(fields(data))
    found = dict(every)
    path, above = [], found[11]
    while above:
        path.append(trace.tracks[above].name)
        above = trace.tracks[above].parent
    event = Event(KINDS[found[9]], time_ns, found[11], tuple(reversed(path)))
    event.name = names[2, found[10]] if 10 in found else ""
    event.flows = [int.from_bytes(value, "little") for number, value in every if number == 47]
    event.ended_flows = [int.from_bytes(value, "little") for number, value in every if number == 48]
    if 30 in found:
        event.value = _signed(found[30])
    elif 44 in found:
        (event.value,) = struct.unpack("<d", found[44])
    for number, value in every:
        if number == 4:
            shown = dict(fields(value))
            name = names[3, shown.pop(1)]
            event.arguments[name] = _value(shown)
    return event


def _value(shown: dict[int, Any]) -> Any:
    ((number, value),) = shown.items()
    if number == 2:
        return bool(value)
    if number == 4:
        return _signed(value)
    if number == 5:
        return struct.unpack("<d", value)[0]
    return value.decode() if number == 6 else value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
