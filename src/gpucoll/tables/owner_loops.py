"""Loops that divide the rows of a table over hosts, and requests over the hosts that own the rows.

A word of the directory is a row's entry: the number of its owner in the upper bits, its place among
that host's rows in the lower `PLACE_BITS`.
"""

from __future__ import annotations

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used

PLACE_BITS = 40
PLACE_MASK = (1 << PLACE_BITS) - 1
_FIRST, _SECOND = -0x00AE502812AA7333, -0x3B314601E57A13AD
"""The multipliers of MurmurHash3's finalizer, as signed words."""
_LOWER_31 = (1 << 31) - 1
_LEAST = -(1 << 63)


@inline
def weight_of(row: int, key: int) -> int:
    """Return the weight of a host for a row: every bit depends on all bits of both."""
    mixed = row ^ key
    mixed = (mixed ^ ((mixed >> 33) & _LOWER_31)) * _FIRST
    mixed = (mixed ^ ((mixed >> 33) & _LOWER_31)) * _SECOND
    return mixed ^ ((mixed >> 33) & _LOWER_31)


@compiled_when_used()
def divide_rows(directory: Words, rows: int, keys: Words, counts: Words, hosts: int) -> None:
    """Give each row to the host with the greatest weight, at the next place there.

    Parameters
    ----------
    directory : Words
        One for each row; written.
    keys, counts : Words
        One for each host. The counts are 0 at first, and the numbers of their rows at the end.
    """
    for row in range(rows):
        owner, greatest = 0, _LEAST
        for host in range(hosts):
            weight = weight_of(row, keys[host])
            if weight > greatest:
                owner, greatest = host, weight
        directory[row] = (owner << PLACE_BITS) | counts[owner]
        counts[owner] += 1


@compiled_when_used()
def count_owners(directory: Words, ids: Words, count: int, counts: Words) -> None:
    """Add to each host's count how many of `count` ids it owns."""
    for index in range(count):
        counts[directory[ids[index]] >> PLACE_BITS] += 1


@compiled_when_used()
def sort_by_owner(
    directory: Words, ids: Words, count: int, ends: Words, order: Words, places: Words
) -> None:
    """Sort ids by their owners, those of one owner in their own order.

    Parameters
    ----------
    ends : Words
        One for each host: where its part begins; at the end, where its part ends.
    order, places : Words
        `count` each; written: which id is next, and the place of its row at its owner.
    """
    for index in range(count):
        entry = directory[ids[index]]
        owner = entry >> PLACE_BITS
        end = ends[owner]
        order[end] = index
        places[end] = entry & PLACE_MASK
        ends[owner] = end + 1


@compiled_when_used()
def rows_of_host(directory: Words, begin: int, end: int, host: int, ids: Words) -> int:
    """Write the ids from `begin` to `end` that a host owns, ascending; return how many."""
    count = 0
    for row in range(begin, end):
        if directory[row] >> PLACE_BITS == host:
            ids[count] = row
            count += 1
    return count
