"""Ranks killed and interrupted at random moments while they make communicators without a pause.

The moment comes from a short random pause in the one who kills: it synchronises nothing, any moment
will do. Nobody hangs, everybody is told, and nothing stays open on those that are left.
"""

from __future__ import annotations

import gc
import random
import signal
import time

import pytest
from tests.ranks import Ended, Reply
from tests.rendezvous.conftest import held_open

from gpucoll.errors import AbortedError, PeerLostError

LONGEST_MOMENT_S = 0.2
NOTICED_S = 10.0
"""Far above what noticing takes, far below the ranks' deadline."""


def divide_until_it_fails(seat, going):
    """Make communicators until that fails; return how it ended, and what is left after closing."""
    seat.init(30).close()  # the arena is there
    before = held_open()
    error, child = None, None
    comm = seat.init(30)
    try:
        comm.barrier()
        (going / str(seat.rank)).touch()
        number = 0
        while True:
            number += 1
            with comm.split(0, -seat.rank) if number % 2 else comm.duplicate() as child:
                if number % 3 == 0:
                    child.barrier()
    except BaseException as caught:
        error = type(caught), str(caught)
    if child is not None:
        child.close()  # the interrupt may have come just before the block did
    comm.close()
    gc.collect()
    return error, [name for name in held_open() if name not in before]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("seed", range(6))
def test_at_random_moments(rank_server, tmp_path, number, seed):
    chance = random.Random(f"{seed} {number}")
    victim = chance.randrange(3)
    with rank_server.fork(3) as pool:
        pool.start(divide_until_it_fails, tmp_path, gives="seat")
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(chance.random() * LONGEST_MOMENT_S)
        pool.ranks[victim].send(number)
        start = time.monotonic()
        replies = pool.collect()
        seconds = time.monotonic() - start

    assert seconds < NOTICED_S
    for rank, reply in enumerate(replies):
        if rank == victim and number == signal.SIGKILL:
            assert reply == Ended(-signal.SIGKILL)
            continue
        assert isinstance(reply, Reply)
        (kind, text), left = reply.result
        assert left == []
        if rank == victim:
            assert kind is KeyboardInterrupt
        else:
            # Who is interrupted closes, and may have done so before another rank looks.
            assert kind in (PeerLostError, AbortedError), text
            # In a child that was split off the ranks have the reverse order.
            names = f"rank {victim}", f"rank {2 - victim}"
            assert any(name in text for name in names) or number == signal.SIGINT
