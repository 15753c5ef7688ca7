"""Owners: rows are divided evenly, alike on every rank, and few move when hosts leave or join."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.tables.owners import Owners


def divided(comm, rows, ids):
    """Return what a rank knows of the owners: by host, its name, its rows and its part of ids."""
    owners = Owners(comm, rows)
    split = owners.split(ids)
    found = {}
    for host, name in enumerate(owners.hosts):
        part = split.part(host)
        found[name] = (owners.owned_by(host), split.order[part], split.places[part])
        assert owners.counts[host] == len(found[name][0])
        ascending = owners.owned_by(host, rows // 3, rows // 2)
        assert (ascending == [r for r in found[name][0] if rows // 3 <= r < rows // 2]).all()
    facts = owners.hosts, owners.ranks, owners.here, owners.is_divided
    owners.close()
    owners.close()
    return facts, found


@pytest.mark.parametrize("placed", ["ab", "aab", "abc", "baab"])
def test_each_row_has_one_owner_and_one_place(hosts, placed):
    rows = 3000
    ids = np.random.default_rng(1).integers(0, rows, 5000)

    results = hosts.call(placed, divided, rows, ids)

    names = list(dict.fromkeys(f"host {letter}" for letter in placed))
    of_host = [[r for r, letter in enumerate(placed) if f"host {letter}" == n] for n in names]
    for rank, (facts, found) in enumerate(results):
        assert facts == (names, of_host, names.index(f"host {placed[rank]}"), True)
        rows_found = np.concatenate([owned for owned, _, _ in found.values()])
        assert (np.sort(rows_found) == np.arange(rows)).all()
        for owned, order, places in found.values():
            assert (owned[places] == ids[order]).all()
            assert (np.diff(order) > 0).all()
            expected = rows / len(names)
            assert abs(len(owned) - expected) < 5 * np.sqrt(expected)
        for name, parts in found.items():
            assert all((a == b).all() for a, b in zip(parts, results[0][1][name], strict=True))


@pytest.mark.ranks(2)
def test_one_host_has_no_directory(comm):
    owners = Owners(comm, 100)
    ids = np.array([7, 99, 7])
    split = owners.split(ids)
    assert not owners.is_divided
    assert (split.starts, split.order.tolist(), split.places.tolist()) == (
        [0, 3],
        [0, 1, 2],
        [7, 99, 7],
    )
    assert (owners.counts, owners.owned_by(0, 3, 5).tolist()) == ([100], [3, 4])
    owners.close()


def test_few_rows_move_when_a_host_leaves_or_joins(hosts):
    ids = np.arange(4000)
    two = hosts.call("ab", divided, len(ids), ids)[0][1]
    three = hosts.call("abc", divided, len(ids), ids)[0][1]
    for name, (owned, _, _) in two.items():
        kept = three[name][0]
        assert np.isin(kept, owned).all()  # a host that stays gives away, and gets nothing
    moved = len(three["host c"][0])
    assert abs(moved - len(ids) / 3) < 5 * np.sqrt(len(ids) / 3)


def test_empty_requests(hosts):
    results = hosts.call("ab", divided, 10, np.empty(0, np.int64))
    assert all(len(order) == 0 for _, found in results for _, order, _ in found.values())
