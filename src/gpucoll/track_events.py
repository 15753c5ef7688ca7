"""Encode events on tracks for viewers of traces, packet by packet.

`TrackEvents` encodes Perfetto's TrackEvent protobuf. `ChromeEvents` encodes the JSON that
chrome://tracing reads; there, slices of one track must nest. Neither writes a file nor keeps
events: each method returns bytes for the caller to write in the order of the calls. An encoder
keeps the names of events and arguments, so that callers need few different ones.

Field numbers are those of ``protos/perfetto/trace/trace_packet.proto`` and of the files in
``track_event/`` in https://github.com/google/perfetto.
"""

from __future__ import annotations

import functools
import json
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, Protocol, TypeAlias

__all__ = [
    "NO_ARGUMENTS",
    "PERFETTO_SUFFIXES",
    "Arguments",
    "ChromeEvents",
    "Encoder",
    "Lanes",
    "TrackEvents",
    "clocks_now",
    "fields",
    "packet",
    "replaced",
]

PERFETTO_SUFFIXES: Final = (".pftrace", ".perfetto-trace")
"""How names of Perfetto's files end."""

Arguments: TypeAlias = Mapping[str, "bool | int | float | str"]
"""What a viewer shows of an event. Integers are in -2**63 to 2**64 - 1."""
NO_ARGUMENTS: Final[Arguments] = {}


class Encoder(Protocol):
    """What both formats can express. Times are nanoseconds of CLOCK_MONOTONIC."""

    def start(self) -> bytes:
        """Return the beginning of a file."""

    def track(self, name: str, parent: int = 0, pid: int = 0) -> tuple[int, bytes]:
        """Return a new track, which is below `parent`, and its description.

        With `pid` it stands for a process. Slices of one track must nest: see `Lanes`.
        """

    def begin(
        self,
        track: int,
        time_ns: int,
        name: str,
        arguments: Arguments = NO_ARGUMENTS,
        flows: Iterable[int] = (),
        ended_flows: Iterable[int] = (),
    ) -> bytes:
        """Return the beginning of a slice.

        Arrows lead from a slice to all later ones with the same flow. A flow ends at the slice
        that has it among `ended_flows`.
        """

    def end(self, track: int, time_ns: int, arguments: Arguments = NO_ARGUMENTS) -> bytes:
        """Return the end of the slice that began last on the track."""

    def instant(
        self, track: int, time_ns: int, name: str, arguments: Arguments = NO_ARGUMENTS
    ) -> bytes:
        """Return an event without a duration."""

    def finish(self) -> bytes:
        """Return the end of a file."""


# --- Perfetto -------------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_REALTIME, _MONOTONIC, _BOOTTIME = 1, 3, 6
_EVENT_NAMES, _ARGUMENT_NAMES = 2, 3


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


_often = functools.lru_cache(4096)(_number)
"""`_number` for fields whose values are few."""


