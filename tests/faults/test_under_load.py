"""Waits of collectives end in time beside twenty busy processes: Ctrl-C, a kill, a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from gpucoll.errors import DeadlineError, PeerLostError

BUSY = 20
TIMES = 7

# A dozen runnable processes a CPU, 4 ms each: who is woken waits about 50 ms for its turn, more
# where other tests run beside these. Forty such turns are a tenth of the deadline of these waits.
SOON_S = 2.0


@pytest.fixture
def busy_machine():
    """Twenty processes that compute and nothing else."""
    script = "print(flush=True)\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        for _ in range(BUSY)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def median(values):
    return sorted(values)[len(values) // 2]


def run_out_of_time(comm):
    late = []
    for _ in range(TIMES):
        with comm.duplicate() as made:
            made.all_reduce(np.ones(8))
            if comm.rank == 0:
                start = time.monotonic()
                with pytest.raises(DeadlineError):
                    made.all_reduce(np.ones(8), timeout_s=0.1)
                late.append(time.monotonic() - start - 0.1)
            comm.barrier()
    return late


@pytest.mark.soak
def test_a_deadline(ranks, busy_machine):
    late, _ = ranks.call(2, run_out_of_time)
    assert median(late) < SOON_S


def interrupt(sent, comm):
    """Send this process a Ctrl-C as soon as its main thread is in a call."""
    while not comm._group.is_running:
        os.sched_yield()
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)


def be_interrupted(comm):
    took = []
    for _ in range(TIMES):
        with comm.duplicate() as made:
            made.barrier()
            if comm.rank == 0:
                sent: list[float] = []
                thread = threading.Thread(target=interrupt, args=(sent, made))
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    made.barrier()
                took.append(time.monotonic() - sent[0])
                thread.join(20)
            comm.barrier()
    return took


@pytest.mark.soak
def test_ctrl_c(ranks, busy_machine):
    took, _ = ranks.call(2, be_interrupted)
    assert max(took) < SOON_S


def call_for_ever(comm):
    while True:
        comm.all_reduce(np.ones(8))


def lose_a_rank(seat, path, is_calling):
    """Call, or wait in one call, until rank 1 is killed; return when that was seen."""
    with seat.init() as comm:
        comm.all_reduce(np.ones(8))  # a first call prepares, and here everything takes its time
        if comm.rank == 1:
            for _ in range(200 if is_calling else 0):
                comm.all_reduce(np.ones(8))
            path.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            call_for_ever(comm)
        return time.monotonic()


@pytest.mark.soak
@pytest.mark.parametrize("is_calling", [False, True], ids=["waiting", "calling"])
def test_a_kill(rank_server, busy_machine, is_calling, tmp_path):
    took = []
    for number in range(5):
        path = tmp_path / str(number)
        with rank_server.fork(2) as pool:
            pool.start(lose_a_rank, path, is_calling, gives="seat")
            reply, _ = pool.collect()
        assert reply.error is None, reply
        took.append(reply.result - float(path.read_text()))
    assert median(took) < SOON_S
