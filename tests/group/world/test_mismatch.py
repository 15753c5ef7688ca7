"""Ranks of several hosts that do not make the same call: all are told, and can go on."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.collective_cases import COLLECTIVES
from tests.group.host import test_mismatch as alone
from tests.group.host import test_mismatch_everywhere as everywhere
from tests.group.host.test_mismatch import ODD, goes_on, told

from gpucoll.errors import MismatchError

SHAPES = ["ab", "aab", "aba"]
"""The odd rank alone on its host, with one that calls something else, the first of its host."""


def check(placed, replies, of_odd, of_others):
    """Every rank knows what the odd one called, and what one of the others called."""
    for rank, (message, after) in enumerate(replies):
        assert after == goes_on(len(placed))
        assert f"This is rank {rank} of {len(placed)}. " in message
        assert len(re.findall("This is", message)) == 1, message
        assert re.search(rf"rank {ODD} called [^;]*{re.escape(of_odd)}", message), message
        others = r"rank [02]|ranks 0, 2"
        assert re.search(rf"({others}) called [^;]*{re.escape(of_others)}", message), message


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", SHAPES)
@pytest.mark.parametrize("name", alone.DIFFERENCES)
def test_every_rank_is_told(hosts, name, placed):
    replies = hosts.call(placed, alone.call_differently, name)

    check(placed, replies, *alone.DIFFERENCES[name][2])


@pytest.mark.soak(quick=14)
@pytest.mark.parametrize("placed", SHAPES)
@pytest.mark.parametrize("label", everywhere.differences(2))
def test_every_argument(hosts, label, placed):
    replies = hosts.call(placed, everywhere.call_differently, label)

    name, _, _, of_odd, of_others = everywhere.differences(len(placed))[label]
    for text_of_odd, text_of_others in zip(of_odd, of_others, strict=False):
        check(placed, replies, text_of_odd, text_of_others)
    counted = name in ("all_gather", "gather", "reduce_scatter", "scatter")
    assert all((everywhere.HINT in message) == counted for message, _ in replies), replies


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize("size", [0, 2, 50_000])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_another_collective(hosts, name, size):
    for placed in ("aab", "abb"):
        for message, after in hosts.call(placed, everywhere.other_collective, name, size):
            other = "broadcast" if name == "all_reduce" else "all_reduce"
            assert after == goes_on(3)
            assert f"rank {ODD} called {other}(" in message
            assert f" called {name}(" in message


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize("size", [5, 3000])
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "scan", "exclusive_scan"]
)
def test_nothing_is_written(hosts, name, size):
    for placed in ("aab", "abb"):
        assert hosts.call(placed, everywhere.nothing_is_written, name, size) == [(True, 3)] * 3


@pytest.mark.parametrize("root", range(4))
def test_broadcasts_of_which_each_rank_differs_in_turn(hosts, root):
    """Who gives a host its bytes, and its leader, know what all others there called."""

    def differ(comm):
        messages = []
        for odd in range(comm.world_size):
            x = np.zeros(3 + (comm.rank == odd))
            messages.append(told(comm, lambda comm, x=x: comm.broadcast(x, root)))
        return messages, comm.all_reduce(1)

    for messages, total in hosts.call("aabb", differ):
        assert total == 4
        for odd, message in enumerate(messages):
            assert re.search(rf"rank {odd} called broadcast\(float64, shape \(4,\)", message)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", ["ab", "aabb", "abbb"])
def test_many_mismatches_in_a_row(hosts, placed):
    everyone = list(range(len(placed)))

    for total, objects in hosts.call(placed, alone.differ_repeatedly, 40):
        assert (total, objects) == (sum(everyone), everyone)


def test_a_mismatch_among_pending_calls_fails_that_one(hosts):
    for outs, total in hosts.call("aab", alone.differ_among_pending):
        assert outs == [[3.0] * 4] * 2 + [[0.0] * 4] + [[3.0] * 4] * 3
        assert total == 3


def test_a_failure_that_nobody_waited_for_is_raised_by_check(hosts):
    assert hosts.call("aba", alone.differ_unseen) == [3] * 3


@pytest.mark.parametrize("rows", [0, 1, 5000])
@pytest.mark.parametrize("placed", SHAPES)
def test_send_and_receive_counts_in_conflict(hosts, placed, rows):
    replies = hosts.call(placed, everywhere.conflict, rows, False)

    assert replies == [(True, len(placed))] * len(placed)


def differ_on_each_host(comm):
    """Both hosts' ranks disagree among themselves, and the hosts do, too."""
    with pytest.raises(MismatchError) as found:
        comm.all_reduce(np.zeros(3 + comm.rank))
    return str(found.value), comm.all_reduce(1)


def test_ranks_that_all_differ(hosts):
    for rank, (message, total) in enumerate(hosts.call("aabb", differ_on_each_host)):
        assert total == 4
        assert f"rank {rank} called all_reduce(op=sum, float64, shape ({3 + rank},))" in message
