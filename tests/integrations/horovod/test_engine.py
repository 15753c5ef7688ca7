"""The engine below Horovod's names: what it computes, in whatever order ranks submit."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
from tests.integrations.horovod.engines import (
    LIBRARY,
    WAIT_S,
    error_of,
    on_engine,
    other,
    reduction,
    run_in,
)
from tests.track_events import read_trace

from gpucoll.integrations.horovod.engine import adasum
from gpucoll.integrations.horovod.engine.engine import Engine, Options
from gpucoll.integrations.horovod.engine.execute import batches
from gpucoll.integrations.horovod.engine.forms import Forms
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.timeline import Timeline


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(ranks, n_ranks, seed):
    """100 tensors, more than fit in a cycle, in an order of each rank's own."""

    @on_engine
    def submit_shuffled(engine):
        rank = engine.comm.rank
        requests = [reduction(np.full(n % 7, rank + n, np.float32), f"t{n}") for n in range(100)]
        random = np.random.default_rng((seed, rank))
        for n in random.permutation(100):
            engine.submit(requests[n])
        for n in random.permutation(100):
            engine.wait(requests[n])
        return [request.results[0].tolist() for request in requests]

    expected = [[sum(rank + n for rank in range(n_ranks))] * (n % 7) for n in range(100)]
    assert ranks.call(n_ranks, submit_shuffled) == [expected] * n_ranks


@pytest.mark.parametrize("n", [1, 26, 27, 60])
def test_ranks_that_tell_of_as_many_requests_but_of_others(ranks, n):
    @on_engine
    def submit_halves(engine):
        rank = engine.comm.rank
        names = [[f"{half}{i}" for i in range(n)] for half in "ab"]
        requests = [[reduction(np.ones(1), name) for name in half] for half in names]
        for half in (rank, 1 - rank):
            for request in requests[half]:
                engine.submit(request)
            engine.drive()
        for request in requests[0] + requests[1]:
            engine.wait(request)
        return {request.results[0][0] for request in requests[0] + requests[1]}

    assert ranks.call(2, submit_halves) == [{2.0}] * 2


def test_any_order_between_hosts(hosts):
    @on_engine
    def submit_rotated(engine):
        rank = engine.comm.rank
        requests = [reduction(np.full(3, rank + n), f"t{n}") for n in range(40)]
        for n in range(40):
            engine.submit(requests[(n + 13 * rank) % 40])
        for request in requests:
            engine.wait(request)
        return [int(request.results[0][0]) for request in requests]

    assert hosts.call("aab", submit_rotated) == [[3 + 3 * n for n in range(40)]] * 3


TYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.ADASUM])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0)])
def test_reductions(ranks, name, op, factors):
    """Scaled before and after: half types in float32, integers in float64 and truncated."""
    prescale, postscale = factors

    @on_engine
    def reduce(engine):
        from gpucoll.integrations.horovod.engine.numpy_arrays import dtype_named

        x = np.arange(1, 6).astype(dtype_named(name)) + engine.comm.rank
        before = x.copy()
        (out,) = run_in(engine, reduction(x, "x", op, prescale=prescale, postscale=postscale))
        assert (x == before).all()
        assert out.dtype == x.dtype
        return out.astype(np.float64).tolist()

    parts = np.stack([np.arange(1.0, 6) + rank for rank in range(2)]) * prescale
    is_whole = "int" in name
    if is_whole:
        parts = np.trunc(parts)
    ways: dict[ReduceOp, Any] = {ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}
    way = {**ways, ReduceOp.PRODUCT: np.prod}.get(op, np.sum)
    expected = way(parts, axis=0) * postscale / (2 if op is ReduceOp.AVERAGE else 1)
    if is_whole:
        expected = np.trunc(expected)
    # Every value is a small multiple of 1/8, or halves of such: exact in every type but bfloat16,
    # whose 8 bits round three times at most, by 2**-9 of the value each.
    error = 3 * 2.0**-9 if name == "bfloat16" else 0.0
    for found in ranks.call(2, reduce):
        np.testing.assert_allclose(found, expected, rtol=error)


