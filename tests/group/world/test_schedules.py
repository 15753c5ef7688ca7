"""Schedules as rows: sections, lanes, and arrays of more than 4 GiB; nothing is moved."""

from __future__ import annotations

from collections import defaultdict

import pytest

from gpucoll.algorithms import chain, direct, doubling, halving, pairwise, ring
from gpucoll.group.world.schedules import LANE_BYTES, Schedule, Section, lane_of, table_of
from gpucoll.transport.tcp.streams import Row

COUNT = 4
MAKES = [
    (ring.all_reduce, COUNT, False),
    (ring.reduce_scatter, COUNT, False),
    (ring.all_gather, COUNT, False),
    (doubling.all_reduce, 1, False),
    (halving.all_reduce, halving.blocks(COUNT), False),
    (chain.broadcast, 1, True),
    (pairwise.all_to_all, 2 * COUNT, False),
    (direct.gather, COUNT, True),
    (direct.scatter, COUNT, True),
]


def links(here, n_lanes):
    """Number a link for each other host and lane."""
    others = [host for host in range(COUNT) if host != here]
    number = {host: place for place, host in enumerate(others)}
    return tuple(
        tuple(-1 if host == here else lane * len(others) + number[host] for host in range(COUNT))
        for lane in range(n_lanes)
    )


def streams_of(table, here, n_lanes):
    """Return what goes over each link, both ways, and which bytes that are: by (lane, host)."""
    of_link = {
        link: (lane, host)
        for lane, by_host in enumerate(links(here, n_lanes))
        for host, link in enumerate(by_host)
    }
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    for row in table.rows.tolist():
        if row[Row.send_peer] >= 0:
            sent[of_link[row[Row.send_peer]]] += row[Row.send_bytes]
        if row[Row.receive_peer] >= 0:
            received[of_link[row[Row.receive_peer]]] += row[Row.receive_bytes]
    return sent, received


@pytest.mark.parametrize("n_lanes", [1, 2, 5])
@pytest.mark.parametrize("block_bytes", [1000, LANE_BYTES * 2, (3 << 30) + 4])
@pytest.mark.parametrize(("make", "n_blocks", "is_rooted"), MAKES)
def test_both_ends_of_each_lane_expect_the_same(make, n_blocks, is_rooted, block_bytes, n_lanes):
    edges = [block * block_bytes for block in range(n_blocks + 1)]
    sections = (Section.of(edges, 1), Section.of([edges[-1] + edge for edge in edges], 2))
    schedule = Schedule(make, sections, 1 if is_rooted else None)
    tables = [table_of(schedule, here, COUNT, links(here, n_lanes)) for here in range(COUNT)]
    flows = [streams_of(table, here, n_lanes) for here, table in enumerate(tables)]

    for here, (sent, _) in enumerate(flows):
        for (lane, host), size in sent.items():
            assert flows[host][1][lane, here] == size
    for here, table in enumerate(tables):
        steps = schedule.steps(here, COUNT)
        moved = sum(span.count for step in steps for span in (*step.send, *step.receive))
        sent, received = flows[here]
        assert sum(sent.values()) + sum(received.values()) == 2 * moved * block_bytes
        assert len(table.ends) == 2 * len(steps)
        assert not table.ends or table.ends[-1] == len(table.rows)


@pytest.mark.parametrize("make", [ring.all_reduce, halving.all_reduce, chain.all_reduce])
@pytest.mark.parametrize("n_lanes", [1, 3])
def test_what_is_passed_on_is_what_was_received(make, n_lanes):
    blocks = {ring.all_reduce: COUNT, halving.all_reduce: halving.blocks(COUNT)}.get(make, 1)
    edges = [block * (5 << 30) // 64 * 64 for block in range(blocks + 1)]
    for here in range(COUNT):
        schedule = Schedule(make, (Section.of(edges),))
        rows = table_of(schedule, here, COUNT, links(here, n_lanes)).rows.tolist()
        for number, row in enumerate(rows):
            if row[Row.forwards] and row[Row.send_peer] >= 0:
                sent = row[Row.send_offset], row[Row.send_bytes]
                before = [
                    (one[Row.receive_offset], one[Row.receive_bytes])
                    for one in rows[:number]
                    if one[Row.receive_peer] >= 0
                ]
                assert sent in before


@pytest.mark.parametrize("size", [0, 1, LANE_BYTES, 3 * LANE_BYTES + 5, (1 << 40) + 7])
@pytest.mark.parametrize("n_lanes", [1, 2, 3, 8])
def test_lanes_share_a_block(size, n_lanes):
    pieces = [lane_of(size, lane, n_lanes) for lane in range(n_lanes)]
    found = [piece for piece in pieces if piece != (0, 0)]

    at = 0
    for begin, end in found:
        assert begin == at
        assert begin % 64 == 0
        at = end
    assert at == size
    if size >= n_lanes * LANE_BYTES:
        assert all(abs(end - begin - size / n_lanes) <= 128 for begin, end in pieces)


def test_steps_that_begin_at_once():
    section = Section.of([0] * COUNT + [10] * (COUNT + 1))
    schedule = Schedule(pairwise.all_to_all, (section,), is_one_step=True)

    table = table_of(schedule, 1, COUNT, links(1, 1))

    assert set(table.rows[:, Row.step]) == {0}
