"""Works and their futures: what torch's users wait for, and what they do when it has come."""

from __future__ import annotations

import threading
import time

import pytest
from tests.waiting import until


def start_and_look(count):
    import torch
    from torch import distributed as dist

    x = torch.ones(count)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    (out,) = work.get_future().wait()
    assert out.data_ptr() == x.data_ptr()
    return x[-1].item()


@pytest.mark.parametrize("count", [1, 3_000_000])
def test_a_work(groups, count):
    assert groups.call(2, start_and_look, count) == [2.0, 2.0]


def poll_and_look():
    """Outputs that a call cannot write itself: lists, and tensors that are not contiguous."""
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    gathered, strided = [torch.zeros(3) for _ in range(2)], torch.ones(4, 6)[:, ::2]
    called = threading.Event()
    works = [
        dist.all_gather(gathered, torch.full((3,), rank + 1.0), async_op=True),
        dist.all_reduce(strided, async_op=True),
    ]
    for work in works:
        until(work.is_completed)
    found = [gathered[0][-1].item(), gathered[1][-1].item(), strided[-1, -1].item()]
    again = torch.ones(4, 6)[:, ::2]

    def look(_):
        found.append(again[-1, -1].item())
        called.set()

    last = dist.all_reduce(again, async_op=True)
    last.add_done_callback(look)
    until(called.is_set)
    for each in (*works, last):
        each.wait()
    return found


def test_a_work_that_is_completed_has_filled_its_outputs(groups):
    assert groups.call(2, poll_and_look) == [[1.0, 2.0, 2.0, 2.0]] * 2


def wait_shortly():
    import datetime

    import torch
    from torch import distributed as dist

    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
        return None
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    with pytest.raises(dist.DistBackendError, match=r"timeout .* not done after 0.05 s"):
        work.wait(datetime.timedelta(milliseconds=50))
    dist.send(torch.ones(1), 1)
    work.wait()
    return x.item()


def test_a_wait_that_is_over_is_not_the_calls_end(groups):
    assert groups.call(2, wait_shortly)[0] == 2.0


def chain(count, size):
    """Start calls whose callbacks make calls and wait for them, several deep."""
    import torch
    from torch import distributed as dist

    def again(future):
        y = future.value()[0] + 1
        dist.all_reduce(y)  # which waits, in a callback
        return y

    def and_again(future):
        return dist.all_reduce(future.value() * 0 + 3, async_op=True).get_future().wait()[0]

    futures = [dist.all_reduce(torch.ones(size), async_op=True).get_future() for _ in range(count)]
    last = [future.then(again).then(and_again) for future in futures[-1:]]
    firsts = torch.futures.wait_all(futures)
    return [one[0][0].item() for one in firsts], last[0].wait()[0].item()


@pytest.mark.parametrize("size", [1, 500_000])
def test_callbacks_may_make_calls_and_wait_for_them(groups, size):
    for firsts, last in groups.call(2, chain, 20, size):
        assert firsts == [2.0] * 20
        assert last == 6.0


def fail():
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    future = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    seen = []
    after = future.then(lambda one: seen.append(one.value()))
    texts = []
    for one in (future, after):
        with pytest.raises(RuntimeError) as info:
            one.wait()
        texts.append(str(info.value))
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    with pytest.raises(dist.DistBackendError):
        work.wait()
    assert not work.is_success()
    assert "rank 1 called" in str(work.exception())
    assert seen == []
    x = torch.ones(1)
    dist.all_reduce(x)
    return all("rank 1 called all_reduce" in text for text in texts), x.item()


def test_a_failure_is_the_futures_exception(groups):
    assert groups.call(2, fail) == [(True, 2.0)] * 2


def receive_by_a_future():
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    out = torch.zeros(4, 2)
    future = dist.irecv(out[:, 1], 1 - rank).get_future()
    time_before = future.done()
    dist.barrier()
    dist.send(torch.arange(4.0), 1 - rank)
    (found,) = future.wait()
    return time_before, found.tolist(), out[:, 1].tolist()


def test_the_future_of_a_message(groups):
    numbers = [0.0, 1.0, 2.0, 3.0]

    assert groups.call(2, receive_by_a_future) == [(False, numbers, numbers)] * 2


def call_from_threads(count):
    """Start calls on groups of their own, each in a thread, and wait by futures elsewhere."""
    import torch
    from torch import distributed as dist

    made = [dist.new_group([0, 1]) for _ in range(4)]
    totals = []

    def run(group, value):
        for _ in range(count):
            x = torch.full((5,), value)
            work = dist.all_reduce(x, group=group, async_op=True)
            totals.append((work.get_future().wait()[0][0].item(), 2 * value))

    threads = [
        threading.Thread(target=run, args=(group, 1.0 + place)) for place, group in enumerate(made)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(totals), all(found == expected for found, expected in totals)


def test_many_threads(groups):
    assert groups.call(2, call_from_threads, 50) == [(200, True)] * 2


def block_in_two_threads():
    """A blocking call beside another thread's is queued, as by other backends."""
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    x, y = torch.ones(1), torch.full((1,), 5.0)
    inside = threading.Event()

    def first():
        inside.set()
        dist.all_reduce(x)

    if rank == 0:
        thread = threading.Thread(target=first)
        thread.start()
        inside.wait(20)
        until = time.monotonic() + 20
        while not dist.group.WORLD.comm._group.is_running and x.item() == 1.0:
            assert time.monotonic() < until
        dist.send(torch.ones(1), 1)  # beside the collective, which waits for the other rank
        dist.all_reduce(y)
        thread.join()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x.item(), y.item()


def test_two_threads_in_one_group(groups):
    assert groups.call(2, block_in_two_threads) == [(2.0, 10.0)] * 2


def leave_works():
    """Works that are dropped end all the same."""
    import torch
    from torch import distributed as dist

    xs = [torch.ones(1000) for _ in range(50)]
    for x in xs:
        dist.all_reduce(x, async_op=True)
    dist.barrier()
    return all(x[0].item() == 2.0 for x in xs)


def test_works_that_nobody_waits_for(groups):
    assert groups.call(2, leave_works) == [True, True]