def test_movements(ranks):
    @on_engine
    def move(engine):
        rank, size = engine.comm.rank, engine.comm.world_size
        (gathered,) = run_in(engine, other(Kind.ALLGATHER, "g", np.full((rank, 2), rank)))
        scattered = run_in(
            engine, other(Kind.REDUCESCATTER, "s", np.arange(4.0), op=ReduceOp.AVERAGE)
        )
        told = run_in(engine, other(Kind.BROADCAST, "b", np.full(2, rank), root=1))
        exchange = other(
            Kind.ALLTOALL, "a", np.arange(3) + 10 * rank, splits=[1, 2, 0] if rank else [0, 0, 3]
        )
        engine.run(exchange)
        engine.run(other(Kind.BARRIER, "wait"))
        return (
            gathered.tolist(),
            scattered[0].tolist(),
            told[0].tolist(),
            exchange.results[0].tolist(),
            exchange.received_splits,
            size,
        )

    gathered = [[1, 1], [2, 2], [2, 2]]
    assert ranks.call(3, move) == [
        (gathered, [0.0, 1.0], [1, 1], [10, 20], [0, 1, 1], 3),
        (gathered, [2.0], [1, 1], [11, 12, 21, 22], [0, 2, 2], 3),
        (gathered, [3.0], [1, 1], [0, 1, 2], [3, 0, 0], 3),
    ]


def test_a_group_is_one_request(ranks):
    @on_engine
    def reduce_group(engine):
        arrays: list[Any] = [np.ones(2, np.float32), np.ones(3), np.array(5)]
        group = Request(Kind.ALLREDUCE, "g", LIBRARY, arrays, arrays, ReduceOp.SUM)
        engine.run(group)
        return [x.tolist() for x in arrays]

    assert ranks.call(2, reduce_group) == [[[2.0] * 2, [2.0] * 3, 10]] * 2


@pytest.mark.parametrize("prescale", [1.0, 0.5])
def test_arrays_that_share_memory_on_one_rank(ranks, prescale):
    """Tied weights are submitted under both of their names; another rank has copies of them."""

    @on_engine
    def share(engine):
        def call(kind, **given):
            x = np.full(3, engine.comm.rank + 1.0)
            y = x if engine.comm.rank == 0 else x.copy()
            requests = [
                Request(kind, name, LIBRARY, [a], [a], **given) for a, name in ((x, "x"), (y, "y"))
            ]
            for request in requests:
                engine._enqueue(request)
            for request in requests:
                engine.wait(request)
            return x.tolist(), y.tolist()

        told = call(Kind.BROADCAST, root=1)
        summed = call(Kind.ALLREDUCE, prescale=prescale, postscale=2.0)
        after = run_in(engine, reduction(np.ones(3), "after"))[0].tolist()
        return told, summed, after

    expected = ([2.0] * 3,) * 2, ([6.0 * prescale] * 3,) * 2, [2.0] * 3
    assert ranks.call(2, share) == [expected] * 2


def test_join(ranks):
    """Rank r has r tensors; a mean counts those who have joined."""

    @on_engine
    def run_out(engine):
        rank = engine.comm.rank
        found = []
        for n in range(rank):
            x = reduction(np.full(2, 6.0), f"t{n}", ReduceOp.AVERAGE)
            found.append(float(run_in(engine, x)[0][0]))
        if rank == 2:
            found.append(error_of(engine, other(Kind.ALLGATHER, "g", np.ones(1))))
            found.append(error_of(engine, other(Kind.BROADCAST, "b", np.ones(1))))
        join = other(Kind.JOIN, "join")
        engine.run(join)
        assert run_in(engine, reduction(np.ones(1), "all"))[0][0] == 3
        return join.last_joined, found

    refused = [
        "Allgather is not supported with Join at this time. Specify sparse_to_dense=True if using "
        "DistributedOptimizer",
        "Broadcast is not supported with Join at this time.",
    ]
    assert ranks.call(3, run_out) == [(2, []), (2, [4.0]), (2, [4.0, 2.0, *refused])]


def test_what_was_submitted_before_join_counts(ranks):
    """More than one row of a cycle holds is pending when a rank joins."""

    @on_engine
    def submit_and_join(engine):
        requests = [reduction(np.ones(2), f"t{n}") for n in range(60)]
        for request in requests[: 60 if engine.comm.rank else 50]:
            engine._enqueue(request)  # the driver thread would tell some of it earlier
        engine.run(other(Kind.JOIN, "join"))
        return [float(x.results[0][0]) for x in requests if x.is_done]

    assert ranks.call(2, submit_and_join) == [[2.0] * 50, [2.0] * 50 + [1.0] * 10]


