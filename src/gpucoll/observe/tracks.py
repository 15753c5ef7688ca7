"""Writes recorded calls as tracks that Perfetto shows.

Each rank is a process of the viewer, with a track for each of its communicators. If calls of one
overlap, the track has several lanes. A call that waits for a rank is cut in two, and an arrow leads
from the call of that rank to where the data begins to move.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class _Waits:
    """The calls in which all ranks of the host have been: who came last, and who waited for it.

    Attributes
    ----------
    last : array of int64, shape (n,)
        By call, the rank that came last.
    waited_ns, has_arrow : array, shape (n, P)
        By call and rank, how long it waited, and whether an arrow leads to it.
    """

    def __init__(self, segment: Observed, calls: npt.NDArray[np.void], events: TrackEvents) -> None:
        size = segment.world_size
        meetings = Register(size).add(Calls(segment, calls, np.zeros(size, np.int64)))
        self.last, self.waited_ns = meetings.last, meetings.waited_ns
        all_there_ns = meetings.calls["begun_ns"].max(axis=1, keepdims=True)
        stayed = meetings.calls["ended_ns"] > all_there_ns + 1
        self.has_arrow = (self.waited_ns >= SHOWN_WAIT_NS) & stayed
        self._sequences = meetings.calls["sequence"][:, 0]
        self._size, self._first_flow = size, events.flows(self.waited_ns.size)

    def meeting_of(self, calls: npt.NDArray[np.void]) -> list[int]:
        """Return the place of each call here; -1: it has none."""
        if not len(self._sequences):
            return [-1] * len(calls)
        places = np.searchsorted(self._sequences, calls["sequence"])
        places = np.minimum(places, len(self._sequences) - 1)
        is_here = np.isin(calls["kind"], _MEETING) & (self._sequences[places] == calls["sequence"])
        found: list[int] = np.where(is_here, places, -1).tolist()
        return found

    def arrow(self, meeting: int, rank: int) -> int:
        """Return the flow that leads to a rank's call."""
        return self._first_flow + meeting * self._size + rank

    def leaving(self, meeting: int) -> list[int]:
        """Return the flows that lead away from the last rank's call."""
        ranks = np.flatnonzero(self.has_arrow[meeting]).tolist()
        return [self.arrow(meeting, rank) for rank in ranks]


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
        calls = calls[np.argsort(calls["begun_ns"], kind="stable")]
        waits = _Waits(self._segment, calls, self._events)
        for call, meeting in zip(calls, waits.meeting_of(calls), strict=True):
            yield self._call(call, waits, meeting)

    def _call(self, call: npt.NDArray[np.void], waits: _Waits, meeting: int) -> bytes:
        begun_ns, ended_ns = int(call["begun_ns"]), int(call["ended_ns"])
        track, described = self._track(call)
        events, arguments = self._events, self._arguments(call)
        if meeting < 0:
            begin = events.begin(track, begun_ns, _name_of(call), arguments)
            return described + begin + events.end(track, ended_ns)
        place, last = int(call["rank"]), int(waits.last[meeting])
        waited_ns, rank = int(waits.waited_ns[meeting, place]), self._segment.number(last)
        arguments |= {"last rank": rank, "waited_us": waited_ns / 1000}
        leaving = waits.leaving(meeting) if place == last else ()
        parts = [described, events.begin(track, begun_ns, _name_of(call), arguments, leaving)]
        if waited_ns >= SHOWN_WAIT_NS:
            until_ns = begun_ns + waited_ns
            parts += [events.begin(track, begun_ns, f"waits for rank {rank}")]
            parts += [events.end(track, until_ns)]
            if waits.has_arrow[meeting, place]:
                # 1 ns later, because the earlier end of an arrow is its beginning.
                arriving = [waits.arrow(meeting, place)]
                moves = events.begin(track, until_ns + 1, "moves data", ended_flows=arriving)
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
