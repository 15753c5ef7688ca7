"""Messages between ranks of several hosts: what holds on one host, over every pair of ranks."""

from __future__ import annotations

import inspect
import itertools

import pytest
from tests.api import (
    test_message_order,
    test_messages_beside_work,
    test_pending_messages,
    test_point_to_point,
    test_random_messages,
    test_received_messages,
)

PLACED = {2: ("ab",), 3: ("aab", "abc"), 4: ("abab", "aabb"), 7: ("aabbcab",)}
MODULES = (
    test_point_to_point,
    test_received_messages,
    test_pending_messages,
    test_message_order,
    test_messages_beside_work,
)
NOT_HERE = {
    "test_senders_that_wait_are_served_in_turn": "what was sent before a barrier may come after it",
    "test_small_ones_ask_for_no_thread": "looks at the process's thread, which is the same",
    "test_a_callback_that_raises_ends_nothing": "warns; what it looks at is the same",
    "test_a_forked_child_has_nothing_to_do_with_them": "test_ends.py forks",
}


def parameters_of(function):
    """Yield the arguments of each case of a test besides the communicator."""
    marks = getattr(function, "pytestmark", [])
    lists = []
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")]
            lists.append(
                [dict(zip(names, _as_tuple(value, names), strict=True)) for value in values]
            )
    for chosen in itertools.product(*lists):
        yield {name: value for given in chosen for name, value in given.items()}


def _as_tuple(value, names):
    return (value,) if len(names) == 1 else value


def cases():
    """Yield every test of messages whose body runs on ranks, on every placement."""
    for module in MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            counts = [
                mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "ranks"
            ]
            if not counts or not name.startswith("test_") or name in NOT_HERE:
                continue
            for placed in itertools.chain.from_iterable(PLACED.get(n, ()) for n in counts[0]):
                for given in parameters_of(function):
                    shown = "-".join(map(str, (placed, name[5:], *given.values())))
                    yield pytest.param(function, given, placed, id=shown)


def run_case(comm, function, given):
    function(comm, **given)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize(("function", "given", "placed"), [*cases()])
def test_as_on_one_host(hosts, function, given, placed):
    hosts.call(placed, run_case, function, given, limit_s=100)


@pytest.mark.soak
@pytest.mark.parametrize("placed", ["ab", "aab", "abc"])
def test_random_traffic(hosts, placed):
    replies = hosts.call(placed, test_random_messages.run_traffic, 7 + len(placed), limit_s=100)

    assert replies == [len(placed)] * len(placed)


def exchange_objects(comm):
    """Objects to and from neighbours, of whom a rank has more than connections are looked at."""
    found = []
    for step in range(6):
        distance = 1 + step % 2
        size = comm.world_size
        peers = sorted({(comm.rank - distance) % size, (comm.rank + distance) % size})
        coming = [comm.recv_object(peer, 7, async_op=True) for peer in peers]
        going = [comm.send_object((step, comm.rank), peer, 7, async_op=True) for peer in peers]
        found += [work.wait() == (step, peer) for work, peer in zip(coming, peers, strict=True)]
        for work in going:
            work.wait()
    return all(found)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abcd", "abcde", "aabbccdd"])
def test_objects_between_many_hosts(hosts, placed):
    """A frame that Python has opened is taken though its socket is quiet."""
    for _ in range(4):
        assert all(hosts.call(placed, exchange_objects, timeout_s=10))
