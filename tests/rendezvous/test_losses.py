"""Ranks that are killed, exit, are interrupted or fail at each step of a meeting: all others hear.

Every step of `init`, `duplicate` and `split`, of rank 0 and of another rank. Nobody waits for its
deadline, every error names the rank, and nothing stays open.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.faults.test_ends import has_begun
from tests.ranks import Ended
from tests.rendezvous.conftest import held_open
from tests.waiting import SOON_S, collect, thread_names, until

from gpucoll.api import communicator
from gpucoll.errors import (
    AbortedError,
    GpucollError,
    PeerLostError,
    RendezvousError,
    SharedMemoryError,
)
from gpucoll.group.host import joining
from gpucoll.rendezvous import guest
from gpucoll.rendezvous.host import Host

TIMEOUT_S = 30.0
WORLD, VICTIMS = 4, {"host": 0, "guest": 2}


class OtherError(Exception):
    """Not gpucoll's own."""


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise OtherError("of this test")


ENDS = {"killed": kill, "exits with 0": leave, "interrupted": interrupt, "fails": fail}
DIES = ("killed", "exits with 0")


def replace(owner, name, act, *, after=False, only_if=lambda *_: True):
    """Have the victim come to its end before or after a step."""
    original = getattr(owner, name)

    def step(*args, **kwargs):
        if not only_if(*args):
            return original(*args, **kwargs)
        if after:
            result = original(*args, **kwargs)
            act()
            return result
        act()
        return original(*args, **kwargs)

    setattr(owner, name, step)
    return lambda: setattr(owner, name, original)


STEPS = {
    "host": {
        "when all have come": lambda act: replace(Host, "_settle", act),
        "when all are answered": lambda act: replace(joining, "_map_members", act),
        "when it has mapped": lambda act: replace(joining, "_settle", act, after=True),
        "before it says that it is made": lambda act: replace(
            Host, "_tell", act, only_if=lambda host, message: b"made" in message
        ),
    },
    "guest": {
        "when it has introduced itself": lambda act: replace(
            guest.Guest, "_send", act, after=True, only_if=lambda _, text, *__: "rank" in text
        ),
        "when it is answered": lambda act: replace(joining, "_map_members", act),
        "when it has mapped": lambda act: replace(joining, "_settle", act, after=True),
        "when it is ready": lambda act: replace(
            guest.Guest, "_send", act, after=True, only_if=lambda _, text, *__: "ready" in text
        ),
    },
}
CASES = [
    (who, step, how)
    for who, steps in STEPS.items()
    for step in steps
    for how in ("ended", "interrupted", "fails")
    if (step, how) != ("when it has mapped", "fails")  # nothing can fail there
]


def act_when_the_others_wait(seat_rank, victim, who, step, how, folder):
    """Prepare a rank; return what undoes it. The victim acts once the others are connected."""
    if seat_rank == victim:
        act = ENDS[how]
        if step == "when it has introduced itself":

            def act():
                until(lambda: len(list(folder.iterdir())) == WORLD - 2)
                ENDS[how]()

        return STEPS[who][step](act)
    if seat_rank == 0:
        return lambda: None
    return replace(
        guest.Guest,
        "_send",
        lambda: (folder / str(seat_rank)).touch(),
        after=True,
        only_if=lambda _, text, *__: "rank" in text,
    )


def what_happened(act):
    """Return how a call ended, how soon, and what it left."""
    threads = len(thread_names())
    before = held_open()
    start = time.monotonic()
    kind, text = None, ""
    try:
        act()
    except BaseException as error:
        kind, text = type(error), str(error)
    seconds = time.monotonic() - start
    collect()
    left = [name for name in held_open() if name not in before]
    return kind, text, seconds, left, len(thread_names()) - threads


