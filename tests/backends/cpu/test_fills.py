"""When shared memory is filled past the caches: a rank judges by how long its own fills take."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.kernels.cpu.addresses import HAS_STRING_COPY
from gpucoll.transport.shared import filling
from gpucoll.transport.shared.words import Context

pytestmark = pytest.mark.skipif(not HAS_STRING_COPY, reason="stores of x86-64")
TUNING = {"GPUCOLL_CPU_TUNING": "nontemporal_fills=1,one_shot_bytes=65536,rooted_bytes=65536"}
SIZE = filling.LEAST_BYTES


def fill(comm, slow_bytes, span_bytes, size=SIZE):
    """Broadcast once, at the end of a window; return the words that say how rank 0 goes on."""
    context = comm._group.context
    context[Context.nontemporal_left] = 0
    context[Context.fill_span] = span_bytes
    context[Context.fill_tried] = filling.TRIAL_BYTES + filling.WINDOW_BYTES - SIZE
    context[Context.fill_slow] = slow_bytes
    received = comm.broadcast(np.full(size, comm.rank + 7, np.uint8))
    assert (received == 7).all()
    comm.barrier()
    names = ("nontemporal_left", "fill_span", "fill_tried", "fill_slow")
    return [int(context[getattr(Context, name)]) for name in names]


FIRST, LONGEST = filling.FIRST_SPAN_BYTES, filling.LONGEST_SPAN_BYTES
MOST, FEW = filling.WINDOW_BYTES // 2 + 1, filling.WINDOW_BYTES // 2 - SIZE


@pytest.mark.parametrize(
    ("slow_bytes", "span_bytes", "expected"),
    [
        (MOST, 0, [FIRST, 2 * FIRST, 0, 0]),
        (MOST, 4 * FIRST, [4 * FIRST, 8 * FIRST, 0, 0]),
        (MOST, LONGEST, [LONGEST, LONGEST, 0, 0]),
        (FEW, LONGEST, [0, FIRST, filling.TRIAL_BYTES, 0]),
    ],
)
def test_most_of_a_window_decides(ranks, slow_bytes, span_bytes, expected):
    """Slow stores are left, longer after each trial in vain; a good window ends that."""
    found = ranks.call(2, fill, slow_bytes, span_bytes, environment=TUNING)

    assert found[0] == expected


def test_smaller_fills_are_not_timed(ranks):
    found = ranks.call(2, fill, MOST, 0, SIZE - 1, environment=TUNING)

    assert found[0][0] == 0
    assert found[0][3] == MOST


def go_past(comm):
    context = comm._group.context
    context[Context.nontemporal_left] = 3 * SIZE
    left = []
    for _ in range(5):
        comm.broadcast(np.zeros(SIZE, np.uint8))
        comm.barrier()
        left.append(int(context[Context.nontemporal_left]))
    return left, int(context[Context.fill_tried])


def test_stores_past_the_caches_end_with_a_trial(ranks):
    left, tried = ranks.call(2, go_past, environment=TUNING)[0]

    assert left == [2 * SIZE, SIZE, 0, 0, 0]
    assert tried == 2 * SIZE


def move_much(comm):
    """Results that are stored past the caches, with an odd end."""
    size, peer = filling.LARGE_BYTES + 77, 1 - comm.rank
    x = np.arange(size, dtype=np.uint32).view(np.uint8)[comm.rank :][:size]
    expected = np.arange(size, dtype=np.uint32).view(np.uint8)[peer:][:size]
    out = np.full(size + 2, 7, np.uint8)
    comm.send_recv(x, peer, peer, out=out[1:-1])
    assert (out[1:-1] == expected).all()
    assert out[0] == out[-1] == 7
    root = comm.broadcast(x.copy(), root=1)
    assert (root == (expected if comm.rank == 0 else x)).all()


def test_large_results(ranks):
    tuning = f"nontemporal_fills=1,single_copy_min_bytes={1 << 30},fetched_min_bytes={1 << 30}"
    ranks.call(2, move_much, environment={"GPUCOLL_CPU_TUNING": tuning})


def send_small_after_large(comm):
    """No receive is posted while the small messages are sent: they must have room."""
    peer, large = 1 - comm.rank, np.full(1 << 20, comm.rank, np.uint8)
    works = [comm.send(large, peer, tag, async_op=True) for tag in range(4)]
    comm.send(np.full(1, 7), peer, 9)
    small = comm.recv(np.zeros(1, int), peer, 9)
    for tag in reversed(range(4)):
        assert (comm.recv(np.empty_like(large), peer, tag) == peer).all()
    for work in works:
        work.wait()
    return small.tolist()


def test_small_messages_pass_large_ones(ranks):
    """One send at a time is streamed; the others leave their data where it is."""
    environment = {"GPUCOLL_CPU_TUNING": f"fetched_min_bytes={1 << 30}", "GPUCOLL_TIMEOUT_S": "10"}
    assert ranks.call(2, send_small_after_large, environment=environment) == [[7], [7]]
