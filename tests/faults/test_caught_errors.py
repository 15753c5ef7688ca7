"""Programs that catch every error and go on: each result is right, or its call raised.

All ranks run one random script. At some steps one of them calls something else, passes what does
not fit, is late or is interrupted; whoever gets an error goes on with the next step. There are few
signatures and many values: a rank that was a call apart from the others would get wrong numbers
without an error. When the communicator is broken the ranks shrink, and agree on the step.

`N_STEPS` takes a few seconds; ``GPUCOLL_TEST_CAUGHT_STEPS=100000`` is the long run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter

import numpy as np
import pytest
from tests.waiting import is_broken

from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.transport.shared.words import Context, State

N_STEPS = int(os.environ.get("GPUCOLL_TEST_CAUGHT_STEPS", "1500"))
TUNING = {
    "GPUCOLL_CPU_TUNING": "one_shot_bytes=2048,rooted_bytes=2048,chunk_bytes=4096,"
    "symmetric_min_bytes=512"
}
MOST_PENDING = 4
LATE_S = 0.03
IN_A_WAIT_S = 0.01
"""Before the ranks that are late come."""
SOON_S = 2e-5


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("not this one")


class Calls:
    """What the script is made of: each returns what it got, and what is right.

    `value` is the step's; `odd`: whether this rank calls something else than the others.
    """

    def __init__(self, comm, value, odd, chance):
        self.comm, self.value, self.odd = comm, float(value), odd
        self.ranks = range(comm.world_size)
        self.size = chance.choice((2, 2, 2, 700))
        self.root = chance.randrange(comm.world_size)
        self.other_root = (self.root + odd) % comm.world_size

    def of(self, rank):
        return self.value * (rank + 1)

    @property
    def total(self):
        return sum(map(self.of, self.ranks))

    def x(self, rank=None):
        rank = self.comm.rank if rank is None else rank
        return np.full(self.size + self.odd, self.of(rank))

    def rows(self):
        return np.concatenate([np.full(self.size, self.of(rank)) for rank in self.ranks])

    def all_reduce(self, **options):
        return self.comm.all_reduce(self.x(), **options), np.full(self.size, self.total)

    def number(self):
        x = self.of(self.comm.rank)
        return self.comm.all_reduce(x, "max" if self.odd else "sum"), self.total

    def reduce(self, **options):
        got = self.comm.reduce(self.x(), root=self.root, **options)
        return got, np.full(self.size, self.total) if self.comm.rank == self.root else None

    def gather(self, **options):
        got = self.comm.gather(self.x(), self.root, **options)
        return got, self.rows() if self.comm.rank == self.root else None

    def all_gather(self, **options):
        return self.comm.all_gather(self.x(), **options), self.rows()

    def broadcast(self, **options):
        # Who is the root by its own mistake gets its own array.
        right = self.comm.rank if self.comm.rank == self.other_root else self.root
        x = np.full(self.size, self.of(self.comm.rank))
        return self.comm.broadcast(x, self.other_root, **options), np.full(
            self.size, self.of(right)
        )

    def scatter(self, **options):
        x = np.repeat([self.of(rank) for rank in self.ranks], self.size + self.odd)
        got = self.comm.scatter(x, self.root, **options)
        return got, np.full(self.size + self.odd, self.of(self.comm.rank))

    def scan(self, **options):
        expected = sum(map(self.of, range(self.comm.rank + 1)))
        got = self.comm.scan(self.x(), **options)
        return got, np.full(self.size + self.odd, expected)

    def all_to_all(self, **options):
        x = np.repeat(self.of(self.comm.rank), (self.size + self.odd) * len(self.ranks))
        return self.comm.all_to_all(x, **options), self.rows()

    def counted(self, **options):
        """Ask for the counts; the odd rank's output does not fit them."""
        n_rows = self.size * len(self.ranks)
        x, out = np.full(self.size, self.of(self.comm.rank)), np.empty(n_rows + self.odd)
        return self.comm.all_gather(x, counts="auto", out=out, **options), self.rows()

    def two_dtypes(self, **options):
        xs = [np.full(2, self.of(self.comm.rank)), self.x().astype(np.float32)]
        got = self.comm.all_reduce(xs, **options)
        return got, np.concatenate([np.full(2, self.total), np.full(self.size, self.total)])

    def compressed(self, **options):
        x = np.full(self.size + self.odd, self.of(self.comm.rank), np.float32)
        return self.comm.all_reduce(x, compression="float16", **options), np.full(
            self.size, self.total
        )

    def group(self):
        n_ranks = len(self.ranks)
        outs = [np.empty(self.size), np.empty(self.size + self.odd), np.empty(self.size * n_ranks)]
        same = np.full(self.size, self.of(self.comm.rank))
        with self.comm.group():
            self.comm.all_reduce(same, out=outs[0])
            self.comm.all_reduce(self.x(), out=outs[1])
            self.comm.all_gather(same, out=outs[2])
        expected = [np.full(self.size, self.total)] * 2 + [self.rows()]
        return np.concatenate(outs), np.concatenate(expected)

    def objects(self):
        size = 1 if self.size == 2 else 200_000
        value = Unpicklable() if self.odd else (self.of(self.comm.rank), "x" * size)
        return self.comm.all_gather_object(value), [
            (self.of(rank), "x" * size) for rank in self.ranks
        ]

    def gathered_objects(self):
        got = self.comm.gather_object(self.of(self.comm.rank), self.other_root)
        is_root = self.comm.rank == self.root
        return got, [self.of(rank) for rank in self.ranks] if is_root else None

    def spread_object(self):
        got = self.comm.broadcast_object(self.of(self.comm.rank), self.other_root)
        return got, self.of(self.root)

    def plan(self):
        return self.comm.plan_all_reduce(self.x())(), np.full(self.size, self.total)

    def barrier(self):
        return self.comm.all_reduce(1.0) if self.odd else self.comm.barrier(), None

    ASYNCHRONOUS = (
        all_reduce,
        reduce,
        gather,
        all_gather,
        broadcast,
        scatter,
        scan,
        all_to_all,
        counted,
        two_dtypes,
        compressed,
    )
    OTHERS = (number, group, objects, gathered_objects, spread_object, plan, barrier)


