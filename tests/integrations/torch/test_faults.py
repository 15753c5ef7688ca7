"""Ranks that are killed, stopped, late or of another mind: errors with rank and reason, no hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.faults.test_ends import has_begun
from tests.process_groups import Given, in_group
from tests.ranks import Ended
from tests.waiting import SOON_S, until

from gpucoll.errors import DeadlineError, MismatchError, PeerLostError


@pytest.fixture
def fresh(torch_server, tmp_path):
    """Call a function in a process group of new ranks, which may be killed; return the replies."""

    def call(world_size, function, *args, timeout_s=20.0):
        with torch_server.fork(world_size) as pool:
            given = str(tmp_path / "store"), Given(timeout_s=timeout_s), function, args
            pool.start(in_group, *given)
            return pool.collect()

    return call


def one():
    import torch

    return torch.ones(1)


def reduce_plainly():
    from torch import distributed as dist

    dist.all_reduce(one())


def reduce_and_wait():
    from torch import distributed as dist

    dist.all_reduce(one(), async_op=True).wait()


def reduce_by_a_future():
    from torch import distributed as dist

    dist.all_reduce(one(), async_op=True).get_future().wait()


def gather_a_list():
    from torch import distributed as dist

    dist.all_gather([one(), one()], one())


def receive():
    from torch import distributed as dist

    dist.recv(one(), 1 - dist.get_rank())


def run_backward():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(30, 30))
    model(torch.ones(3, 30)).sum().backward()


WAYS = [reduce_plainly, reduce_and_wait, reduce_by_a_future, gather_a_list, receive, run_backward]


def caught(call):
    """Return the error that a call raised, and how long that took."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def die_beside(call, signal_number):
    from torch import distributed as dist

    call_is_model = call is run_backward
    dist.barrier()
    if dist.get_rank() == 1 and not call_is_model:
        os.kill(os.getpid(), signal_number)
    if call_is_model:
        return caught(lambda: run_until_the_end(signal_number))
    return caught(call)


def run_until_the_end(signal_number):
    """Run backward passes, until the second rank ends itself in a hook of autograd's."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(30, 30))
    model(torch.ones(3, 30)).sum().backward()
    output = model(torch.ones(3, 30))
    if dist.get_rank() == 1:
        output.register_hook(lambda _: os.kill(os.getpid(), signal_number))
    output.sum().backward()


@pytest.mark.parametrize("call", WAYS)
def test_a_killed_rank_is_named(fresh, call):
    reply, ended = fresh(2, die_beside, call, signal.SIGKILL)

    assert isinstance(ended, Ended)
    name, text, seconds = reply.result
    assert "rank 0 of 2 lost rank 1 in" in text
    assert "its process" in text
    assert name == ("RuntimeError" if "PeerLostError:" in text else "PeerLostError")
    assert seconds < SOON_S


def come_late(call):
    from torch import distributed as dist

    if dist.get_rank() == 1:
        until(lambda: dist.group.WORLD.comm._group.is_aborted)
    return caught(call)


@pytest.mark.parametrize("call", [way for way in WAYS if way is not run_backward])
def test_a_deadline_names_who_is_missing(groups, call):
    (name, text, seconds), _ = groups.call(2, come_late, call, timeout_s=0.3)

    assert " timeout " in text  # for which programs look
    assert "waited 0.3 s in" in text
    assert "rank 1" in text.lower()
    assert name == ("RuntimeError" if "DeadlineError:" in text else "DeadlineError")
    assert seconds < SOON_S


def catch_both():
    import torch
    from torch import distributed as dist

    with pytest.raises(dist.DistBackendError) as info:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    mismatch = info.value
    assert isinstance(mismatch, MismatchError)
    assert isinstance(mismatch, RuntimeError)
    x = one()
    dist.all_reduce(x)
    return str(mismatch), x.item()


def test_a_mismatch_names_what_each_called_and_the_group_works_on(groups):
    for text, total in groups.call(2, catch_both):
        assert "rank 0 called all_reduce(op=sum, float32, shape (2,))" in text
        assert "rank 1 called all_reduce(op=sum, float32, shape (3,))" in text
        assert total == 2.0


def reduce_in_another_order():
    """Reduce gradients whose parameters stand in another order on the second rank."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    parts = [("first", torch.nn.Linear(3, 5)), ("second", torch.nn.Linear(5, 3))]

    model = torch.nn.Module()
    for name, part in parts if dist.get_rank() == 0 else parts[::-1]:
        model.add_module(name, part)
    return caught(lambda: DistributedDataParallel(model))


def test_parameters_in_another_order(groups):
    found = groups.call(2, reduce_in_another_order)

    assert any(one is not None and "params[0]" in one[1] for one in found)


def stop_the_other():
    from torch import distributed as dist

    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        until(lambda: dist.group.WORLD.comm._group.is_aborted)
        return None
    os.kill(pids[1], signal.SIGSTOP)
    try:
        return caught(reduce_plainly)
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_stopped_rank_is_a_deadline(groups):
    (name, text, seconds), _ = groups.call(2, stop_the_other, timeout_s=0.5)

    assert name == "DeadlineError"
    assert "rank 1 had not arrived" in text
    assert seconds < SOON_S


def end_without_destroying():
    from torch import distributed as dist

    future = dist.all_reduce(one(), async_op=True).get_future()
    if dist.get_rank() == 0:
        future.wait()
    return True


def test_ranks_may_end_with_futures_that_nobody_waits_for(groups):
    assert groups.call(2, end_without_destroying) == [True, True]


def interrupt():
    from torch import distributed as dist

    comm = dist.group.WORLD.comm
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        until(lambda: has_begun(comm, 0))
        os.kill(pids[0], signal.SIGINT)
        until(lambda: comm._group.is_aborted)
        return None
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(one())
    return time.monotonic() - start


def test_ctrl_c(groups):
    assert groups.call(2, interrupt)[0] < SOON_S


def test_errors_are_both_libraries():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from gpucoll.integrations.torch.errors import as_torchs

    for kind in (PeerLostError, DeadlineError, MismatchError):
        error = as_torchs(kind("text"))

        assert isinstance(error, kind)
        assert isinstance(error, torch.distributed.DistBackendError)
        assert "text" in str(error)
