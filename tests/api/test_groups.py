"""`group`: messages that all run at once, collectives after them, and what cannot be inside."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.messages import WAYS, choose_way, place

from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MismatchError,
    StateError,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2, 4)
def test_everybody_with_everybody(comm, way):
    """Large arrays in an order in which plain calls would wait for each other."""
    choose_way(comm, way)
    for count in (0, 3, 300_000):
        mine = [place(comm, way, count, "i4") for _ in range(comm.world_size)]
        theirs = [place(comm, way, count, "i4") for _ in range(comm.world_size)]
        for peer, x in enumerate(mine):
            x[:] = 10 * comm.rank + peer
        with comm.group():
            for peer in range(comm.world_size):
                assert comm.send(mine[peer], peer) is None
            for peer in range(comm.world_size):
                assert comm.recv(theirs[peer], peer) is theirs[peer]
        for peer, out in enumerate(theirs):
            assert (out == 10 * peer + comm.rank).all()


@pytest.mark.ranks(3)
def test_large_sends_in_a_circle(comm):
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    for turn in range(5):
        x = np.full(200_000, comm.rank + turn)
        with comm.group():
            comm.send(x, right, turn)
            first = comm.recv(source=left, tag=turn, like=x)
            second = comm.send_recv(x, left, right)
        assert (first == left + turn).all()
        assert (second == right + turn).all()


@pytest.mark.ranks(3)
def test_collectives_together_with_messages(comm):
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    for _ in range(3):
        x, out = np.full(1000, comm.rank), np.empty(1000, int)
        with comm.group():
            total = comm.all_reduce(x)
            comm.send(x, right)
            comm.barrier()
            everything = comm.all_gather(x[:2])
            got = comm.recv(out, left)
            on_root = comm.reduce(x, root=1)
        assert (total == 3).all()
        assert (got == left).all()
        assert everything.tolist() == [0, 0, 1, 1, 2, 2]
        assert on_root is None if comm.rank != 1 else (on_root == 3).all()


@pytest.mark.ranks(2)
def test_the_order_of_messages_holds(comm):
    peer = 1 - comm.rank
    xs = [np.full(size, number) for number, size in enumerate((5, 50_000, 0, 7, 100_000))]
    outs = [np.empty_like(x) for x in xs]
    comm.send(xs[0], peer)
    with comm.group():
        for x in xs:
            comm.send(x, peer)
        comm.recv(np.empty(5, int), peer)
        for out in outs:
            comm.recv(out, peer)
    for number, out in enumerate(outs):
        assert (out == number).all()


@pytest.mark.ranks(2)
def test_among_pending_works(comm):
    peer = 1 - comm.rank
    x = np.full(50_000, comm.rank)
    work = comm.recv(np.empty_like(x), peer, 1, async_op=True)
    sent = comm.send(x, peer, 1, async_op=True)
    with comm.group():
        comm.send(x, peer)
        got = comm.recv(np.empty_like(x), peer)
        total = comm.all_reduce(x)
    assert (got == peer).all()
    assert (total == 1).all()
    assert work.done()
    assert sent.done()
    assert (work.wait() == peer).all()


@pytest.mark.ranks(2)
def test_what_cannot_be_inside(comm):
    x, spread = np.zeros(4), np.zeros((4, 2))
    plan = comm.plan_all_reduce(x)
    refused = [
        lambda: comm.all_reduce(1),
        lambda: comm.all_reduce(np.float64(1)),
        lambda: comm.broadcast_object([1]),
        lambda: comm.all_gather_object(1),
        lambda: comm.split(0),
        lambda: comm.duplicate(),
        lambda: comm.all_gather(x, counts="auto"),
        lambda: comm.all_reduce(spread[:, 0]),
        lambda: comm.all_reduce([x, spread[:, 0]]),
        lambda: comm.gather(spread[:, 0]),
        lambda: comm.all_reduce(spread[:, 0].astype("f4", order="A")[::2], compression="float16"),
        lambda: comm.recv(spread[:, 0], 1),
        lambda: comm.recv(like=1.0),
        lambda: comm.send_recv(2.5, 1, 1),
        lambda: comm.probe(),
        lambda: comm.probe(wait=False),
    ]
    with comm.group():
        for call in refused:
            with pytest.raises(ArgumentTypeError, match=r"inside group\(\)"):
                call()
        for call in (
            lambda: comm.send(x, 1, async_op=True),
            lambda: comm.recv(x, 1, async_op=True),
            lambda: comm.all_reduce(x, async_op=True),
        ):
            with pytest.raises(ArgumentError, match=r"inside group\(\)"):
                call()
        with pytest.raises(StateError, match="do not nest"), comm.group():
            pass
        with pytest.raises(ArgumentError, match="dest must be"):
            comm.send(x, 2)
        with pytest.raises(ArgumentError, match="timeout_s must be positive"):
            comm.send(x, 1, timeout_s=0)
    plan()
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_a_plan_inside_runs_at_the_end_or_is_refused(comm):
    x = np.ones(4)
    plan = comm.plan_all_reduce(x)
    out = np.zeros(4)
    was_refused = False
    with comm.group():
        comm.all_reduce(x, out=out)
        try:
            plan.out[:] = 0
            plan()
        except ArgumentTypeError:
            was_refused = True
        assert plan.out[0] == out[0] == 0
    assert out[0] == 2
    assert plan.out[0] == (0 if was_refused else 2)


@pytest.mark.ranks(2)
def test_a_call_may_use_the_output_of_an_earlier_one(comm):
    """It does so at the end; a copy made before would be of what was there before."""
    with comm.group():
        total = comm.all_reduce(np.ones(4))
        everyone = comm.all_gather(total)
        pair = comm.all_reduce((total, np.ones(2)))
        with pytest.raises(ArgumentTypeError, match="contiguous"):
            comm.all_gather(total[::2])
    assert everyone.tolist() == [2.0] * 8
    assert isinstance(pair, tuple)
    assert [part.tolist() for part in pair] == [[4.0] * 4, [2.0] * 2]


@pytest.mark.ranks(2)
def test_a_second_thread_is_refused_while_a_group_is_open(comm):
    x, errors = np.ones(3), []
    plan = comm.plan_all_reduce(x)

    def intrude():
        for use in (
            lambda: comm.all_reduce(x),
            lambda: comm.barrier(),
            lambda: comm.send(x, 1 - comm.rank),
            lambda: comm.probe(wait=False),
            lambda: comm.all_gather_object(1),
            plan,
            lambda: comm.group().__enter__(),
        ):
            try:
                use()
            except StateError as error:
                errors.append(str(error))

    with comm.group():
        total = comm.all_reduce(x)
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(errors) == 7
    assert all("another thread has opened a group() on" in text for text in errors[:-1])
    assert total.tolist() == [2.0] * 3
    assert comm.probe(wait=False) is None


@pytest.mark.ranks(2)
def test_an_exception_inside_runs_nothing(comm):
    x, out = np.ones(3), np.zeros(3)
    peer = 1 - comm.rank

    def fail():
        with comm.group():
            comm.send(x, peer)
            comm.recv(out, peer)
            comm.all_reduce(x, out=out)
            raise KeyError("inside")

    for _ in range(3):
        with pytest.raises(KeyError):
            fail()
        assert out.sum() == 0
    comm.barrier()
    assert comm.probe(wait=False) is None
    with comm.group():
        pass
    assert comm.all_reduce(x)[0] == 2


@pytest.mark.ranks(2)
def test_errors_are_raised_at_the_end(comm):
    peer, x = 1 - comm.rank, np.ones(3)
    first, small, last = np.zeros(3), np.zeros(2), np.zeros(3)

    def exchange():
        with comm.group():
            comm.send(x, peer, 0)
            comm.send(x, peer, 1)
            comm.recv(first, peer, 0)
            comm.recv(small, peer, 1)

    with pytest.raises(MismatchError, match=f"from rank {peer} with tag 1 is float64, shape"):
        exchange()
    assert first[0] == 1
    assert comm.recv(last, peer, 1)[0] == 1
    comm.barrier()


@pytest.mark.parametrize("where", ["group", "call"])
@pytest.mark.ranks(2)
def test_deadlines(comm, where):
    """What is waited for is named, not what went well; a call's own deadline counts."""
    x = np.ones(3)
    if comm.rank:
        assert (comm.recv(np.empty(3), 0) == 1).all()
        comm.barrier()
        return

    def exchange():
        with comm.group(timeout_s=0.2 if where == "group" else None):
            comm.send(x, 1)
            comm.recv(np.empty(3), 1, 5, timeout_s=0.2 if where == "call" else None)

    start = time.monotonic()
    text = r"recv on rank 0 of 2: no message from rank 1 with tag 5 came within 0.2 s"
    with pytest.raises(DeadlineError, match=text):
        exchange()
    assert time.monotonic() - start < 5
    comm.barrier()


@pytest.mark.ranks(1)
def test_alone(comm):
    x = np.arange(1_000_000)
    with comm.group():
        comm.send(x, 0)
        out = comm.recv(like=x)
    assert (out == x).all()