def _message(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _string(field: int, text: str) -> bytes:
    return _message(field, text.encode(errors="replace"))


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _flow(field: int, flow: int) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<Q", flow)


def packet(*parts: bytes) -> bytes:
    """Return a packet as it stands in a file."""
    return _message(1, *parts)


def fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yield each field of an encoded message: its number, its value, and all of its bytes.

    Raises
    ------
    ValueError
        These bytes are no message.
    """
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        value: int | bytes
        if key & 7 == _VARINT:
            value, at = _read_varint(message, at)
        else:
            length = 8
            if key & 7 == _BYTES:
                length, at = _read_varint(message, at)
            elif key & 7 != _FIXED64:
                raise ValueError(f"a field has the wire type {key & 7}")
            value, at = message[at : at + length], at + length
        if at > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, value, message[start:at]


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for place in range(10):
        if at + place >= len(message):
            raise ValueError("a number is cut off")
        byte = message[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number is too long")


def replaced(message: bytes, path: Sequence[int], change: Callable[[int], int]) -> bytes:
    """Return a message in which the numbers at a path of fields are changed."""
    parts = []
    for field, value, raw in fields(message):
        if field != path[0]:
            parts.append(raw)
        elif isinstance(value, bytes) and len(path) > 1:
            parts.append(_message(field, replaced(value, path[1:], change)))
        elif isinstance(value, int) and len(path) == 1:
            parts.append(_number(field, change(value)))
    return b"".join(parts)


class TrackEvents:
    """Encodes Perfetto's TrackEvent protobuf, as one sequence of packets.

    Parameters
    ----------
    clocks : dict of int to int, optional
        What Perfetto's clocks (1: realtime, 3: monotonic, 6: boottime) show at one moment, in
        nanoseconds. Default: `clocks_now`.
    identity : int, optional
        Less than 2**31. Files with different ones may be put behind each other: they have
        different tracks and flows. Default: random.
    """

    def __init__(
        self, clocks: Mapping[int, int] | None = None, identity: int | None = None
    ) -> None:
        identity = secrets.randbits(31) if identity is None else identity
        self._clocks = clocks
        self._sequence = _number(10, identity + 1)
        self._in_sequence = self._sequence + _number(13, _NEEDS_STATE)
        self._next_flow = (identity << 32) + 1
        self._tracks = count(self._next_flow)
        self._names: dict[tuple[int, str], int] = {}
        self._news = b""

    def start(self) -> bytes:
        """Return the clocks, and the defaults of all packets."""
        clocks = clocks_now() if self._clocks is None else self._clocks
        shown = [
            _message(1, _number(1, clock), _number(2, time_ns)) for clock, time_ns in clocks.items()
        ]
        defaults = _message(59, _number(58, _MONOTONIC))
        sequence = self._sequence + _number(13, _STATE_CLEARED)
        return packet(_message(6, *shown, _number(2, _MONOTONIC)), sequence, defaults)

    def track(self, name: str, parent: int = 0, pid: int = 0) -> tuple[int, bytes]:
        """Return a new track and its description.

        A viewer joins tracks of one name and one parent: such are the lanes of `Lanes`.
        """
        process = _message(3, _number(1, pid), _string(6, name)) if pid else b""
        return self._track(name, parent, process)

    def counter(self, name: str, parent: int = 0, unit: str = "") -> tuple[int, bytes]:
        """Return a new track for numbers and its description."""
        return self._track(name, parent, _message(8, *([_string(6, unit)] if unit else [])))

    def begin(
        self,
        track: int,
        time_ns: int,
        name: str,
        arguments: Arguments = NO_ARGUMENTS,
        flows: Iterable[int] = (),
        ended_flows: Iterable[int] = (),
    ) -> bytes:
        """Return the beginning of a slice."""
        arrows = [_flow(47, flow) for flow in flows] + [_flow(48, flow) for flow in ended_flows]
        named = self._named(name)
        return self._event(_BEGIN, track, time_ns, named, *self._shown(arguments), *arrows)

    def end(self, track: int, time_ns: int, arguments: Arguments = NO_ARGUMENTS) -> bytes:
        """Return the end of the slice that began last on the track."""
        return self._event(_END, track, time_ns, *self._shown(arguments))

    def instant(
        self, track: int, time_ns: int, name: str, arguments: Arguments = NO_ARGUMENTS
    ) -> bytes:
        """Return an event without a duration."""
        return self._event(_INSTANT, track, time_ns, self._named(name), *self._shown(arguments))

    def count(self, track: int, time_ns: int, value: float) -> bytes:
        """Return the value of a counter from this time on."""
        shown = _number(30, value) if isinstance(value, int) else _double(44, value)
        return self._event(_COUNTER, track, time_ns, shown)

    def flows(self, n: int) -> int:
        """Return the first of n new flows, which have consecutive numbers."""
        first, self._next_flow = self._next_flow, self._next_flow + n
        return first

    def finish(self) -> bytes:
        """Return nothing: a trace is a sequence of packets."""
        return b""

    def _track(self, name: str, parent: int, *more: bytes) -> tuple[int, bytes]:
        track = next(self._tracks)
        above = [_number(5, parent)] if parent else []
        described = _message(60, _number(1, track), *above, _string(2, name), *more)
        return track, packet(described, self._sequence)

    def _event(self, kind: int, track: int, time_ns: int, *fields: bytes) -> bytes:
        """Return a packet, with the names that no earlier packet had."""
        news, self._news = self._news, b""
        return packet(
            _number(8, time_ns),
            self._in_sequence,
            _message(12, news) if news else b"",
            _message(11, _often(9, kind), _often(11, track), *fields),
        )

    def _named(self, name: str) -> bytes:
        return _often(10, self._interned(_EVENT_NAMES, name))

    def _shown(self, arguments: Arguments) -> list[bytes]:
        return [
            _message(4, _often(1, self._interned(_ARGUMENT_NAMES, name)), _value(value))
            for name, value in arguments.items()
        ]

    def _interned(self, kind: int, name: str) -> int:
        number = self._names.get((kind, name))
        if number is None:
            number = self._names[kind, name] = len(self._names) + 1
            self._news += _message(kind, _number(1, number), _string(2, name))
        return number


def _value(value: bool | float | str) -> bytes:
    if isinstance(value, str):
        return _string(6, value)
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int):
        return _number(3 if value >= 1 << 63 else 4, value)
    return _double(5, value)


def clocks_now() -> dict[int, int]:
    """Return what realtime, monotonic and boottime show now, in nanoseconds."""
    clocks = {_REALTIME: time.CLOCK_REALTIME, _MONOTONIC: time.CLOCK_MONOTONIC}
    if hasattr(time, "CLOCK_BOOTTIME"):
        clocks[_BOOTTIME] = time.CLOCK_BOOTTIME
    return {number: time.clock_gettime_ns(clock) for number, clock in clocks.items()}


# --- chrome://tracing -----------------------------------------------------------------------------


class ChromeEvents:
    """Encodes JSON for chrome://tracing, with times in microseconds since `start`.

    A track without a parent is a process of the viewer, one below it a thread.
    """

    def __init__(self) -> None:
        self._start_ns = 0
        self._tracks: list[tuple[int, int]] = []

    def start(self) -> bytes:
        """Return the beginning of a list."""
        self._start_ns = time.monotonic_ns()
        return b"[\n"

    def track(self, name: str, parent: int = 0, pid: int = 0) -> tuple[int, bytes]:
        """Return a new track and its name."""
        track = len(self._tracks) + 1
        place = (self._tracks[parent - 1][0], track) if parent else (pid or track - 1, 0)
        self._tracks.append(place)
        kind = "thread_name" if parent else "process_name"
        return track, self._event(track, "M", name=kind, args={"name": name})

    def begin(
        self,
        track: int,
        time_ns: int,
        name: str,
        arguments: Arguments = NO_ARGUMENTS,
        flows: Iterable[int] = (),
        ended_flows: Iterable[int] = (),
    ) -> bytes:
        """Return the beginning of a slice."""
        event = self._event(track, "B", time_ns, name=name, **_given(arguments))
        arrows = [("s", flow) for flow in flows] + [("f", flow) for flow in ended_flows]
        return event + b"".join(
            self._event(track, phase, time_ns, name="flow", cat="flow", id=flow, bp="e")
            for phase, flow in arrows
        )

    def end(self, track: int, time_ns: int, arguments: Arguments = NO_ARGUMENTS) -> bytes:
        """Return the end of the slice that began last on the track."""
        return self._event(track, "E", time_ns, **_given(arguments))

    def instant(
        self, track: int, time_ns: int, name: str, arguments: Arguments = NO_ARGUMENTS
    ) -> bytes:
        """Return an event without a duration."""
        return self._event(track, "i", time_ns, name=name, s="g", **_given(arguments))

    def finish(self) -> bytes:
        """Return the end of the list."""
        return b"{}]\n"

    def _event(self, track: int, phase: str, time_ns: int | None = None, **more: Any) -> bytes:
        pid, tid = self._tracks[track - 1]
        when = {} if time_ns is None else {"ts": (time_ns - self._start_ns) // 1000}
        event = {"ph": phase, "pid": pid, "tid": tid, **when, **more}
        return json.dumps(event, separators=(",", ":")).encode() + b",\n"


def _given(arguments: Arguments) -> dict[str, Arguments]:
    return {"args": arguments} if arguments else {}


class Lanes:
    """Tracks side by side for slices that overlap: each slice gets one that is free.

    Slices must come in the order of their beginnings.
    """

    def __init__(self) -> None:
        self._free_from_ns: list[int] = []

    def place(self, begin_ns: int, end_ns: int) -> int:
        """Return the number of the lane for a slice, from 0."""
        for lane, free_ns in enumerate(self._free_from_ns):
            if free_ns <= begin_ns:
                self._free_from_ns[lane] = end_ns
                return lane
        self._free_from_ns.append(end_ns)
        return len(self._free_from_ns) - 1
