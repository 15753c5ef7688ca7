"""Ranks of the direct backend killed and stopped at random moments: the others say so, in time.

Over Host devices, whose work runs beside everything else; each round has fresh ranks. The moment
comes from a short random timer in the one who kills: it synchronises nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.failing import ones
from tests.calls.gpu.host_devices import HostDevices, in_rank
from tests.ranks import Ended, Reply
from tests.waiting import collect, thread_names

from gpucoll import config
from gpucoll.backends.direct.pieces import SLOT_BYTES
from gpucoll.errors import AbortedError, DeadlineError, GpucollError, PeerLostError
from gpucoll.testing import device_arrays, host_device

LONGEST_MOMENT_S = 0.05
NOTICED_S = 10.0
COUNT = SLOT_BYTES // 4 + 3
KINDS = ("small", "large", "ring large", "staged", "staged large", "messages", "mixed")

joined: dict[str, Any] = {}
"""In a rank: its communicator, between two requests."""


def join(rank, timeout_s, is_staged):
    """Connect; where nothing can be exported all ranks stage."""
    with contextlib.ExitStack() as stack:
        if is_staged and rank.rank == 0:
            stack.enter_context(host_device.failing("ipc", number=rank.rank))
        comm = rank.init(backend="direct", timeout_s=timeout_s, meet_s=20)
        x = ones(rank.kit)
        comm.all_reduce(x)
        comm.check()
    joined["comm"] = comm
    comm.barrier(timeout_s=20)


def work_until_it_fails(rank, kind):
    """Make calls for ever; return the error that ends it, and what is left after closing."""
    comm = joined.pop("comm")
    error, text = call_until_it_fails(comm, rank.kit, kind)
    begun_s = time.monotonic()
    comm.close()
    rank.kit.read(ones(rank.kit))  # the stream goes on
    closing_s = time.monotonic() - begun_s
    del comm  # whose error has a traceback, with arrays
    return error, text, closing_s, left_over(rank.rank)


def call_until_it_fails(comm, kit, kind):
    small, large = ones(kit, 64), ones(kit, COUNT)
    to, of = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    x = large if kind.endswith("large") else small
    collectives = [
        lambda: comm.all_reduce(x),
        lambda: comm.reduce_scatter(x[: len(x) // comm.world_size * comm.world_size]),
        lambda: comm.all_gather(x),
        lambda: comm.broadcast(x, root=0, out=x),
    ]
    messages = [lambda: comm.send_recv(large, to, of), lambda: comm.send_recv(small, to, of)]
    chosen = {"messages": messages, "mixed": [*collectives, *messages]}.get(kind, collectives)
    try:
        while True:
            for call in chosen:
                call()
            comm.check()
    except GpucollError as error:
        return type(error), str(error)


def left_over(number):
    collect()
    device_arrays.synchronize(number)
    device_arrays.empty(1, np.uint8, device=number)
    names = [name for name in thread_names() if "gpucoll" in name]
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    links = [link for link in links if "pidfd" in link or "segment" in link or "words" in link]
    counts = {key: value for key, value in host_device.counts(number).items() if value}
    counts.pop("streams", None)  # that of the test's arrays
    if counts.get("bytes", 0) <= 4096:
        counts.pop("bytes", None)
    named = [(name, 1) for name in (*names, *links)]
    return [*named, *counts.items()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("action", "seed"), [("kill", 0), ("kill", 1), ("stop", 0)])
def test_at_a_random_moment(rank_server, action, kind, seed):
    chance = random.Random(f"{action} {kind} {seed}")
    world_size = 2 + chance.randrange(2)
    victim = chance.randrange(world_size)
    devices, timeout_s = HostDevices(), 20.0 if action == "kill" else 1.5
    schedule = {config.DIRECT_SCHEDULE: "ring"} if kind.startswith("ring") else {}
    options = {"gives": "seat", "environment": {**devices.variables, **schedule}}
    with rank_server.fork(world_size) as pool:
        pool.call(in_rank, devices, join, (timeout_s, kind.startswith("staged")), **options)
        pool.start(in_rank, devices, work_until_it_fails, (kind,), **options)
        time.sleep(chance.uniform(0, LONGEST_MOMENT_S))  # the random moment
        begun_s = time.monotonic()
        pool.ranks[victim].send(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        survivors = [rank for rank in range(world_size) if rank != victim]
        replies = pool.collect(NOTICED_S, only=survivors)
        took_s = time.monotonic() - begun_s
        if action == "stop":
            pool.ranks[victim].send(signal.SIGCONT)
        (last,) = pool.collect(NOTICED_S, only=[victim])
    if action == "kill":
        assert isinstance(last, Ended)
    else:
        assert issubclass(last.result[0], GpucollError), last
    for reply in replies:
        assert isinstance(reply, Reply), reply
        assert reply.error is None, reply.trace
        error, text, closing_s, left = reply.result
        if action == "kill":
            assert error is PeerLostError, text
            assert not left, left
        elif kind in ("messages", "mixed"):  # who has no message under way is told by who has
            assert error in (DeadlineError, AbortedError), text
        else:
            assert error is DeadlineError, text
        assert f"rank {victim}" in text or kind in ("messages", "mixed"), text
        # What a stopped rank may still read stays.
        assert {key for key, _ in left} <= {"bytes", "registered"}, left
        assert closing_s < NOTICED_S
    if action == "stop":
        assert any(reply.result[0] is DeadlineError for reply in replies)
    assert took_s < NOTICED_S
