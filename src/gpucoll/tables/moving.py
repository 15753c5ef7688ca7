"""The rows of a table go over to other hosts, after some are lost or have joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.tables.owners import Owners
    from gpucoll.tables.rows import Rows

__all__ = ["Held", "move"]

Ints: TypeAlias = npt.NDArray[np.int64]

_BYTES_AT_ONCE = 16 << 20


class Held(NamedTuple):
    """The rows that a rank had on the communicator before."""

    owners: Owners
    rows: Rows


def move(comm: Communicator, held: Held | None, owners: Owners, rows: Rows) -> Ints:
    """Copy the rows that are left, and what is kept beside them, to their new owners. Collective.

    Parameters
    ----------
    comm : Communicator
        The ranks from now on.
    held : Held or None
        What this rank had; None on a rank that has joined.
    owners, rows : Owners, Rows
        The new owners, and the new rows of this host.

    Returns
    -------
    array of int64
        The places of new rows of this host that no host had any more; on its first rank only.
    """
    carriers = comm.all_gather_object(None if held is None else held.owners.hosts[held.owners.here])
    gives = held is not None and carriers.index(carriers[comm.rank]) == comm.rank
    receives = comm.rank == owners.server(owners.here)
    is_there = np.zeros(rows.count if receives else 0, bool)
    row_bytes = max(1, rows.values[:1].nbytes + (0 if rows.sums is None else rows.sums[:1].nbytes))
    step = max(1, _BYTES_AT_ONCE // row_bytes)
    place = 0
    for begin in range(0, owners.rows, step):
        ids, given = np.empty(0, np.int64), slice(0, 0)
        if held is not None and gives:
            ids = held.owners.owned_by(held.owners.here, begin, min(begin + step, owners.rows))
            given = slice(place, place + len(ids))
            place += len(ids)
        split = owners.split(ids)
        counts = [0] * comm.world_size
        for host in range(len(owners.hosts)):
            part = split.part(host)
            counts[owners.server(host)] = part.stop - part.start
        places = comm.all_to_all(split.places, send_counts=counts)
        is_there[places] = True
        for of_rows in ("values", "sums"):
            destination: Any = getattr(rows, of_rows)
            if destination is not None:
                source = destination[:0] if held is None else getattr(held.rows, of_rows)[given]
                source = np.ascontiguousarray(source[split.order])
                destination[places] = comm.all_to_all(source, send_counts=counts)
    _move_torn(comm, held if gives else None, owners, rows)
    return np.flatnonzero(~is_there)


def _move_torn(comm: Communicator, held: Held | None, owners: Owners, rows: Rows) -> None:
    """Let rows that may be half updated stay in the list of these."""
    torn = np.empty(0, np.int64)
    if held is not None:
        torn = held.owners.owned_by(held.owners.here)[held.rows.torn()]
    torn = np.concatenate(comm.all_gather_object(torn))
    if comm.rank == owners.server(owners.here):
        split = owners.split(torn)
        rows.mark_torn(split.places[split.part(owners.here)])
