"""Writes recorded calls as tracks that Perfetto shows.

Each rank is a process of the viewer, with a track for each of its communicators. If calls of one
overlap, the track has several lanes. A call that waits for a rank is cut in two, and an arrow leads
from the call of that rank to where the data begins to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.observe.meetings import Register
from gpucoll.observe.recording import Recording
from gpucoll.observe.segments import Observed
from gpucoll.observe.watch import Calls
from gpucoll.track_events import Lanes, TrackEvents
from gpucoll.transport.shared.spans import SpanKind
from gpucoll.types import dtype_name, operation_name

__all__ = ["SEVERAL_HOSTS", "SHOWN_WAIT_NS", "encode"]

SEVERAL_HOSTS = "several hosts"
"""The argument that calls of several hosts have: their numbers are the same on all."""
SHOWN_WAIT_NS = 1000
"""Shorter waits are not drawn."""
_SUFFIXES: Final[dict[int, str]] = {
    SpanKind.PART: " inside the host",
    SpanKind.GPU: " on GPU",
    SpanKind.SEND: " messages",
    SpanKind.RECV: " messages",
}
_MESSAGES = (SpanKind.SEND, SpanKind.RECV)
_MEETING = (SpanKind.COLLECTIVE, SpanKind.PART)


def encode(recording: Recording, events: TrackEvents | None = None) -> Iterator[bytes]:
    """Yield the parts of a file, each of a few kilobytes at most."""
    events = TrackEvents() if events is None else events
    yield events.start()
    processes: dict[int, int] = {}
    for segment in recording.segments:  # the first communicator of a program has all its ranks
        for place, pid in enumerate(segment.pids):
            if pid not in processes:
                name = f"rank {segment.number(place)}"
                processes[pid], described = events.track(name, pid=pid)
                yield described
    for place, segment in enumerate(recording.segments):
        name = segment.job.name or ("world" if place == 0 else f"communicator {place}")
        communicator = _Communicator(segment, name, events, processes)
        yield from communicator.encode(recording.calls[place])
    yield from _left_out(recording, events, processes)


def _left_out(
    recording: Recording, events: TrackEvents, processes: dict[int, int]
) -> Iterator[bytes]:
    """Yield a counter for each rank of which calls are missing, and say so once in its track."""
    counters: dict[int, int] = {}
    sums: dict[int, int] = {}
    for each in recording.left_out:
        segment = recording.segments[each.place]
        for rank in np.flatnonzero(each.numbers):
            pid, number = segment.pids[rank], int(each.numbers[rank])
            if pid not in counters:
                above = processes[pid]
                counters[pid], described = events.counter("calls left out", above, "calls")
                yield described
                yield events.count(counters[pid], recording.begun_ns, 0)
                yield events.instant(above, each.time_ns, "from here on calls are left out")
            sums[pid] = sums.get(pid, 0) + number
            yield events.count(counters[pid], each.time_ns, sums[pid])


@dataclass
class _Wait:
    """What is drawn of a call in which all ranks of the host have been."""

    last: int
    waited_ns: int
    all_there_ns: int
    flows: list[int] = field(default_factory=list)
    """The arrows that lead to this call, or for the last rank those that lead away."""


class _Communicator:
    """The tracks of one communicator."""

    def __init__(
        self, segment: Observed, name: str, events: TrackEvents, processes: dict[int, int]
    ) -> None:
        self._segment, self._name = segment, name
        self._events, self._processes = events, processes
        self._lanes: dict[tuple[int, str], Lanes] = {}
        self._tracks: dict[tuple[int, str, int], int] = {}

    def encode(self, calls: npt.NDArray[np.void]) -> Iterator[bytes]:
        """Yield the calls, in the order of their beginnings."""
        waits = self._waits(calls)
        for call in calls[np.argsort(calls["begun_ns"], kind="stable")]:
            wait = waits.get((int(call["sequence"]), int(call["rank"])))
            yield self._call(call, wait if int(call["kind"]) in _MEETING else None)

    def _waits(self, calls: npt.NDArray[np.void]) -> dict[tuple[int, int], _Wait]:
        size = self._segment.world_size
        nothing_missed = np.zeros(size, np.int64)
        meetings = Register(size).add(Calls(self._segment, calls, nothing_missed))
        waits = {}
        for row, last, waited in zip(
            meetings.calls, meetings.last, meetings.waited_ns, strict=True
        ):
            all_there_ns, sequence = int(row["begun_ns"].max()), int(row["sequence"][0])
            mine = waits[sequence, int(last)] = _Wait(int(last), 0, all_there_ns)
            for rank in np.flatnonzero(waited > 0):
                wait = waits[sequence, int(rank)] = _Wait(
                    int(last), int(waited[rank]), all_there_ns
                )
                if waited[rank] >= SHOWN_WAIT_NS and row["ended_ns"][rank] > all_there_ns + 1:
                    wait.flows.append(self._events.flow())
                    mine.flows += wait.flows
        return waits

    def _call(self, call: npt.NDArray[np.void], wait: _Wait | None) -> bytes:
        begun_ns, ended_ns = int(call["begun_ns"]), int(call["ended_ns"])
        track, described = self._track(call)
        events, arguments = self._events, self._arguments(call)
        if wait is None:
            begin = events.begin(track, begun_ns, _name_of(call), arguments)
            return described + begin + events.end(track, ended_ns)
        rank = self._segment.number(wait.last)
        arguments |= {"last rank": rank, "waited_us": wait.waited_ns / 1000}
        leaving = wait.flows if wait.last == call["rank"] else ()
        parts = [described, events.begin(track, begun_ns, _name_of(call), arguments, leaving)]
        if wait.waited_ns >= SHOWN_WAIT_NS:
            until_ns = begun_ns + wait.waited_ns
            parts += [events.begin(track, begun_ns, f"waits for rank {rank}")]
            parts += [events.end(track, until_ns)]
            if wait.flows:  # 1 ns later, because the earlier end of an arrow is its beginning
                moves = events.begin(track, until_ns + 1, "moves data", ended_flows=wait.flows)
                parts += [moves, events.end(track, ended_ns)]
        return b"".join([*parts, events.end(track, ended_ns)])

    def _track(self, call: npt.NDArray[np.void]) -> tuple[int, bytes]:
        """Return the track for a call, and its description if it is new."""
        rank, name = int(call["rank"]), self._name + _SUFFIXES.get(int(call["kind"]), "")
        lanes = self._lanes.setdefault((rank, name), Lanes())
        key = rank, name, lanes.place(int(call["begun_ns"]), int(call["ended_ns"]))
        if key in self._tracks:
            return self._tracks[key], b""
        above = self._processes[self._segment.pids[rank]]
        self._tracks[key], described = self._events.track(name, above)
        return self._tracks[key], described

    def _arguments(self, call: npt.NDArray[np.void]) -> dict[str, bool | int | float | str]:
        what = int(call["kind"])
        found: dict[str, bool | int | float | str] = {"bytes": int(call["size_bytes"])}
        if int(call["dtype"]) >= 0:
            found["dtype"] = dtype_name(int(call["dtype"]))
        if what in _MESSAGES:
            found["other rank"] = self._numbered(int(call["root"]))
            return found | {"tag": int(call["count"])}
        found |= {"sequence": int(call["sequence"]), "elements": int(call["count"])}
        if what == SpanKind.SEVERAL_HOSTS:
            found[SEVERAL_HOSTS] = True
        if operation := operation_name(int(call["operation"])):
            found["op"] = operation
        if int(call["root"]) >= 0:
            root = int(call["root"])
            found["root"] = root if what == SpanKind.SEVERAL_HOSTS else self._numbered(root)
        return found

    def _numbered(self, place: int) -> int:
        """Return the number of a rank of any host; garbage as it is."""
        return self._segment.number(place) if 0 <= place < self._segment.layout.ends else place


def _name_of(call: npt.NDArray[np.void]) -> str:
    kind, number = int(call["kind"]), int(call["collective"])
    if kind in _MESSAGES:
        return "send" if kind == SpanKind.SEND else "recv"
    try:
        return Collective(number).spelled
    except ValueError:
        return f"call of kind {number}"