def meet_with_a_victim(seat, who, step, how, folder, call):
    victim = VICTIMS[who]
    if call == "init":
        with seat.init(TIMEOUT_S, rank=0, world_size=1):
            pass  # the arena is there
        undo = act_when_the_others_wait(seat.rank, victim, who, step, how, folder)
        try:
            return [what_happened(lambda: seat.init(TIMEOUT_S).barrier())]
        finally:
            undo()
    comm = seat.init(TIMEOUT_S)
    comm.barrier()
    undo = act_when_the_others_wait(seat.rank, victim, who, step, how, folder)
    try:
        found = [what_happened(lambda: divided(comm, call).barrier())]
    finally:
        undo()
    found.append(what_happened(comm.barrier))
    comm.close()
    return found


def divided(comm, call):
    return comm.duplicate() if call == "duplicate" else comm.split(0)


def check_others(found, who, how, n_found):
    victim = VICTIMS[who]
    for rank, outcomes in enumerate(found):
        if rank == victim and how in DIES:
            assert outcomes == Ended(0 if how == "exits with 0" else -signal.SIGKILL)
            continue
        assert len(outcomes) == n_found
        for number, (kind, text, seconds, left, n_threads) in enumerate(outcomes):
            assert seconds < SOON_S, outcomes
            assert left == [], outcomes
            assert n_threads <= 0, outcomes
            if rank == victim:
                expected = {"interrupted": KeyboardInterrupt, "fails": OtherError}[how]
                assert kind is (AbortedError if number else expected), outcomes
            else:
                assert kind in (PeerLostError, AbortedError), outcomes
                assert f"rank {victim}" in text
                assert f"rank {rank} of {WORLD}" in text
                assert kind is PeerLostError or how not in DIES


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("who", "step", "how"), CASES)
def test_in_init(fresh, tmp_path, who, step, how):
    how = how.replace("ended", "killed")
    dies = [VICTIMS[who]] if how in DIES else []
    found = fresh(WORLD, meet_with_a_victim, who, step, how, tmp_path, "init", dies=dies)

    check_others(found, who, how, 1)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("who", "step", "how"), CASES)
def test_in_duplicate(fresh, tmp_path, who, step, how):
    how = how.replace("ended", "exits with 0")
    dies = [VICTIMS[who]] if how in DIES else []
    found = fresh(WORLD, meet_with_a_victim, who, step, how, tmp_path, "duplicate", dies=dies)

    check_others(found, who, how, 2)


# --- between exchange and meeting -----------------------------------------------------------------


def divide_without_one(seat, victim, how):
    """Ranks 1 and 3, turned round, come together; so do 0 and 2. One does not come to the meeting.

    Nobody's meeting has begun on rank 0 of the new communicator, or none of its ranks knows it.
    """
    comm = seat.init(TIMEOUT_S)
    comm.barrier()
    undo = lambda: None  # noqa: E731
    if seat.rank == victim:
        undo = replace(communicator, "create", ENDS[how])
    try:
        found = [what_happened(lambda: comm.split(seat.rank % 2, -seat.rank).barrier())]
    finally:
        undo()
    if seat.rank % 2 == victim % 2:
        found.append(what_happened(comm.barrier))
    comm.close()
    return found


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("victim", [1, 3])
def test_between_exchange_and_meeting(fresh, victim, how):
    found = fresh(4, divide_without_one, victim, how, dies=[victim] if how in DIES else [])

    other = 4 - victim
    for kind, text, seconds, left, _ in found[other]:
        assert kind is (PeerLostError if how in DIES else AbortedError), found
        word = "lost rank" if how in DIES else "the communicator was given up: rank"
        assert f"rank {other} of 4" in text
        assert f"{word} {victim}" in text
        assert "split(" in text or how not in DIES
        assert seconds < SOON_S
        assert left == []
    if how not in DIES:
        first, then = found[victim]
        assert first[0] in (KeyboardInterrupt, OtherError)
        assert then[0] is AbortedError
        assert first[3] == then[3] == []


# --- Ctrl-C while waiting -------------------------------------------------------------------------