FAULTS = ("odd",) * 8 + (
    "bad for all",
    "bad for one",
    "late",
    "interrupted in a wait",
    "interrupted",
)


class Script:
    """One rank's way through it."""

    def __init__(self, comm, seed):
        self.comm, self.seed = comm, seed
        self.pending = []
        self.counts: Counter[str] = Counter()
        self.ended = False

    def run(self, n_steps):
        step = 0
        while step < n_steps:
            with self.caught():
                self.do(random.Random(f"{self.seed} {step}"), step)
            step += 1
            if is_broken(self.comm) or (step == n_steps and not self.has_ended()):
                step = self.meet_again(step)
        self.comm.close()
        return self.counts

    def has_ended(self):
        """End together: a rank that is told of nothing any more would leave the others alone."""
        with self.caught():
            self.settle(0)
            self.comm.barrier()
            self.ended = True
        return self.ended

    def meet_again(self, step):
        self.pending.clear()
        self.counts["shrunk"] += 1
        self.comm = self.comm.shrink()
        return max(self.comm.all_gather_object(step))

    @contextlib.contextmanager
    def caught(self):
        try:
            yield
        except (GpucollError, KeyboardInterrupt) as error:
            self.counts[type(error).__name__] += 1

    def do(self, chance, step):
        value = step % 100 + 1  # the sum is exact in float16, too
        method = chance.choice(Calls.ASYNCHRONOUS + Calls.OTHERS)
        is_async = method in Calls.ASYNCHRONOUS and chance.random() < 0.3
        fault = chance.choice(FAULTS) if chance.random() < 0.1 else ""
        is_victim = chance.randrange(self.comm.world_size) == self.comm.rank
        call = Calls(self.comm, value, fault == "odd" and is_victim, chance)
        if fault == "bad for all" or (fault == "bad for one" and is_victim):
            with pytest.raises(ArgumentError):
                self.comm.all_reduce(np.ones(3), out=np.ones(4))
        if fault == "late" and is_victim:
            time.sleep(LATE_S)
        options = {"timeout_s": LATE_S / 2} if fault == "late" and not is_victim else {}
        if fault.startswith("interrupted"):
            in_a_wait = fault == "interrupted in a wait"
            if is_victim:
                interrupt(self.comm, IN_A_WAIT_S if in_a_wait else chance.uniform(2e-5, 5e-4))
            elif in_a_wait:
                time.sleep(LATE_S)
        try:
            if is_async:
                self.begin(method, call, step)
            else:
                given = options if method in Calls.ASYNCHRONOUS else {}
                got, expected = method(call, **given)
                self.check(got, expected, step, method)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.settle(chance.randrange(MOST_PENDING))
        if chance.random() < 0.05:
            self.comm.check()

    def begin(self, method, call, step):
        work, expected = method(call, async_op=True)
        self.pending.append((work, expected, step, method))

    def settle(self, n_left):
        while len(self.pending) > n_left:
            work, expected, step, method = self.pending.pop(0)
            with self.caught():
                self.check(work.wait(), expected, step, method)

    def check(self, got, expected, step, method):
        where = f"step {step}, {method.__name__}, rank {self.comm.rank} of {self.comm.world_size}"
        if isinstance(expected, np.ndarray):
            got = np.concatenate(got) if isinstance(got, list) else got
            np.testing.assert_array_equal(got, expected, where)
        else:
            assert got == expected, f"{where}: got {got}, right is {expected}"
        self.counts["right"] += 1


def interrupt(comm, delay_s):
    """Raise KeyboardInterrupt in this rank after a while, in the middle of a call.

    That is where compiled code waits, or in what Python does of a call. One that comes in the first
    lines of a method is as one that came before it, in the program: nobody can tell them apart.
    """

    group = getattr(comm._group, "host", comm._group)

    def handle(_number, _frame):
        is_busy = int(group.context[Context.state]) == State.BUSY
        waits = is_busy and not comm._queue._waiting  # else it may be another thread that does
        if waits or comm._runner._entering.locked():
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, SOON_S)

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, delay_s)


def run_script(comm, seed, n_steps):
    before = signal.getsignal(signal.SIGALRM)
    try:
        return Script(comm.duplicate(), seed).run(n_steps)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_every_result_is_right_or_an_error(ranks, world_size):
    limit_s = 60 + N_STEPS / 50
    found = ranks.call(
        world_size, run_script, world_size, N_STEPS, environment=TUNING, limit_s=limit_s
    )

    met = ("shrunk", "MismatchError", "ArgumentError", "KeyboardInterrupt", "DeadlineError")
    check_what_was_met(found, N_STEPS, met)


def check_what_was_met(found, n_steps, met):
    together: Counter[str] = sum(found, Counter())
    assert together["right"] > len(found) * n_steps / 2
    assert all(together[name] for name in met), together


def test_every_result_between_hosts_is_right_or_an_error(hosts):
    n_steps = N_STEPS // 3
    limit_s = 90 + n_steps / 10
    found = hosts.call("aab", run_script, 7, n_steps, environment=TUNING, limit_s=limit_s)

    check_what_was_met(found, n_steps, ("shrunk", "MismatchError", "KeyboardInterrupt"))