def test_nobody_waits(ranks):
    """A driver thread drives, and calls back."""

    @on_engine
    def listen(engine):
        came = threading.Event()
        request = reduction(np.ones(1), "x")
        request.finished = lambda _: came.set()
        engine.submit(request, at_once=engine.comm.rank == 0)
        assert came.wait(WAIT_S)
        return request.results[0].tolist()

    assert ranks.call(2, listen) == [[2.0]] * 2


def test_nothing_is_driven_while_nothing_is_pending(ranks):
    @on_engine
    def count(engine):
        cycles = []
        before = engine.cycle

        def cycle():
            cycles.append(1)
            before()

        engine.cycle = cycle
        request = reduction(np.ones(1), "x")
        engine.submit(request)
        engine.wait(request)
        driver = engine._driver
        asleep = threading.Event()
        for _ in range(200):  # it looks once more, after its patience
            if not driver._is_awake:
                break
            asleep.wait(0.01)
        n_cycles = len(cycles)
        asleep.wait(0.05)
        return not driver._is_awake, len(cycles) - n_cycles

    assert ranks.call(2, count) == [(True, 0)] * 2


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_adasum(ranks, n_ranks):
    @on_engine
    def sum_adaptively(engine):
        x = np.random.default_rng(engine.comm.rank).normal(size=9)
        return run_in(engine, other(Kind.ADASUM, "x", x))[0].tolist()

    parts = [np.random.default_rng(rank).normal(size=9) for rank in range(n_ranks)]
    while len(parts) > 1:
        parts = [
            (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    found = ranks.call(n_ranks, sum_adaptively)
    assert found == [found[0]] * n_ranks  # the same bits
    np.testing.assert_allclose(found[0], parts[0], rtol=1e-12)


def test_adasum_of_parallel_and_orthogonal_gradients():
    a, b = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    assert adasum.combined(a, b).tolist() == [1.0, 2.0]
    assert adasum.combined(a, a).tolist() == [1.0, 0.0]
    assert adasum.combined(a, 0 * a).tolist() == [1.0, 0.0]


def test_fused_up_to_a_limit():
    forms = Forms(2, 10)
    requests = [reduction(np.ones(8), f"t{n}") for n in range(5)]
    requests.insert(2, reduction(np.ones(8), "max", ReduceOp.MAX))
    requests.append(other(Kind.ALLGATHER, "g", np.ones(1)))
    for request in requests:
        request.form = forms.of(request)
    names = [[request.name for request in batch] for batch in batches(requests, 128)]
    assert sorted(names) == [["g"], ["max"], ["t0", "t1"], ["t2", "t3"], ["t4"]]


def test_engines_of_process_sets_do_not_wait_for_each_other(ranks):
    def run_both(comm):
        everybody = Engine(comm.duplicate(), Options())
        part = comm.split(comm.rank % 2)
        own = Engine(part, Options())
        pending = reduction(np.ones(1), "x")
        if comm.rank == 0:
            everybody.submit(pending)
        found = run_in(own, reduction(np.ones(1), "x"))[0].tolist()
        if comm.rank:
            everybody.submit(pending)
        everybody.wait(pending)
        for engine in (own, everybody):
            engine.close()
        return found, pending.results[0].tolist()

    assert ranks.call(3, run_both) == [([2.0], [3.0]), ([1.0], [3.0]), ([2.0], [3.0])]


def test_timeline(ranks, tmp_path):
    @on_engine
    def write(engine):
        path = tmp_path / f"{engine.comm.rank}.json"
        engine.timeline = Timeline(path, mark_cycles=True)
        engine.run(reduction(np.ones(1), "allreduce.x"))
        error_of(engine, reduction(np.ones(1 + engine.comm.rank), "allreduce.y"))
        engine.timeline.close()

    ranks.call(2, write)
    events = json.loads((tmp_path / "0.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    assert sorted(names.values()) == ["allreduce.x", "allreduce.y", "cycles"]
    of_x = [e for e in events if e.get("ph") in ("B", "E") and names[e["pid"]] == "allreduce.x"]
    assert [(e["ph"], e.get("name", "")) for e in of_x] == [
        *(("B", "NEGOTIATE_ALLREDUCE"), ("E", "")),
        *(("B", "ALLREDUCE"), ("E", "")),
    ]
    times = [event["ts"] for event in of_x]
    assert times == sorted(times)
    assert any(event.get("name") == "CYCLE_START" for event in events)
    assert any("Mismatched" in event.get("args", {}).get("error", "") for event in events)


def test_timeline_for_perfetto(ranks, tmp_path):
    """It has what the JSON has; requests of one name at a time have tracks of their own."""

    @on_engine
    def write(engine):
        path = tmp_path / f"{engine.comm.rank}.pftrace"
        engine.timeline = Timeline(path, mark_cycles=True)
        engine.run(reduction(np.ones(1), "allreduce.x"))
        error_of(engine, reduction(np.ones(1 + engine.comm.rank), "allreduce.y"))
        same = [reduction(np.ones(1), "same") for _ in range(2)]
        for request in same:
            engine.timeline.submitted(request)
        engine.timeline.begin(same)
        for request in same:
            engine.timeline.end(request)
        engine.timeline.close()

    ranks.call(2, write)
    trace = read_trace((tmp_path / "0.pftrace").read_bytes())
    slices = [(begin.path, begin.name) for begin, _ in trace.slices()]
    assert slices == [
        *((("allreduce.x",), "NEGOTIATE_ALLREDUCE"), (("allreduce.x",), "ALLREDUCE")),
        *[(("allreduce.y",), "NEGOTIATE_ALLREDUCE")],
        *[(("same",), "NEGOTIATE_ALLREDUCE")] * 2,
        *[(("same",), "ALLREDUCE")] * 2,
    ]
    assert len({begin.track for begin, _ in trace.slices() if begin.path == ("same",)}) == 2
    assert any(event.name == "CYCLE_START" for event in trace.events)
    assert any("Mismatched" in event.arguments.get("error", "") for event in trace.events)


def test_random_programs(ranks):
    """Blocking and asynchronous calls of all kinds, mixed and shuffled, agree with an oracle."""

    @on_engine
    def run_program(engine, seed):
        rank, size = engine.comm.rank, engine.comm.world_size
        shared = np.random.default_rng(seed)
        ops = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN]
        for step in range(6):
            made = []
            for n in range(int(shared.integers(1, 60))):
                rows, op = int(shared.integers(1, 9)), ops[int(shared.integers(3))]
                values = np.arange(rows) * (rank + 1) + n
                kind = int(shared.integers(3))
                name = f"{step} {n}"
                everyone = np.stack([np.arange(rows) * (r + 1) + n for r in range(size)])
                if kind == 0:
                    way: Any = [np.sum, np.max, np.min][ops.index(op)]
                    made.append((reduction(values, name, op), way(everyone, axis=0)))
                elif kind == 1:
                    root = int(shared.integers(size))
                    request = other(Kind.BROADCAST, name, values, root=root)
                    made.append((request, everyone[root]))
                else:
                    made.append((other(Kind.ALLGATHER, name, values), everyone.reshape(-1)))
            for index in np.random.default_rng((seed, rank, step)).permutation(len(made)):
                engine.submit(made[index][0])
            for request, expected in made:
                engine.wait(request)
                assert request.results[0].tolist() == expected.tolist()

    for n_ranks, seed in itertools.product((2, 3), range(3)):
        ranks.call(n_ranks, run_program, seed)


def test_threads(ranks):
    """Each thread of a rank calls under names of its own, and none waits for another's turn."""

    @on_engine
    def call_from_threads(engine):
        found: dict[int, list[float]] = {}

        def call(thread):
            found[thread] = []
            for n in range(50):
                request = reduction(np.full(1, n + thread), f"{thread} {n}")
                if n % 3:
                    engine.run(request)
                else:
                    engine.submit(request)
                    engine.wait(request)
                found[thread].append(float(request.results[0][0]))

        order = [*range(4)] if engine.comm.rank else [3, 1, 0, 2]
        threads = [threading.Thread(target=call, args=(thread,), daemon=True) for thread in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return found

    expected = {thread: [2.0 * (n + thread) for n in range(50)] for thread in range(4)}
    assert ranks.call(2, call_from_threads) == [expected] * 2