def wait_for_one_that_does_not_come(seat, pids, folder):
    """Rank 1 interrupts the victim when all but rank 3 wait."""
    undo = replace(
        guest.Guest, "_receive", lambda: (folder / str(seat.rank)).touch(), only_if=lambda *_: True
    )
    if seat.rank == 1:
        threading.Thread(target=interrupt_when, args=(folder, pids)).start()
    try:
        return what_happened(lambda: seat.init(TIMEOUT_S))
    finally:
        undo()


def interrupt_when(folder, pid):
    until(lambda: len(list(folder.iterdir())) == 2)
    os.kill(pid, signal.SIGINT)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("victim", [0, 2])
def test_ctrl_c_while_waiting_in_init(rank_server, tmp_path, victim):
    with rank_server.fork(4) as pool:
        pid = pool.ranks[victim].pid
        only = [0, 1, 2]
        pool.start(wait_for_one_that_does_not_come, pid, tmp_path, gives="seat", only=only)
        found = [reply.result for reply in pool.collect(only=only)]

    for rank, (kind, text, seconds, _, _) in zip(only, found, strict=True):
        assert seconds < SOON_S
        assert kind is (KeyboardInterrupt if rank == victim else AbortedError)
        assert rank == victim or f"rank {victim} raised KeyboardInterrupt" in text


# --- what goes on working -------------------------------------------------------------------------


def divide_without_memory(seat):
    """Rank 0 may not make files, and so no shared memory, of the segment's size."""
    comm = seat.init(TIMEOUT_S)
    if seat.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    outcome = what_happened(comm.duplicate)
    total = comm.all_reduce(1)
    comm.close()
    return outcome, total


def test_without_memory_for_the_new_one_the_old_one_works_on(fresh):
    for rank, (outcome, total) in enumerate(fresh(3, divide_without_memory)):
        kind, text, _, left, _ = outcome
        assert kind is (RendezvousError if rank else SharedMemoryError)
        assert "no shared memory for gpucoll-segment" in text
        assert left == []
        assert total == 3


def close_the_old_one_at_once(comm):
    for _ in range(10):
        parent = comm.duplicate()
        child = parent.split(0, -parent.rank)
        parent.close()
        assert child.all_reduce(1) == 4
        child.close()


def test_closing_the_old_one_is_no_loss_to_those_who_still_divide_it(ranks):
    ranks.call(4, close_the_old_one_at_once)


def stop_before_the_meeting(comm, folder):
    """Rank 2 comes to the meeting only when the others have given up."""
    if comm.rank == 2:
        original = communicator.create

        def late(*args, **kwargs):
            until(lambda: comm._group.is_aborted)
            return original(*args, **kwargs)

        communicator.create = late
        try:
            return what_happened(lambda: comm.duplicate(timeout_s=20))
        finally:
            communicator.create = original
    return what_happened(lambda: comm.duplicate(timeout_s=0.5))


def test_a_deadline_names_who_is_missing_and_breaks_the_old_one(ranks, tmp_path):
    found = ranks.call(3, stop_before_the_meeting, tmp_path)

    for rank, (kind, text, seconds, left, _) in enumerate(found):
        assert issubclass(kind, GpucollError)
        assert issubclass(kind, TimeoutError)
        # On a busy machine the deadline runs out while they exchange what the meeting needs.
        named = ("rank 2 did not come", "rank 0 did not", "ranks 1, 2 had not finished")
        assert rank == 2 or any(words in text for words in named)
        assert "duplicate" in text
        assert seconds < SOON_S
        assert left == []


def count_after_many(comm):
    """Descriptors, mappings and threads after many communicators."""

    def held():
        maps = re.findall("gpucoll-segment", Path("/proc/self/maps").read_text())
        return held_open(), len(maps), thread_names()

    comm.duplicate().close()
    before = held()
    for _ in range(20):
        comm.duplicate().close()
    assert held() == before
    assert not has_begun(comm, comm.rank, ahead=100)


def test_many_communicators_leave_nothing(ranks):
    ranks.call(2, count_after_many)
