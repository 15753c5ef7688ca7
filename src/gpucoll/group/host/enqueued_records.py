"""Calls on GPU arrays, compiled: posted beside the work, compared by whoever looks later.

A call that is enqueued on a stream cannot wait for the other ranks. It writes its record, with the
{sequence, digest} word last, into this rank's ring and goes on. `compare_calls` looks how far all
ranks have posted the same; a rank's ring is full when the slowest one has not compared its oldest.
"""

from __future__ import annotations

import numpy as np
from numba import types

from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    exchange32,
    exchange64,
    get,
    load32_acquire,
    load64,
    load64_acquire,
    put,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import behind, is_aborted
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.steps import DIGEST, RANK, WORLD_SIZE, fill_record
from gpucoll.transport.shared.words import Call, Context, State, Status

__all__ = ["compare_calls", "post", "post_call"]

_LINE, _RECORD_BYTES, _COMPARED = layout.LINE_BYTES, layout.RECORD_BYTES, layout.ENQUEUED_COMPARED
_OK, _EVENT, _MISMATCH = int(Status.OK), int(Status.EVENT), int(Status.MISMATCH)
_NOT_RUN, _MORE = int(Status.NOT_RUN), int(Status.MORE)
_STATE, _NEEDS_PYTHON = int(Context.STATE), int(State.NEEDS_PYTHON)
_LINES, _RECORDS, _COUNT = (
    int(Context.ENQUEUED_LINES),
    int(Context.ENQUEUED),
    int(Context.ENQUEUED_COUNT),
)
_SEQUENCE, _SEEN, _LATE = (
    int(Context.ENQUEUED_SEQUENCE),
    int(Context.ENQUEUED_SEEN),
    int(Context.ENQUEUED_LATE),
)
_CONTEXT, _CALL_SENT, _CALL_RECEIVED = int(Call.CONTEXT), int(Call.SENT), int(Call.RECEIVED)
_HEADER, _SENT, _RECEIVED = int(Record.HEADER), int(Record.SENT), int(Record.RECEIVED)
_i64 = types.int64


@inline
def _record_of(context, rank, sequence):
    """Return the address of a rank's record of the call numbered `sequence`."""
    count = get(context, _COUNT)
    return get(context, _RECORDS) + (rank * count + (sequence & (count - 1))) * _RECORD_BYTES


@inline
def _line_of(context, rank):
    """Return the address of the word that says how far a rank has compared."""
    return get(context, _LINES) + rank * _LINE + _COMPARED


@inline
def _is_full(context, sequence):
    """Return whether some rank has not compared the call whose record would be overwritten."""
    oldest = sequence - get(context, _COUNT)
    if not behind(get(context, _SEEN), oldest):
        return False
    seen = sequence
    for rank in range(get(context, WORLD_SIZE)):
        compared = np.int64(load32_acquire(_line_of(context, rank)))
        if behind(compared, seen):
            seen = compared
    put(context, _SEEN, seen)
    return behind(seen, oldest)


@inline
def post(context, call):
    """Write the record of a call; return a `Status` as `post_call` does."""
    if get(context, _STATE) == _NEEDS_PYTHON:
        return _NOT_RUN
    if is_aborted(context):
        return _EVENT
    sequence = np.int64(np.int32(get(context, _SEQUENCE) + 1))
    if _is_full(context, sequence):
        return _MORE
    record = _record_of(context, get(context, RANK), sequence)
    fill_record(record, call, sequence)
    put(record, _SENT, get(call, _CALL_SENT))
    put(record, _RECEIVED, get(call, _CALL_RECEIVED))
    exchange64(record + 8 * _HEADER, (get(call, DIGEST) << 32) | (sequence & 0xFFFFFFFF))
    put(context, _SEQUENCE, sequence)
    return _OK


@compiled(_i64(_i64, _i64))
def post_call(self, _):
    """Built-in without arguments; `self` is a capsule of a call block. Returns a `Status`.

    NOT_RUN: closed, forked or to be recovered; EVENT: aborted; MORE: the ring is full.
    """
    call = capsule_pointer(self, 0)
    return new_integer(post(get(call, _CONTEXT), call))


@inline
def _compare_one(context, sequence):
    """Compare all ranks' records of one call: OK, MISMATCH, or MORE where one is not there yet."""
    me = get(context, RANK)
    mine = load64(_record_of(context, me, sequence) + 8 * _HEADER)
    sent = received = np.int64(0)
    status = _OK
    for rank in range(get(context, WORLD_SIZE)):
        record = _record_of(context, rank, sequence)
        header = load64_acquire(record + 8 * _HEADER)
        sent += get(record, _SENT)
        received += get(record, _RECEIVED)
        if header == mine:
            continue
        if np.int32(header) != np.int32(mine):
            put(context, _LATE, rank)
            return _MORE
        status = _MISMATCH  # go on: the error names every odd rank, so all must have come
    return _MISMATCH if sent != received else status


@compiled(_i64(_i64))
def compare_calls(context):
    """Go on comparing as far as all ranks have posted; return a `Status`. For Python.

    OK: all that this rank has posted is the same everywhere; MORE: so far, but a rank has not come
    (`Context.ENQUEUED_LATE`); MISMATCH: the call after the last one compared differs.
    """
    line = _line_of(context, get(context, RANK))
    compared, posted = np.int64(load32_acquire(line)), get(context, _SEQUENCE)
    status = _OK
    put(context, _LATE, -1)
    while status == _OK and behind(compared, posted):
        sequence = np.int64(np.int32(compared + 1))
        status = _compare_one(context, sequence)
        if status == _OK:
            compared = sequence
    exchange32(line, np.int32(compared))
    return status
