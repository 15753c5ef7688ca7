"""Shares cover an array once, in order, and begin at whole units."""

from __future__ import annotations

import pytest

from gpucoll.algorithms.shares import edges_of, equal_edges, pieces, sizes_of


@pytest.mark.parametrize("count", [0, 1, 5, 16, 255, 256, 257, 1000])
@pytest.mark.parametrize("n_shares", [1, 2, 3, 7])
@pytest.mark.parametrize("unit", [1, 4, 256])
def test_equal_shares(count, n_shares, unit):
    edges = equal_edges(count, n_shares, unit)

    assert (len(edges), edges[0], edges[-1]) == (n_shares + 1, 0, count)
    assert all(edge % unit == 0 or edge == count for edge in edges)
    sizes = sizes_of(edges)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < -(-count // n_shares) + unit  # no unit more than needed
    assert edges_of(sizes) == edges


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 25])
def test_pieces(count):
    found = list(pieces(count, 10))

    assert [start for start, _ in found] == [*range(0, count, 10)]
    assert sum(size for _, size in found) == count
    assert all(0 < size <= 10 for _, size in found)
