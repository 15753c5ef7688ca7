"""Which host owns which row of a table, and at which place among the rows of that host.

Rows are divided by rendezvous hashing: each host has a weight for each row, and the row goes to the
host with the greatest. A host that leaves changes only the owners of its rows, and one that joins
takes its share from all others. The result is a directory, a word for each row, in memory that the
ranks of a host share. On one host there is none: the place of a row is its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.api.host_memory import HostMemory
from gpucoll.hashing import blake2b
from gpucoll.tables import owner_loops as loops
from gpucoll.topology.host_identity import host_id

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["Owners", "Split"]

Ints: TypeAlias = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Ids of rows, sorted by their owners.

    Attributes
    ----------
    starts : list of int
        Where the part of each host begins in `order` and `places`, and their length.
    order : array of int64
        The indices of the ids; those of one owner ascend.
    places : array of int64
        The places of their rows at their owners, in that order.
    """

    starts: list[int]
    order: Ints
    places: Ints

    def part(self, host: int) -> slice:
        """Return the part of a host."""
        return slice(self.starts[host], self.starts[host + 1])


class Owners:
    """The owners of a table's rows. Collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that use the table.
    rows : int
        Number of rows of the table.

    Attributes
    ----------
    hosts : list of str
        The identities of the hosts, in the order of their first ranks.
    ranks : list of list of int
        The ranks of each host.
    here : int
        The number of this rank's host.
    counts : list of int
        How many rows each host owns.
    applied : array of int64
        Memory that the ranks of a host share, if there are several hosts: for each rank, the number
        of its last push that this host has applied.

    Notes
    -----
    Memory: 8 bytes for each row on each host, if there are several hosts. Cost: 2 ns for each row
    and host, on the first rank of each host.
    """

    def __init__(self, comm: Communicator, rows: int) -> None:
        self.rows = rows
        found = comm.all_gather_object(host_id())
        self.hosts = list(dict.fromkeys(found))
        self.ranks = [[r for r, name in enumerate(found) if name == host] for host in self.hosts]
        self.here = self.hosts.index(found[comm.rank])
        self.counts = [rows]
        self._memory: HostMemory | None = None
        if len(self.hosts) == 1:
            return
        count = len(self.hosts)
        size_bytes = 8 * (rows + count + comm.world_size)
        self._memory = memory = HostMemory(comm, size_bytes, "table's directory")
        self._directory: Ints = memory.array(0, (rows,), np.int64)
        counts: Ints = memory.array(8 * rows, (count,), np.int64)
        self.applied: Ints = memory.array(8 * (rows + count), (comm.world_size,), np.int64)
        try:
            if comm.rank == self.server(self.here):
                keys = np.array([_key(host) for host in self.hosts])
                _call(loops.divide_rows, self._directory, rows, keys, counts, count)
            comm.barrier()
        except BaseException:
            memory.close()
            raise
        self.counts = counts.tolist()

    @property
    def is_divided(self) -> bool:
        """Whether there are several hosts."""
        return self._memory is not None

    def server(self, host: int) -> int:
        """Return the rank that serves a host's rows to the others."""
        return self.ranks[host][0]

    def split(self, ids: Ints) -> Split:
        """Sort ids, which must be from 0 to ``rows - 1``, by their owners."""
        count, hosts = len(ids), len(self.hosts)
        if self._memory is None:
            return Split([0, count], np.arange(count), ids)
        ids = np.ascontiguousarray(ids)
        starts = np.zeros(hosts + 1, np.int64)
        _call(loops.count_owners, self._directory, ids, count, starts[1:])
        np.cumsum(starts, out=starts)
        order, places, ends = np.empty_like(ids), np.empty_like(ids), starts[:-1].copy()
        _call(loops.sort_by_owner, self._directory, ids, count, ends, order, places)
        return Split(starts.tolist(), order, places)

    def shares(self, split: Split) -> Ints:
        """Return, for each row of a split, the rank that applies pushes to it in mode "sync".

        The rows of a host are divided among its ranks.
        """
        ranks = np.empty(len(split.places), np.int64)
        for host, there in enumerate(self.ranks):
            part = split.part(host)
            share = split.places[part] * len(there) // max(self.counts[host], 1)
            ranks[part] = np.array(there)[share]
        return ranks

    def owned_by(self, host: int, begin: int = 0, end: int | None = None) -> Ints:
        """Return the ids from `begin` to `end` that a host owns, ascending, as their places do."""
        end = self.rows if end is None else end
        if self._memory is None:
            return np.arange(begin, end)
        ids = np.empty(min(self.counts[host], end - begin), np.int64)
        count = _call(loops.rows_of_host, self._directory, begin, end, host, ids)
        return ids[:count]

    def keep_memory(self) -> None:
        """Let `close` leave the memory mapped, since a thread may still use it."""
        if self._memory is not None:
            self._memory.is_in_use = True

    def close(self) -> None:
        """Release the directory. Closing twice does nothing."""
        if self._memory is not None:
            self._memory.close()


def _key(host: str) -> int:
    return int.from_bytes(blake2b(host.encode(), digest_size=8).digest(), "little", signed=True)


def _call(loop: Any, *arguments: Ints | int) -> int:
    """Call a compiled loop with the addresses of arrays."""
    words = [each if isinstance(each, int) else each.ctypes.data for each in arguments]
    return int(loop.ctypes(*words) or 0)
