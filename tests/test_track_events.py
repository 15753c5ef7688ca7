"""Traces: what is encoded is read back by the tests' own decoder, and by Perfetto's descriptors."""

from __future__ import annotations

import json

import pytest

from gpucoll.track_events import ChromeEvents, Lanes, TrackEvents
from tests.track_events import Event, Trace, read_trace

CLOCKS = {1: 1_700_000_000_000_000_000, 3: 5_000, 6: 6_000}
ARGUMENTS = {
    "negative": -5,
    "large": (1 << 64) - 1,
    "most": (1 << 63) - 1,
    "share": 0.25,
    "yes": True,
    "no": False,
    "text": "größer",
}


def encoded(encoder):
    """Return a small trace: a call below a process, with an argument, an arrow and an instant."""
    parts = [encoder.start()]

    def track(*given):
        number, described = encoder.track(*given)
        parts.append(described)
        return number

    process = track("rank 1", 0, 77)
    lanes = [track("world", process), track("world", process)]
    parts += [
        encoder.begin(lanes[0], 1_000, "all_reduce", ARGUMENTS, flows=[3]),
        encoder.begin(lanes[1], 2_000, "all_reduce", ended_flows=[3]),
        encoder.instant(lanes[1], 2_500, "late", {"by": "rank 2"}),
        encoder.end(lanes[0], 3_000),
        encoder.end(lanes[1], 2**40, {"bytes": 8}),
        encoder.finish(),
    ]
    return b"".join(parts)


def test_what_perfetto_reads():
    trace = read_trace(encoded(TrackEvents(CLOCKS, 0)))
    assert (trace.clocks, trace.clock) == (CLOCKS, 3)
    assert [(one.name, one.parent, one.pid) for one in trace.tracks.values()] == [
        ("rank 1", 0, 77),
        ("world", 1, 0),
        ("world", 1, 0),
    ]
    path = ("rank 1", "world")
    assert trace.events == [
        Event("begin", 1_000, 2, path, "all_reduce", ARGUMENTS, [3]),
        Event("begin", 2_000, 3, path, "all_reduce", {}, [], [3]),
        Event("instant", 2_500, 3, path, "late", {"by": "rank 2"}),
        Event("end", 3_000, 2, path),
        Event("end", 2**40, 3, path, "", {"bytes": 8}),
    ]
    assert [(begin.time_ns, end.time_ns) for begin, end in trace.slices()] == [
        (1_000, 3_000),
        (2_000, 2**40),
    ]


def test_counters():
    encoder = TrackEvents(CLOCKS, 0)
    data = encoder.start()
    track, described = encoder.counter("left out", unit="calls")
    data += described + encoder.count(track, 7, 12) + encoder.count(track, 8, -1.5)
    trace = read_trace(data)
    assert trace.tracks[track].is_counter
    assert [(one.kind, one.time_ns, one.value) for one in trace.events] == [
        ("count", 7, 12),
        ("count", 8, -1.5),
    ]


def test_files_may_be_put_behind_each_other():
    first, second = (encoded(TrackEvents(CLOCKS)) for _ in range(2))
    trace = read_trace(first + second)
    assert len(trace.tracks) == 6
    assert len(trace.slices()) == 4


def test_names_are_written_once():
    encoder = TrackEvents(CLOCKS, 0)
    track, _ = encoder.track("t")
    first, *others = (encoder.begin(track, 1, "a_long_name", {"argument": 1}) for _ in range(3))
    assert (first.count(b"a_long_name"), first.count(b"argument")) == (1, 1)
    assert not any(b"a_long_name" in other or b"argument" in other for other in others)


def test_perfettos_own_descriptors():
    """They read the same as the decoder of these tests."""
    protos = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="needs Perfetto's descriptors: pip install perfetto",
    )
    data = encoded(TrackEvents(CLOCKS, 0))
    packets = protos.Trace.FromString(data).packet
    ours: Trace = read_trace(data)
    clocks = {each.clock_id: each.timestamp for each in packets[0].clock_snapshot.clocks}
    assert clocks == ours.clocks
    assert packets[0].clock_snapshot.primary_trace_clock == protos.BUILTIN_CLOCK_MONOTONIC
    assert packets[0].trace_packet_defaults.timestamp_clock_id == protos.BUILTIN_CLOCK_MONOTONIC
    tracks = [each.track_descriptor for each in packets if each.HasField("track_descriptor")]
    assert [(one.uuid, one.name, one.parent_uuid, one.process.pid) for one in tracks] == [
        (uuid, one.name, one.parent, one.pid) for uuid, one in ours.tracks.items()
    ]
    assert tracks[0].process.process_name == "rank 1"
    events = [each for each in packets if each.HasField("track_event")]
    kinds = {1: "begin", 2: "end", 3: "instant"}
    assert [
        (kinds[each.track_event.type], each.timestamp, each.track_event.track_uuid)
        for each in events
    ] == [(one.kind, one.time_ns, one.track) for one in ours.events]
    assert [list(each.track_event.flow_ids) for each in events] == [
        one.flows for one in ours.events
    ]
    shown = events[0].track_event.debug_annotations
    values = [getattr(each, each.WhichOneof("value")) for each in shown]
    assert values == list(ARGUMENTS.values())
    assert not any(_unknown(protos, each) for each in packets)


def _unknown(protos, packet):
    """Return whether a packet has fields that Perfetto does not know."""
    unknown_fields = pytest.importorskip("google.protobuf.unknown_fields")
    inner = [packet, packet.track_event, packet.track_descriptor, packet.interned_data]
    return any(len(unknown_fields.UnknownFieldSet(each)) for each in inner)


def test_what_chrome_reads():
    *events, end = json.loads(encoded(ChromeEvents()))
    assert end == {}
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
    assert named == {(77, 0): "rank 1", (77, 2): "world", (77, 3): "world"}
    shown = [(one["ph"], one["tid"], one.get("name", "")) for one in events if one["ph"] != "M"]
    assert shown == [
        *(("B", 2, "all_reduce"), ("s", 2, "flow")),
        *(("B", 3, "all_reduce"), ("f", 3, "flow")),
        *(("i", 3, "late"), ("E", 2, ""), ("E", 3, "")),
    ]


def test_slices_that_overlap_get_lanes():
    lanes = Lanes()
    slices = [(0, 10), (1, 5), (2, 12), (5, 6), (6, 20), (10, 11), (12, 13)]
    assert [lanes.place(*each) for each in slices] == [0, 1, 2, 1, 1, 0, 0]
