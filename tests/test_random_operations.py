"""Two thousand random operations in random order, the same on every rank, each compared at once.

The seed is the test's parameter; the message of a failure names the operation's number.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests import oracle
from tests.collective_cases import Case, put
from tests.dtypes import assert_same, covering, op_of

N_OPERATIONS = 2000
TUNING = {"GPUCOLL_CPU_TUNING": "one_shot_bytes=2048,chunk_bytes=4096,symmetric_min_bytes=512"}
LARGEST = 4000
MOST_PENDING = 5


class Run:
    """One rank's part; every rank draws the same numbers."""

    def __init__(self, comm, seed):
        self.comm = comm
        self.random = random.Random(seed)
        self.number = 0
        self.pending = []
        self.pairs = covering()
        self.plans = []

    def do(self, n_operations):
        steps = (
            [self.all_reduce] * 6
            + [self.asynchronous] * 3
            + [self.broadcast] * 3
            + [self.barrier, self.objects, self.plan, self.plan, self.number_of_kind, self.settle]
        )
        for self.number in range(n_operations):
            self.random.choice(steps)()
            if len(self.pending) > MOST_PENDING:
                self.settle()
        self.settle()

    def draw(self, kind):
        """Return a random case."""
        dtype, op = self.random.choice(self.pairs)
        largest = self.random.choice((4, 100, LARGEST))
        return Case(
            dtype,
            self.random.randrange(largest),
            op=op if kind == "reduce" else "",
            root=self.random.randrange(self.comm.world_size) if kind == "broadcast" else -1,
            placement=self.random.choice(("private", "private", "symmetric", "mixed")),
            in_place=self.random.random() < 0.3,
            offset=self.random.choice((0, 0, 1, 4)),
            seed=self.number,
        )

    def arrays(self, case):
        x = put(self.comm, case, 0)
        x.array[...] = case.input_of(self.comm.rank)
        return x, x if case.in_place else put(self.comm, case, 1)

    def compare(self, number, case, x, out):
        where = f"operation {number}: rank {self.comm.rank} of {self.comm.world_size}, {case}"
        assert_same(out.array, case.expected(self.comm.world_size), where)
        x.check(where)
        out.check(where)
        if not case.in_place:
            assert_same(x.array, case.input_of(self.comm.rank), f"input of {where}")

    def all_reduce(self):
        case = self.draw("reduce")
        x, out = self.arrays(case)
        self.comm.all_reduce(x.array, op_of(case.op), out=out.array)
        self.compare(self.number, case, x, out)

    def asynchronous(self):
        case = self.draw(self.random.choice(("reduce", "broadcast")))
        x, out = self.arrays(case)
        if case.op:
            call = (x.array, op_of(case.op))
            work = self.comm.all_reduce(*call, out=out.array, async_op=True)
        else:
            work = self.comm.broadcast(x.array, case.root, out=out.array, async_op=True)
        self.pending.append((work, self.number, case, x, out))

    def settle(self):
        self.random.shuffle(self.pending)
        for work, *rest in self.pending:
            work.wait()
            self.compare(*rest)
        self.pending.clear()

    def broadcast(self):
        case = self.draw("broadcast")
        x, out = self.arrays(case)
        self.comm.broadcast(x.array, case.root, out=out.array)
        self.compare(self.number, case, x, out)

    def barrier(self):
        self.comm.barrier()

    def plan(self):
        if len(self.plans) < 8 and self.random.random() < 0.3:
            case = self.draw("reduce")
            x, out = self.arrays(case)
            plan = self.comm.plan_all_reduce(x.array, op_of(case.op), out=out.array)
            self.plans.append((plan, case, x, out))
        elif self.plans:
            plan, case, x, out = self.random.choice(self.plans)
            x.array[...] = case.input_of(self.comm.rank)
            plan()
            self.compare(self.number, case, x, out)

    def number_of_kind(self):
        value = self.random.choice((1, 2.0, np.float32(3), True))
        expected = oracle.all_reduce([np.asarray(value)] * self.comm.world_size)[0]
        assert self.comm.all_reduce(value) == expected, f"operation {self.number}: {value!r}"

    def objects(self):
        comm, size = self.comm, self.random.choice((0, 10, 3000))
        root = self.random.randrange(comm.world_size)
        values = [[rank, "x" * size * rank] for rank in range(comm.world_size)]
        mine = values[comm.rank]
        name = self.random.choice(
            (
                "broadcast_object",
                "all_gather_object",
                "gather_object",
                "scatter_object",
                "all_reduce_object",
            )
        )
        expected, arguments = {
            "broadcast_object": (oracle.broadcast_object(values, root), (mine, root)),
            "all_gather_object": (oracle.all_gather_object(values), (mine,)),
            "gather_object": (oracle.gather_object(values, root), (mine, root)),
            "scatter_object": (oracle.scatter_object(values), (values, root)),
            "all_reduce_object": (
                oracle.all_reduce_object(values, list.__add__),
                (mine, list.__add__),
            ),
        }[name]
        got = getattr(comm, name)(*arguments)
        assert got == expected[comm.rank], f"operation {self.number}: {name}"


def run(comm, seed):
    Run(comm, seed).do(N_OPERATIONS)
    return comm.all_reduce(1)


@pytest.mark.parametrize("seed", [20_201])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_random_operations(ranks, world_size, seed):
    replies = ranks.call(world_size, run, seed + world_size, environment=TUNING, limit_s=150)

    assert replies == [world_size] * world_size
