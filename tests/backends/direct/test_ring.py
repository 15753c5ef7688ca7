"""Rings through exchanges, over NumPy's memory: in any order that the numbers allow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests import oracle
from tests.backends.direct.simulation import (
    FACTOR,
    HALF_BYTES,
    World,
    check,
    counts_of,
    outs_of_blocks,
    own_blocks,
    put,
    starts_of,
)
from tests.backends.direct.test_rounds import RANKS, SIZES, without

from gpucoll.backends.direct import ring, rounds
from gpucoll.backends.direct.rounds import Combine, Exchange, Part, Role, Word
from gpucoll.backends.gpu.steps import Copy
from gpucoll.types import ReduceOp

RINGS = [size for size in RANKS if size > 1]
OPS = [("int32", "max"), ("float64", "avg"), ("bfloat16", "sum"), ("float32", "scaled_sum")]


def exact(world: World, count: int, seed: int) -> list[np.ndarray]:
    """Return inputs whose sums, halves too, are exact in any order."""
    numbers = np.random.default_rng(seed)
    made = (2 * numbers.integers(-4, 5, count) for _ in range(world.world_size))
    return [x.astype(world.dtype) for x in made]


def expected(inputs: list[np.ndarray], op: str) -> list[np.ndarray]:
    return oracle.all_reduce(inputs, ReduceOp.scaled_sum(FACTOR) if op == "scaled_sum" else op)


def drawn(world: World, is_shuffled: bool) -> tuple[int, ...]:
    ranks = list(range(world.world_size))
    if is_shuffled:
        world.random.shuffle(ranks)
    return tuple(ranks)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Blocks of a few elements are cut into chunks, too."""
    monkeypatch.setattr(ring, "LEAST_CHUNK_BYTES", 16)


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("world_size", RINGS)
@pytest.mark.parametrize(("dtype", "op"), OPS)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_all_reduce(world_size, dtype, op, is_shuffled):
    """Also between calls that go by rounds, which use the same memory and the same numbers."""
    world = World(world_size, 1, dtype, op)
    order, item_bytes = drawn(world, is_shuffled), world.dtype.itemsize
    results = []
    for count in (*SIZES, 4000):
        inputs = exact(world, count, count)
        sources = put(world, inputs)
        outs = sources if count % 2 else [world.memory.place(x.nbytes) for x in inputs]
        parts = [[Part(*pair, count)] for pair in zip(sources, outs, strict=True)]
        world.enqueue(
            [
                ring.all_reduce(
                    world.seen_by(rank)._replace(ring=order),
                    parts[rank],
                    item_bytes,
                    scales=op == "scaled_sum",
                )
                for rank in range(world_size)
            ]
        )
        results.append((outs, expected(inputs, op)))
        if count == 65:  # its result may be summed again, by rounds
            copies = [world.memory.place(x.nbytes) for x in inputs]
            world.enqueue(
                [
                    rounds.broadcast(
                        world.seen_by(rank),
                        [Part(outs[rank], copies[rank], inputs[rank].nbytes)],
                        world_size - 1,
                    )
                    for rank in range(world_size)
                ]
            )
            results.append((copies, results[-1][1]))
    world.run()
    for outs, values in results:
        check(world, outs, values)


