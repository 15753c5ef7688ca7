"""Collectives of Python objects, which travel as pickles in rows of bytes.

The first row has room for a small pickle. A second exchange follows only if a pickle is larger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpucoll.integrations.mpi4py.pickles import pickle

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.calls.given import AnyObject

Bytes = npt.NDArray[np.uint8]

ROW = 448
"""Bytes of a row: with its header it fits one slot of shared memory."""
_HEAD = 16
_ROOM = ROW - _HEAD


def dumped(value: AnyObject) -> Bytes:
    """Pickle an object into an array of bytes."""
    data = pickle.dumps(value)
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def loaded(data: Bytes) -> AnyObject:
    """Unpickle an array of bytes."""
    return pickle.loads(data.data) if len(data) else None


def _fill(row: Bytes, data: Bytes, largest: int) -> None:
    """Write the data's length, the length of this rank's longest, and the bytes that fit."""
    row[:_HEAD].view(np.int64)[:] = len(data), largest
    if len(data) <= _ROOM:
        row[_HEAD : _HEAD + len(data)] = data


def _lengths(rows: Bytes) -> tuple[list[int], int]:
    heads = rows[:, :_HEAD].copy().view(np.int64)
    return [int(length) for length in heads[:, 0]], int(heads[:, 1].max())


def bcast(comm: Communicator, value: AnyObject, root: int) -> AnyObject:
    row = np.zeros(ROW, np.uint8)
    data = dumped(value) if comm.rank == root else None
    if data is not None:
        _fill(row, data, len(data))
    comm.broadcast(row, root, out=row)
    length = int(row[:8].view(np.int64)[0])
    if length <= _ROOM:
        return value if data is not None else loaded(row[_HEAD : _HEAD + length])
    if data is not None:
        comm.broadcast(data, root)
        return value
    rest = np.empty(length, np.uint8)
    return loaded(comm.broadcast(rest, root, out=rest))


def allgather(comm: Communicator, value: AnyObject) -> list[AnyObject]:
    data = dumped(value)
    rows, lengths, largest = _all_rows(comm, data)
    if largest <= _ROOM:
        return _from_rows(rows, lengths)
    return _apart(comm.all_gather(data, counts=lengths), lengths)


def gather(comm: Communicator, value: AnyObject, root: int) -> list[AnyObject] | None:
    data = dumped(value)
    rows, lengths, largest = _all_rows(comm, data)
    if largest > _ROOM:
        whole = comm.gather(data, root, counts=lengths)
        return None if whole is None else _apart(whole, lengths)
    return _from_rows(rows, lengths) if comm.rank == root else None


def scatter(comm: Communicator, values: Sequence[AnyObject] | None, root: int) -> AnyObject:
    rows = None
    parts: list[Bytes] = []
    if comm.rank == root:
        parts = _dumped_for_each(comm, values)
        rows = _rows_of(parts)
    row = comm.scatter(rows, root, out=np.empty((1, ROW), np.uint8))
    lengths, largest = _lengths(row)
    if largest <= _ROOM:
        return _from_rows(row, lengths)[0]
    whole = np.concatenate(parts) if parts else None
    out = np.empty(lengths[0], np.uint8)
    return loaded(comm.scatter(whole, root, counts="auto", out=out))


def alltoall(comm: Communicator, values: Sequence[AnyObject]) -> list[AnyObject]:
    parts = _dumped_for_each(comm, values)
    rows = comm.all_to_all(_rows_of(parts))
    lengths, largest = _lengths(rows)
    if largest <= _ROOM:
        return _from_rows(rows, lengths)
    sizes = [len(part) for part in parts]
    out = np.empty(sum(lengths), np.uint8)
    whole = comm.all_to_all(np.concatenate(parts), send_counts=sizes, recv_counts=lengths, out=out)
    return _apart(whole, lengths)


def neighbour_exchange(
    comm: Communicator, values: Sequence[AnyObject], destinations: list[int], sources: list[int]
) -> list[AnyObject]:
    """Send one object along each edge; return those that arrived, by edge."""
    outgoing: list[list[Any]] = [[] for _ in range(comm.world_size)]
    for value, rank in zip(values, destinations, strict=True):
        if rank >= 0:
            outgoing[rank].append(value)
    incoming = [iter(items) for items in alltoall(comm, outgoing)]
    return [next(incoming[rank]) if rank >= 0 else None for rank in sources]


def reduce_all(
    values: list[AnyObject], function: Callable[[AnyObject, AnyObject], AnyObject]
) -> AnyObject:
    """Reduce objects from the first to the last."""
    return functools.reduce(function, values)


def _dumped_for_each(comm: Communicator, values: AnyObject) -> list[Bytes]:
    given = [None] * comm.world_size if values is None else list(values)
    if len(given) != comm.world_size:
        raise ValueError(f"expecting {comm.world_size} items, one for each rank; got {len(given)}")
    return [dumped(value) for value in given]


def _all_rows(comm: Communicator, data: Bytes) -> tuple[Bytes, list[int], int]:
    row = np.zeros((1, ROW), np.uint8)
    _fill(row[0], data, len(data))
    rows = comm.all_gather(row)
    return (rows, *_lengths(rows))


def _rows_of(parts: list[Bytes]) -> Bytes:
    largest = max(len(part) for part in parts)
    rows = np.zeros((len(parts), ROW), np.uint8)
    for row, part in zip(rows, parts, strict=True):
        _fill(row, part, largest)
    return rows


def _from_rows(rows: Bytes, lengths: list[int]) -> list[AnyObject]:
    return [loaded(row[_HEAD : _HEAD + length]) for row, length in zip(rows, lengths, strict=True)]


def _apart(whole: Bytes, lengths: list[int]) -> list[AnyObject]:
    ends = np.cumsum([0, *lengths])
    return [loaded(whole[ends[n] : ends[n + 1]]) for n in range(len(lengths))]
