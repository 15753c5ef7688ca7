"""Spans: the calls that a rank has made while somebody watched the job, with their times.

A process that watches takes memory for the spans, and then stores in the event line until when it
watches (`gpucoll.observe.watch`). From then on each rank notes when it comes to a call, in the
call's record, and writes a span when the call is over. The ring is overwritten: ranks never wait
for who watches. If the watcher ends, the time that it has stored passes, and the next call clears
it. While nobody watches, a call loads one word more, in a cache line that it loads anyway.
"""

from __future__ import annotations

from gpucoll.blocks import Block
from gpucoll.codes import Codes
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    add64,
    compare_exchange64,
    exchange64,
    load64,
    store64_release,
)
from gpucoll.transport.shared.flags import now_ns
from gpucoll.transport.shared.layout import EVENT_WATCHED, LINE_BYTES, SPAN_BYTES, SPANS, Record
from gpucoll.transport.shared.words import Context, Kind, Transfer

NOTHING = -1
"""In place of an operation or dtype."""


class SpanKind(Codes):
    """What a span is of."""

    COLLECTIVE = 1
    PART = 2  # of a collective of several hosts: inside one host
    SEVERAL_HOSTS = 3  # such a collective as a whole; its number is the same on all hosts
    GPU = 4  # a collective on GPU arrays, from when it was enqueued until it was seen to be over
    SEND = 5  # a message, from when it was posted until its memory may be used again
    RECV = 6


class Span(Block):
    """One call of one rank. All times are of the monotonic clock, which a host has once."""

    number: int  # how many spans the rank has written, with this one; written last; 0: not ready
    begun_ns: int
    ended_ns: int
    sequence: int
    what: int  # {dtype: 16 bits, operation, collective, `SpanKind`: 8 bits each}
    size_bytes: int
    root: int  # of a message: the place of the other rank
    count: int  # of a message: its tag


@inline
def what_of(kind: int, collective: int, operation: int, dtype: int) -> int:
    """Return the word `Span.what`."""
    low = kind | (collective & 0xFF) << 8
    return low | (operation & 0xFF) << 16 | (dtype & 0xFFFF) << 24


@inline
def _begin_span(spans: int) -> int:
    """Return the number of a new span. Several threads of a rank may write one at once."""
    number = add64(spans, 1) + 1
    span = _span_at(spans, number)
    exchange64(span.at.number, 0)  # a reader that sees the words that follow sees that they change
    return number


@inline
def _span_at(spans: int, number: int) -> Span:
    return Span(spans + LINE_BYTES + ((number - 1) & (SPANS - 1)) * SPAN_BYTES)


@inline
def write_span(context: Context, record: Record, kind: int, sequence: int, begun_ns: int) -> None:
    """Write the span of a call that is over, as its record describes it."""
    number = _begin_span(context.spans)
    span = _span_at(context.spans, number)
    span.begun_ns = begun_ns
    span.ended_ns = now_ns(context)
    span.sequence = sequence
    span.what = what_of(kind, record.collective, record.operation, record.dtype)
    span.size_bytes = record.size_bytes
    span.root = record.root
    span.count = record.count
    store64_release(span.at.number, number)


@inline
def time_if_watched(context: Context) -> int:
    """Return the time; 0 if nobody watches any more, which clears the word."""
    word = context.event_line + EVENT_WATCHED
    until_ns = load64(word)
    time_ns = now_ns(context)
    if time_ns < until_ns:
        return time_ns
    compare_exchange64(word, until_ns, 0)
    return 0


@compiled
def note_arrival(context: Context, record: Record) -> int:
    """Note in its record when a call began; called only if the word says that somebody watches."""
    record.begun_ns = time_if_watched(context)
    return 0


@compiled
def note_end(context: Context, record: Record) -> int:
    """Write the span of a call whose record has the time of its beginning."""
    kind = SpanKind.PART if context.hosts != 0 else SpanKind.COLLECTIVE
    write_span(context, record, kind, record.sequence, record.begun_ns)
    return 0


@compiled
def note_span(context: Context, record: Record, kind: int, sequence: int, begun_ns: int) -> int:
    """Write a span, for Python and for loops that are compiled when used."""
    write_span(context, record, kind, sequence, begun_ns)
    return 0


@compiled
def note_message(context: Context, row: Transfer) -> int:
    """Write the span of a send or receive that is over."""
    number = _begin_span(context.spans)
    span = _span_at(context.spans, number)
    is_sent = row.kind == Kind.SEND
    span.begun_ns = row.begun_ns
    span.ended_ns = now_ns(context)
    span.sequence = 0
    span.what = what_of(
        SpanKind.SEND if is_sent else SpanKind.RECV,
        0,
        NOTHING,
        row.dtype if is_sent else row.found_dtype,
    )
    span.size_bytes = row.size_bytes if is_sent else row.found_bytes
    span.root = row.peer if is_sent else row.found_peer
    span.count = row.tag if is_sent else row.found_tag
    store64_release(span.at.number, number)
    return 0
