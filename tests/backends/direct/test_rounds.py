"""Rounds through exchanges, over NumPy's memory: in any order that the numbers allow."""

from __future__ import annotations

import numpy as np
import pytest
from tests import oracle
from tests.backends.direct.simulation import (
    HALF_BYTES,
    World,
    arrays,
    check,
    counts_of,
    outs_of_blocks,
    own_blocks,
    put,
    starts_of,
)

from gpucoll.backends.direct import rounds
from gpucoll.backends.direct.rounds import Await, Combine, Exchange, Part, Say, Step, Word
from gpucoll.backends.gpu.steps import Copy

SIZES = (0, 1, 3, 31, 64, 65, 128, 200, 517)
"""In elements: below a half of 64 or 32, and several."""
RANKS = (1, 2, 3, 4, 7, 16)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("root", [None, 0, -1])
def test_reduction(world_size, shares, root):
    root = root and world_size - 1 if root == -1 else root
    for seed, (dtype, op) in enumerate([("int32", "sum"), ("float64", "avg"), ("bfloat16", "sum")]):
        world = World(world_size, seed, dtype, op)
        results = []
        for count in SIZES:
            inputs = arrays(world, count, seed + count)
            sources = put(world, inputs)
            is_in_place = count % 2 == 1
            outs = sources if is_in_place else [world.memory.place(x.nbytes) for x in inputs]
            wants = [root in (None, rank) for rank in range(world_size)]
            world.enqueue(
                [
                    rounds.reduction(
                        world.seen_by(rank),
                        [Part(sources[rank], outs[rank] if wants[rank] else 0, count)],
                        world.dtype.itemsize,
                        shares=shares,
                        root=root,
                    )
                    for rank in range(world_size)
                ]
            )
            whole = oracle.all_reduce(inputs, op)
            results.append(
                (
                    outs,
                    [
                        each if wants[rank] else inputs[rank] if is_in_place else None
                        for rank, each in enumerate(whole)
                    ],
                )
            )
        world.run()
        for outs, expected in results:
            check(world, outs, expected)


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("shares", [False, True])
def test_reduction_of_lists(world_size, shares):
    world = World(world_size, 3)
    counts = (5, 0, 70, 1, 1, 300, 16)
    inputs = [arrays(world, count, place) for place, count in enumerate(counts)]
    sources = [put(world, each) for each in inputs]
    world.enqueue(
        [
            rounds.reduction(
                world.seen_by(rank),
                [Part(x[rank], x[rank], count) for x, count in zip(sources, counts, strict=True)],
                4,
                shares=shares,
            )
            for rank in range(world_size)
        ]
    )
    world.run()
    for each, addresses in zip(inputs, sources, strict=True):
        check(world, addresses, oracle.all_reduce(each))


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("is_exclusive", [False, True])
def test_scan(world_size, is_exclusive):
    world = World(world_size, 5, "float32")
    results = []
    for count in SIZES:
        inputs = arrays(world, count, count)
        sources = put(world, inputs)
        outs = sources if count % 2 else [world.memory.place(x.nbytes) for x in inputs]
        parts = [Part(*pair, count) for pair in zip(sources, outs, strict=True)]
        world.enqueue(
            [
                rounds.scan(world.seen_by(rank), parts[rank], 4, is_exclusive=is_exclusive)
                for rank in range(world_size)
            ]
        )
        results.append((outs, (oracle.exclusive_scan if is_exclusive else oracle.scan)(inputs)))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


@pytest.mark.parametrize("world_size", RANKS)
def test_broadcast(world_size):
    world = World(world_size, 7)
    results = []
    for turn, count in enumerate(SIZES):
        root = turn % world_size
        inputs = arrays(world, count, count)
        sources = put(world, inputs)
        outs = sources if count % 2 else [world.memory.place(x.nbytes) for x in inputs]
        world.enqueue(
            [
                rounds.broadcast(
                    world.seen_by(rank),
                    [Part(sources[rank], outs[rank], inputs[rank].nbytes)],
                    root,
                )
                for rank in range(world_size)
            ]
        )
        results.append((outs, oracle.broadcast(inputs, root)))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("rooted", [False, True])
def test_gathering(world_size, rooted):
    world = World(world_size, 9)
    results = []
    for turn, count in enumerate(SIZES):
        root = turn % world_size if rooted else None
        counts = counts_of(world_size, count, world.random)
        starts = starts_of(counts, 4)
        inputs = [arrays(world, each, turn)[rank] for rank, each in enumerate(counts)]
        whole = np.concatenate(inputs)
        sources, outs = own_blocks(world, inputs, starts, turn % 2 == 1)
        world.enqueue(
            [
                rounds.gathering(world.seen_by(rank), sources[rank], outs[rank], starts, root)
                for rank in range(world_size)
            ]
        )
        results.append((outs, [whole if root in (None, r) else None for r in range(world_size)]))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize("world_size", RANKS)
