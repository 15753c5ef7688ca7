"""What runs on an engine's workers must do, whatever the engine: each engine's tests inherit these.

The class of an engine's tests has a fixture ``make``: ``make(world_size)`` returns `Workers` that
no other call of the same test got.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpucoll

WAIT_S = 60.0


def total(comm, scale, *, shift=0.0):
    return comm.all_reduce(np.full(3, scale * (comm.rank + 1))) + shift


def who(comm):
    return comm.rank, comm.world_size, os.getpid()


def raise_on(comm, rank, error):
    if comm.rank == rank:
        raise error
    comm.barrier()


def end_on(comm, rank, how):
    if comm.rank == rank:
        if how == "exit":
            raise SystemExit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def shrink(comm, lost):
    comm.barrier()
    if comm.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except gpucoll.PeerLostError:
        with comm.shrink(timeout_s=WAIT_S) as comm:
            return comm.former_ranks, comm.all_reduce(1)
    return None


def win_back(comm, lost, meet):
    """Lose a rank and let another one in; return the number of ranks and their sum."""
    try:
        comm.barrier()
        if comm.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    except gpucoll.PeerLostError:
        comm = comm.shrink(timeout_s=WAIT_S)
    with comm.grow(meet=meet, wait_s=WAIT_S) as comm:
        return comm.world_size, comm.all_reduce(10**comm.rank)


def join(meet):
    """Be a rank from then on."""
    with gpucoll.join(meet=meet, timeout_s=WAIT_S) as comm:
        return comm.rank, comm.all_reduce(10**comm.rank)


def meet_again(comm, name, folder):
    """Return all numbers of a run, once both runs are in the middle of it."""
    (folder / f"{name}-{comm.rank}").touch()
    deadline = time.monotonic() + WAIT_S
    while comm.all_reduce(len(list(folder.iterdir())), "min") < 2 * comm.world_size:
        assert time.monotonic() < deadline
    return comm.all_gather_object((name, comm.rank))


def facts(comm):
    return dict(comm.describe().facts)


def wait_for_the_other(comm):
    return comm.recv_object(1 - comm.rank)


def descriptors_and_threads(comm):
    comm.barrier()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def holding(lock):
    return lambda comm: lock


def unpicklable(comm):
    return threading.Lock()


class RunCases:
    """The cases.

    A subclass has the fixtures `make` and `spare`: ``spare(function, argument)`` calls a function
    in another process than those of ``make(2)``, and returns a function that returns its result.
    """

    def test_results_are_by_rank(self, make):
        results = make(2).run(total, (2.0,), {"shift": 1.0})

        assert [result.tolist() for result in results] == [[7.0] * 3] * 2

    def test_one_rank(self, make):
        assert make(1).run(total, [2.0])[0].tolist() == [2.0] * 3

    def test_workers_are_kept_from_run_to_run(self, make):
        workers = make(2)
        first, second = workers.run(who), workers.run(who)

        assert first == second
        assert [place[:2] for place in first] == [(0, 2), (1, 2)]

    def test_options_of_init(self, make):
        found = make(2).run(facts, init={"timeout_s": 33.0, "backend": "cpu"})

        for mine in found:
            assert mine["deadline of a wait"] == "33 s"
            assert mine["host arrays"] == "backend cpu: asked for"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_first_failure_is_raised(self, make, rank):
        workers = make(2)
        with pytest.raises(ValueError, match="of mine") as caught:
            workers.run(raise_on, (rank, ValueError("of mine")))

        text = str(caught.value.__cause__)
        assert f"rank {rank} of 2 (host " in text
        assert "in raise_on" in text
        assert len(workers.run(who)) == 2

    def test_an_exit_ends_the_rank_and_not_the_worker(self, make):
        workers = make(2)
        before = workers.run(who)
        with pytest.raises(gpucoll.LaunchError, match=r"rank 1 of 2 .* raised SystemExit"):
            workers.run(end_on, (1, "exit"))

        assert workers.run(who) == before

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_lost_worker(self, make, rank):
        workers = make(2)
        before = workers.run(who)
        with pytest.raises(gpucoll.LaunchError, match=rf"rank {rank} of 2 .* was lost with its w"):
            workers.run(end_on, (rank, "kill"))

        after = workers.run(who)
        assert [place[:2] for place in after] == [(0, 2), (1, 2)]
        assert len({place[2] for place in before} & {place[2] for place in after}) == 1

    @pytest.mark.parametrize("rank", [0, 2])
    def test_an_elastic_run_goes_on_without_a_lost_worker(self, make, rank):
        results = make(3).run(shrink, (rank,), elastic=True)

        assert isinstance(results[rank], gpucoll.LaunchError)
        left = tuple(other for other in range(3) if other != rank)
        assert [results[other] for other in left] == [(left, 2)] * 2

    def test_a_spare_process_takes_the_place_of_a_lost_worker(self, make, spare, tmp_path):
        workers, meet = make(2), f"file://{tmp_path}/door"
        joined = spare(join, meet)
        results = workers.run(win_back, (1, meet), elastic=True)

        assert results[0] == (2, 11)
        assert joined() == (1, 11)
        assert isinstance(results[1], gpucoll.LaunchError)

    def test_two_runs_at_the_same_time(self, make, tmp_path):
        names = ["one", "other"]
        workers = [make(2) for _ in names]
        with ThreadPoolExecutor(2) as threads:
            runs = [
                threads.submit(each.run, meet_again, (name, tmp_path))
                for name, each in zip(names, workers, strict=True)
            ]
            results = [run.result(WAIT_S) for run in runs]

        assert results == [[[(name, 0), (name, 1)]] * 2 for name in names]

    def test_a_deadline(self, make):
        workers = make(2)
        with pytest.raises(gpucoll.DeadlineError, match="ranks 0, 1 of 2 had not ended after 1 s"):
            workers.run(wait_for_the_other, timeout_s=1)

        assert len(workers.run(who)) == 2

    def test_what_cannot_be_pickled(self, make):
        workers = make(2)
        with pytest.raises(gpucoll.ArgumentTypeError, match="cannot be pickled"):
            workers.run(total, (threading.Lock(),))
        with pytest.raises(gpucoll.ArgumentTypeError, match="cannot be pickled"):
            workers.run(holding(threading.Lock()))
        with pytest.raises(gpucoll.LaunchError, match=r"rank [01] of 2 \(host "):
            workers.run(unpicklable)

        assert len(workers.run(who)) == 2

    def test_nothing_is_left_in_the_workers(self, make):
        workers = make(2)
        workers.run(descriptors_and_threads)
        before = workers.run(descriptors_and_threads)
        for _ in range(5):
            workers.run(total, (1.0,))
            with pytest.raises(ValueError, match="x"):
                workers.run(raise_on, (1, ValueError("x")))

        after = workers.run(descriptors_and_threads)
        for early, late in zip(before, after, strict=True):
            assert late[0] <= early[0] + 3  # what the engine itself opens
            assert late[1] <= early[1] + 3
