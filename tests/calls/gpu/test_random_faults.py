"""GPU calls at random: slow, unfinished and failing libraries, ranks that die, at any moment."""

from __future__ import annotations

import gc
import os
import signal
import time
from random import Random

import numpy as np
import pytest
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import in_rank
from tests.calls.gpu.test_collectives import cases_of
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S

from gpucoll.errors import AbortedError, BackendError, GpucollError, PeerLostError

NAMES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter",
    "all_to_all", "scan",
)  # fmt: skip
FAILING = (
    "", "ncclAllReduce", "ncclBroadcast", "ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError",
    "ncclCommInitRankConfig", "ncclSend", "ncclAllGather",
)  # fmt: skip
"""Of which function a call fails; the first: of all."""


# --- slow and unfinished --------------------------------------------------------------------------


def run_slowly(rank, cases, settings):
    with rank.control.library_set(**settings), rank.init() as comm:
        return run_cases(comm, rank.kit, cases)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
@pytest.mark.parametrize(
    "settings", [{"delay_us": 2000}, {"polls": 2}, {"polls": 1, "delay_us": 500}], ids=str
)
def test_results_do_not_depend_on_how_slow_the_library_is(gpus, settings):
    cases = [case for name in NAMES for case in cases_of(name, 3, str(settings), 6)]
    Random(0).shuffle(cases)
    assert gpus.call_ranks(3, run_slowly, cases, settings) == [len(cases)] * 3


# --- many calls, which may fail -------------------------------------------------------------------


def filled(kit, value):
    return kit.seen_as(kit.bytes_of(np.full(64, value, np.int32).view(np.uint8)), (64,), "int32")


def make_calls(comm, kit, random, n_calls):
    """Make calls of every kind, the same on all ranks, and look at results once they are certain.

    Before that they may be anything: after an abort a stream runs on over undefined values.
    """
    works: list = []
    results: list = []
    for number in range(n_calls):
        x, y = filled(kit, number), filled(kit, number)
        kind = random.randrange(10)
        root = random.randrange(comm.world_size)
        if kind == 0:
            works.append((comm.all_reduce(x, async_op=True), number * comm.world_size))
        elif kind == 1:
            comm.broadcast(x, root)
        elif kind == 2:
            with comm.group():
                comm.all_reduce(x, out=x)
                comm.all_gather(y[:1])
        elif kind == 3:
            step = 1 + random.randrange(max(comm.world_size - 1, 1))
            to, of = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
            comm.send_recv(x, to, of)
        elif kind == 4 and works:
            work, expected = works.pop(random.randrange(len(works)))
            results.append((kit.read(work.wait())[0], expected))
        elif kind == 5:
            comm.scatter(x[: 8 * comm.world_size], root)
        elif kind == 6:
            comm.all_reduce([x, y])
        elif kind == 7:
            plan = comm.plan_all_reduce(x, op="max", out=y)
            for _ in range(3):
                plan()
            results.append((kit.read(y)[0], number))
        elif kind == 8:
            with comm.split(comm.rank % (1 + random.randrange(2))) as part:
                results.append((kit.read(part.all_reduce(x, "max"))[0], number))
                part.check()
        else:
            results.append((kit.read(comm.all_reduce(x, "max"))[0], number))
    for work, expected in works:
        results.append((kit.read(work.wait())[0], expected))
        work.synchronize()
    comm.check()
    assert all(got == expected for got, expected in results), results