def test_scatter(world_size):
    world = World(world_size, 11)
    results = []
    for turn, count in enumerate(SIZES):
        root = turn % world_size
        counts = counts_of(world_size, count, world.random)
        starts = starts_of(counts, 4)
        x = arrays(world, sum(counts), turn)[0]
        source = world.memory.place(x.nbytes, x)
        outs = [world.memory.place(4 * each) for each in counts]
        if turn % 2:
            outs[root] = source + starts[root]
        world.enqueue(
            [
                rounds.scatter(
                    world.seen_by(rank), source if rank == root else 0, outs[rank], starts, root
                )
                for rank in range(world_size)
            ]
        )
        results.append((outs, oracle.blocks(x, world_size, counts)))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", RANKS)
def test_all_to_all(world_size):
    world = World(world_size, 13)
    results = []
    for turn, count in enumerate(SIZES):
        inputs = arrays(world, count * world_size, turn)
        sources = put(world, inputs)
        outs = sources if turn % 2 else [world.memory.place(x.nbytes) for x in inputs]
        world.enqueue(
            [
                rounds.all_to_all(world.seen_by(rank), sources[rank], outs[rank], 4 * count)
                for rank in range(world_size)
            ]
        )
        results.append((outs, oracle.all_to_all(inputs)))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize(("dtype", "op"), [("int16", "max"), ("float16", "sum")])
def test_reduce_scatter(world_size, dtype, op):
    world = World(world_size, 15, dtype, op)
    results = []
    for turn, count in enumerate(SIZES):
        counts = counts_of(world_size, count, world.random)
        starts = starts_of(counts, 1)
        inputs = arrays(world, sum(counts), turn)
        sources = put(world, inputs)
        outs = outs_of_blocks(world, sources, starts_of(counts, 2), turn % 2 == 1)
        world.enqueue(
            [
                rounds.reduce_scatter(world.seen_by(rank), sources[rank], outs[rank], starts, 2)
                for rank in range(world_size)
            ]
        )
        whole = oracle.all_reduce(inputs, op)[0]
        results.append((outs, oracle.blocks(whole, world_size, counts)))
    world.run()
    for outs, expected in results:
        check(world, outs, expected)


def broken(step: type, keep, call: rounds.Rounds) -> rounds.Rounds:
    """Return a call without some of its steps of a kind."""
    steps = [each for each in call.steps if not isinstance(each, step) or keep(each)]
    return call._replace(steps=tuple(steps))


def without(word: Word, call: rounds.Rounds) -> rounds.Rounds:
    """Return a call that does not wait for one kind of numbers."""
    steps = (step for step in call.steps if not (isinstance(step, Await) and step.word == word))
    return call._replace(steps=tuple(steps))


@pytest.mark.parametrize("word", list(Word))
def test_the_simulation_sees_a_wait_that_is_missing(word):
    """Without one of the two kinds of waits some order of the streams gives wrong results."""
    failures = 0
    for seed in range(10):
        world = World(4, seed)
        inputs = arrays(world, 500, seed)
        sources, starts = put(world, inputs), starts_of([500] * 4, 4)
        outs = [world.memory.place(8000) for _ in inputs]
        calls = [
            rounds.gathering(world.seen_by(rank), sources[rank], outs[rank], starts, 0)
            for rank in range(4)
        ]
        world.enqueue([without(word, call) for call in calls])
        try:
            world.run()
            check(world, outs, [np.concatenate(inputs), None, None, None])
        except AssertionError:
            failures += 1
    assert failures > 5


def test_symmetric_calls_wait_for_each_peer_once_a_round():
    """Who has said that its part is there has read what it wanted of the rounds before."""
    exchange = Exchange(0, 3, (1 << 20, 2 << 20, 3 << 20), HALF_BYTES)
    call = rounds.all_to_all(exchange, 16, 4096, 5 * exchange.slot_bytes)
    waits = [step for step in call.steps if isinstance(step, Await)]
    assert sum(step.word == Word.READY for step in waits) == 2 * 5
    assert [step for step in waits if step.word == Word.DONE] == [
        Await(1, Word.DONE, 0),
        Await(2, Word.DONE, 0),
    ]


def test_a_reduction_copies_the_next_part_before_it_waits_for_this_one():
    exchange = Exchange(0, 2, (1 << 20, 2 << 20), HALF_BYTES)
    length = HALF_BYTES // 4
    call = rounds.reduction(exchange, [Part(16, 1 << 16, 3 * length)], 4, shares=False)
    assert call.n_rounds == 4  # an even number
    mine, theirs = exchange.addresses
    order: list[Step] = [Copy(mine, 16, HALF_BYTES)]
    for number in range(3):
        half = number % 2 * HALF_BYTES
        if number < 2:  # the next one
            order.append(Copy(mine + HALF_BYTES - half, 16 + (number + 1) * HALF_BYTES, HALF_BYTES))
        order.append(Await(1, Word.READY, 2 * number + 1))
        written = (1 << 16) + number * HALF_BYTES
        order.append(Combine((written,), (mine + half, theirs + half), length))
    kept: list[Step] = [step for step in call.steps if not isinstance(step, Say)]
    assert [step for step in kept if getattr(step, "word", None) != Word.DONE] == order
    # Its first half again: rank 1 has read all of the round before the last one.
    assert kept.index(Await(1, Word.DONE, 1)) < kept.index(order[4])