@pytest.mark.parametrize("world_size", [2, 5])
def test_all_reduce_of_lists(world_size):
    world = World(world_size, 3)
    counts = (5, 0, 70, 1, 1, 900, 16)
    inputs = [exact(world, count, place) for place, count in enumerate(counts)]
    sources = [put(world, each) for each in inputs]
    world.enqueue(
        [
            ring.all_reduce(
                world.seen_by(rank),
                [Part(x[rank], x[rank], count) for x, count in zip(sources, counts, strict=True)],
                4,
            )
            for rank in range(world_size)
        ]
    )
    world.run()
    for each, addresses in zip(inputs, sources, strict=True):
        check(world, addresses, oracle.all_reduce(each))


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("world_size", RINGS)
@pytest.mark.parametrize(("dtype", "op"), OPS)
def test_reduce_scatter(world_size, dtype, op):
    world = World(world_size, 15, dtype, op)
    order, item_bytes = drawn(world, True), world.dtype.itemsize
    results = []
    for turn, count in enumerate(SIZES):
        counts = counts_of(world_size, count, world.random)
        starts = starts_of(counts, 1)
        inputs = exact(world, sum(counts), turn)
        sources = put(world, inputs)
        outs = outs_of_blocks(world, sources, starts_of(counts, item_bytes), turn % 2 == 1)
        world.enqueue(
            [
                ring.reduce_scatter(
                    world.seen_by(rank)._replace(ring=order),
                    sources[rank],
                    outs[rank],
                    starts,
                    item_bytes,
                    scales=op == "scaled_sum",
                )
                for rank in range(world_size)
            ]
        )
        whole = expected(inputs, op)[0]
        results.append((outs, oracle.blocks(whole, world_size, counts)))
    world.run()
    for outs, values in results:
        check(world, outs, values)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("world_size", RINGS)
def test_all_gather(world_size):
    world = World(world_size, 9)
    order = drawn(world, True)
    results = []
    for turn, count in enumerate(SIZES):
        counts = counts_of(world_size, count, world.random)
        starts = starts_of(counts, 4)
        inputs = [exact(world, each, turn)[rank] for rank, each in enumerate(counts)]
        whole = np.concatenate(inputs)
        sources, outs = own_blocks(world, inputs, starts, turn % 2 == 1)
        world.enqueue(
            [
                ring.all_gather(
                    world.seen_by(rank)._replace(ring=order), sources[rank], outs[rank], starts
                )
                for rank in range(world_size)
            ]
        )
        results.append((outs, [whole] * world_size))
    world.run()
    for outs, values in results:
        check(world, outs, values)


@pytest.mark.parametrize("word", list(Word))
def test_the_simulation_sees_a_wait_that_is_missing(word):
    failures = 0
    for seed in range(10):
        world = World(4, seed)
        inputs = exact(world, 4000, seed)
        sources = put(world, inputs)
        calls = [
            ring.all_reduce(world.seen_by(rank), [Part(sources[rank], sources[rank], 4000)], 4)
            for rank in range(4)
        ]
        world.enqueue([without(word, call) for call in calls])
        try:
            world.run()
            check(world, sources, oracle.all_reduce(inputs))
        except AssertionError:
            failures += 1
    assert failures > 5


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_bytes_of_a_ring(size):
    """Each rank writes 2 (P-1)/P of the array, all of it into the next rank's exchange."""
    addresses = tuple((rank + 1) << 20 for rank in range(size))
    exchange = Exchange(1, size, addresses, HALF_BYTES)
    count = 1000 * size
    written = {address >> 20: 0 for address in addresses}
    for step in ring.all_reduce(exchange, [Part(1 << 30, 1 << 31, count)], 4).steps:
        if isinstance(step, Combine):
            assert step.role is (Role.MIDDLE if len(step.destinations) == 1 else Role.LAST)
            for address in step.destinations:
                if address < 1 << 30:
                    written[address >> 20] += 4 * step.n_elements
        elif isinstance(step, Copy) and step.destination < 1 << 30:
            written[step.destination >> 20] += step.size_bytes
    following = 2 % size + 1
    assert written.pop(following) == 2 * (size - 1) * 4 * count // size
    assert not any(written.values())


def test_counts_that_all_ranks_know_make_as_many_chunks(request):
    """Also where blocks are empty."""
    random = Random(request.node.name)
    for _ in range(50):
        counts = [random.choice((0, 0, 7, 300)) for _ in range(5)]
        edges = starts_of(counts, 4)
        made = {
            ring.all_gather(World(5, 0).seen_by(rank), 64, 64, edges).n_rounds for rank in range(5)
        }
        assert len(made) == 1
