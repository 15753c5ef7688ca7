"""What tests of `grow` have processes do: some begin a job, others join it."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np

import gpucoll
from gpucoll import config
from gpucoll.errors import GpucollError, ShrinkError
from tests.shrinking import LOSSES, left_over, use

STEPS = 30


def where(seat):
    """Return where the job of a seat grows, for `grow` and `join`."""
    if (meeting := getattr(seat, "meeting", None)) is not None:
        return {"meet": meeting.meet}
    os.environ[config.JOB] = seat.token
    return {}


def begin(seat, n_old, timeout_s=10.0, **options):
    """Be one of the first ranks; return the communicator."""
    where(seat)
    meet = {"meet": seat.meeting.meet} if hasattr(seat, "meeting") else {}
    return gpucoll.init(
        rank=seat.rank, world_size=n_old, timeout_s=timeout_s, name="old", **meet, **options
    )


def join_or_grow(seat, n_old, **given):
    """Return a communicator of all seats, of which `n_old` begin and the others join."""
    if seat.rank >= n_old:
        return gpucoll.join(**where(seat), timeout_s=20.0)
    comm = begin(seat, n_old)
    return comm.grow(**where(seat), wait_s=15.0, at_most=seat.world_size - n_old, **given)


def join_and_count(seat, **place):
    """Be a newcomer; return how many ranks there are then."""
    with gpucoll.join(**(place or where(seat)), timeout_s=20) as comm:
        return comm.all_reduce(1)


def members(comm):
    """Return what every rank of a communicator says of it, used in many ways before."""
    use(comm)
    return comm.all_gather_object((comm.rank, comm.epoch, comm.former_ranks, comm.resumed_from))


def live_at_random(seat, seed, n_old, fates):
    """Take part in a job of random calls, in which ranks leave, die and stop, and others join.

    Every call adds up the numbers of the steps so far, so that a call that was repeated once too
    often, or too little, shows.

    Returns
    -------
    tuple
        What this process has come to: ``("done", total, members, epoch)``, or a word and why.
    """
    draw = np.random.default_rng((seed, seat.rank))
    fate = fates.get(seat.rank, "")
    moment_s = float(draw.uniform(0, 0.02))
    own_step = int(draw.integers(0, STEPS - 5))
    place = where(seat)
    if fate == "dies at the door":
        threading.Timer(moment_s * 10, os.kill, [os.getpid(), signal.SIGKILL]).start()
    try:
        if seat.rank < n_old:
            comm, state = begin(seat, n_old, timeout_s=4.0), (0, 0)
        else:
            comm = gpucoll.join(**place, timeout_s=12.0)
            state = None
    except GpucollError as error:
        return "never in", str(error)
    try:
        return _live(comm, state, fate, own_step, moment_s, place)
    except ShrinkError as error:
        return "left behind", str(error)


def _live(comm, state, fate, own_step, moment_s, place):
    kept, is_new = [(comm.completed, state)], state is None
    at, is_doomed = 0 if state is None else None, False
    while True:
        try:
            if is_new:
                states = {each for each in comm.all_gather_object(state) if each is not None}
                if not states:
                    return "without state", comm.epoch
                (state,) = states
                kept, is_new = [(comm.completed, state)], False
            step, total = state
            if at is not None:  # a newcomer's own steps count from where it came in
                own_step, at = own_step // 2 + step, None
            if step == own_step and not is_doomed:
                is_doomed = fate in ("dies", "stops")
                _meet_fate(comm, fate, moment_s)
                if comm.is_closed:
                    return "left", step
            if step >= STEPS:
                if is_doomed:
                    signal.pause()  # until it happens: the others come to the end without this one
                found = comm.all_gather_object((comm.rank, os.getpid(), comm.epoch))
                break
            total += int(comm.all_reduce(np.full(1 + 500 * (step % 3), step), "max")[-1])
            state = step + 1, total
            kept = [*kept[-15:], (comm.completed, state)]
            if step % 3 == 2:
                old, comm = comm, comm.grow(**place, wait_s=0.02, timeout_s=4.0)
                if comm is not old:
                    assert old.is_closed
                    kept, is_new = [(0, state)], True
        except LOSSES:
            comm = comm.shrink(timeout_s=2.0)
            done = comm.resumed_from
            reachable = [each for each in kept if each[0] <= done]
            state = reachable[-1][1] if reachable else None
            kept, is_new = [(0, state)], True
    comm.close()
    left = left_over()
    assert left == [], left
    return "done", state[1], found, comm.epoch


def _meet_fate(comm, fate, moment_s):
    if fate == "dies":
        threading.Timer(moment_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    elif fate == "stops":
        threading.Timer(moment_s, os.kill, [os.getpid(), signal.SIGSTOP]).start()
    elif fate == "leaves":
        comm.close()