def fail_somewhere(rank, seeds):
    """Return how each round ended: a kind of error, or nothing; and how long the longest took."""
    ended, longest_s = [], 0.0
    for seed in seeds:
        random = Random(seed)
        victim, code = random.randrange(rank.world_size), random.choice((1, 2, 3, 5, 6))
        function, call = random.choice(FAILING), random.randrange(1, 40)
        begun = time.monotonic()
        if rank.rank == victim:
            rank.control.fail_at(call, code, function)
        slowness = {"polls": random.choice((0, 0, 1, 3)), "delay_us": random.choice((0, 0, 300))}
        try:
            with rank.control.library_set(**slowness), rank.init() as comm:
                make_calls(comm, rank.kit, random, 12)
            ended.append("")
        except GpucollError as error:
            ended.append(type(error).__name__)
        finally:
            rank.control.fail_at(0, 0)
        longest_s = max(longest_s, time.monotonic() - begun)
        assert rank.control.communicators == 0, f"seed {seed}: a communicator was left behind"
    return ended, longest_s


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_at_a_random_call_of_a_random_rank(gpus, world_size):
    # A rank that was done, and saw that its results are right, need not hear of what fails later.
    answers = gpus.call_ranks(world_size, fail_somewhere, range(60))

    rounds = list(zip(*(ended for ended, _ in answers), strict=True))
    for seed, kinds in enumerate(rounds):
        assert "DeadlineError" not in kinds, f"seed {seed}: {kinds}"
    assert sum(any(kinds) for kinds in rounds) > len(rounds) / 5, "hardly anything failed"
    assert max(longest_s for _, longest_s in answers) < SOON_S


def ask_for_memory(rank):
    with rank.init(device=rank.rank, timeout_s=1.0, meet_s=20) as comm:
        x = comm.empty(16, "float32", like="cuda")
        hangs = {"hang_at": 1} if rank.rank else {}
        with rank.control.library_set(**hangs):
            comm.all_reduce(x, out=x)
            del x
            for _ in range(3):
                comm.empty(16, "float32", like="cuda")
            comm.check()


def hang_with_memory(rank):
    """Memory dies while a call on it hangs, and more is asked for: nothing may wait for ever."""
    begun = time.monotonic()
    with pytest.raises(GpucollError):
        ask_for_memory(rank)
    gc.collect()
    left = rank.control.communicators, rank.control.registrations
    return left, time.monotonic() - begun


def test_memory_dies_while_a_call_hangs(gpus):
    for left, took_s in gpus.call_ranks(2, hang_with_memory):
        assert left == (0, 0)
        assert took_s < SOON_S


def fail_beside(rank, seeds):
    ended, longest_s = [], 0.0
    for seed in seeds:
        random = Random(seed)
        victim, at = random.randrange(rank.world_size), random.randrange(1, 8)
        begun = time.monotonic()
        settings = {"async_error_at": at} if rank.rank == victim else {}
        try:
            with rank.control.library_set(**settings), rank.init() as comm:
                make_calls(comm, rank.kit, random, 12)
            ended.append("")
        except GpucollError as error:
            ended.append(type(error).__name__)
        longest_s = max(longest_s, time.monotonic() - begun)
        assert rank.control.communicators == 0, f"seed {seed}: a communicator was left behind"
    return ended, longest_s


def test_an_asynchronous_error_at_a_random_moment(gpus):
    answers = gpus.call_ranks(3, fail_beside, range(12))

    for seed, kinds in enumerate(zip(*(ended for ended, _ in answers), strict=True)):
        assert all(kinds), f"seed {seed}: {kinds}"
        assert "DeadlineError" not in kinds, f"seed {seed}: {kinds}"
    assert max(longest_s for _, longest_s in answers) < SOON_S


def die_somewhere(rank, seed):
    random = Random(seed)
    victim, last = random.randrange(rank.world_size), random.randrange(1, 25)
    begun = time.monotonic()
    try:
        with rank.init() as comm:
            if rank.rank == victim:
                make_calls(comm, rank.kit, random, last)
                os.kill(os.getpid(), signal.SIGKILL)
            make_calls(comm, rank.kit, random, 40)
    except (PeerLostError, AbortedError, BackendError) as error:
        assert rank.control.communicators == 0
        return type(error).__name__, time.monotonic() - begun
    return "", 0


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_dies_at_a_random_moment(rank_server, gpus, seed):
    with rank_server.fork(3) as pool:
        arguments = gpus.double, die_somewhere, (seed,)
        pool.start(in_rank, *arguments, gives="seat", environment=gpus.variables)
        answers = pool.collect()

    dead = [answer for answer in answers if isinstance(answer, Ended)]
    survivors = [answer for answer in answers if isinstance(answer, Reply)]
    assert (len(dead), len(survivors)) == (1, 2), answers
    for answer in survivors:
        assert answer.error is None, answer.trace
        kind, took_s = answer.result
        assert kind == "PeerLostError", kind
        assert took_s < SOON_S
