"""Two thousand random operations in random order, the same on every rank, each compared at once.

The seed is the test's parameter; the message of a failure names the operation's number.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests import oracle
from tests.collective_cases import COLLECTIVES, COUNTED, COUNTS, REDUCTIONS, SCANS, Call, draw
from tests.dtypes import covering

N_OPERATIONS = 2000
TUNING = {
    "GPUCOLL_CPU_TUNING": "one_shot_bytes=2048,rooted_bytes=4096,chunk_bytes=4096,"
    "symmetric_min_bytes=512,single_copy_min_bytes=5000,single_copy_max_bytes=20000,"
    "gather_copy_max_bytes=10000"
}
LARGEST = 4000
MOST_PENDING = 5
SCANNED = (("float32", "sum"), ("bfloat16", "prod"), ("int16", "max"), ("complex64", "sum"))
"""Few: each rank compiles its own scan kernels."""


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
            [self.blocking] * 10
            + [self.asynchronous] * 3
            + [self.barrier, self.objects, self.plan, self.plan, self.number_of_kind, self.settle]
        )
        for self.number in range(n_operations):
            self.random.choice(steps)()
            if len(self.pending) > MOST_PENDING:
                self.settle()
        self.settle()

    def call(self, way):
        """Return a random call, its arrays in place."""
        name = self.random.choice((*COLLECTIVES, "all_reduce"))
        dtype, op = self.random.choice(SCANNED if name in SCANS else self.pairs)
        largest = self.random.choice((4, 100, LARGEST))
        row = self.random.choice((0, 0, 3))
        blocks = self.comm.world_size if name in COUNTED else 1
        case = draw(
            self.random,
            name,
            self.comm.world_size,
            dtype=dtype,
            op=op if name in REDUCTIONS else "",
            count=self.random.randrange(largest) // (blocks * (row or 1)),
            counts=self.random.choice(("", "", *COUNTS)) if name in COUNTED else "",
            is_auto=way == "out" and self.random.random() < 0.2,
            row=row,
            way=way,
            seed=self.number,
        )
        return Call(self.comm, case)

    def where(self, number):
        return f"operation {number}: "

    def blocking(self):
        call = self.call(self.random.choice(("out", "out", "new")))
        call.check(call.run(), self.where(self.number))

    def asynchronous(self):
        call = self.call("asynchronous")
        self.pending.append((call.make(async_op=True), self.number, call))

    def settle(self):
        self.random.shuffle(self.pending)
        for work, number, call in self.pending:
            call.check(work.wait(), self.where(number))
        self.pending.clear()

    def plan(self):
        if len(self.plans) < 16 and self.random.random() < 0.3:
            call = self.call("plan")
            self.plans.append((call.make("plan_"), call))
        elif self.plans:
            plan, call = self.random.choice(self.plans)
            call.fill()
            call.check(plan(), self.where(self.number))

    def barrier(self):
        self.comm.barrier()

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


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", [20_201])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_random_operations(ranks, world_size, seed):
    replies = ranks.call(world_size, run, seed + world_size, environment=TUNING, limit_s=150)

    assert replies == [world_size] * world_size
