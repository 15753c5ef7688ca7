"""A Work that is asked after its communicator's end: what is known, or a clear error.

In ranks of their own, whose memory is really let go of: what reads it then ends the process.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest
from tests.calls.gpu.conftest import in_rank
from tests.calls.gpu.failing import ones

from gpucoll.api import communicator
from gpucoll.errors import AbortedError, GpucollError, MismatchError, StateError

ASKING = {
    "done": lambda work: work.done(),
    "exception": lambda work: work.exception(),
    "synchronize": lambda work: work.synchronize(),
    "wait": lambda work: work.wait(),
    "repr": repr,
}
RANKS = 2


def answers(work):
    """Return what each way of asking answers; an error by its type."""
    found = {}
    for name, ask in ASKING.items():
        try:
            found[name] = ask(work)
        except GpucollError as error:
            found[name] = type(error)
    found["wait"] = getattr(found["wait"], "shape", found["wait"])
    found["exception"] = found["exception"] and type(found["exception"])
    return found


WELL = {
    "done": True,
    "exception": None,
    "synchronize": None,
    "wait": (8,),
    "repr": "<Work all_reduce on the GPU: done>",
}


def failed(kind):
    shown = f"<Work all_reduce on the GPU: failed: {kind.__name__}>"
    return {"done": True, "exception": kind, "synchronize": kind, "wait": kind, "repr": shown}


def check_unmapped(comm):
    assert not comm._group.members.segment.is_mapped


@pytest.fixture
def in_fresh_ranks(rank_server, gpus):
    """Call ``function(rank)`` in processes of their own."""

    def call(function, world_size=RANKS):
        with rank_server.fork(world_size) as pool:
            options = {"gives": "seat", "environment": gpus.variables}
            return pool.call(in_rank, gpus.double, function, (), **options)

    return call


def close_first(rank):
    comm = rank.init()
    works = [comm.all_reduce(ones(rank.kit), async_op=True) for _ in range(3)]
    comm.close()
    check_unmapped(comm)
    return [answers(work) for work in works]


def test_close_has_waited_for_it(in_fresh_ranks):
    assert in_fresh_ranks(close_first) == [[WELL] * 3] * RANKS


def fail_at_close(rank):
    comm = rank.init(on_async_error="raise")
    before = comm.all_reduce(ones(rank.kit), async_op=True)
    before.synchronize()
    work = None
    with pytest.raises(MismatchError):  # noqa: PT012
        work = comm.all_reduce(ones(rank.kit, 8 + rank.rank), async_op=True)
        comm.close()
    comm.close()
    check_unmapped(comm)
    return answers(before), work and answers(work)


def test_close_has_found_it_to_have_failed(in_fresh_ranks):
    for before, after in in_fresh_ranks(fail_at_close):
        assert before == WELL
        assert after in (failed(MismatchError), None)  # None: the call itself was told


def give_up_under_way(rank):
    comm = rank.init(on_async_error="raise")
    before = comm.all_reduce(ones(rank.kit), async_op=True)
    before.synchronize()
    with rank.held():
        work = comm.all_reduce(ones(rank.kit), async_op=True)
        communicator._close_all()  # as at the interpreter's end
        check_unmapped(comm)
        found = answers(before), answers(work)
    return *found, str(work.exception())


def test_given_up_before_it_was_known(in_fresh_ranks):
    for before, after, text in in_fresh_ranks(give_up_under_way):
        assert before == WELL
        assert after == failed(StateError)
        assert "whether they succeeded is not known. close() waits for them" in text


def abort_under_way(rank):
    comm = rank.init(on_async_error="raise")
    with rank.held():
        work = comm.all_reduce(ones(rank.kit), async_op=True)
        comm.abort()
        aborted = answers(work)
        comm.close()
    check_unmapped(comm)
    return aborted, answers(work)


def test_aborted_and_closed(in_fresh_ranks):
    for found in in_fresh_ranks(abort_under_way, 1):
        assert found == (failed(AbortedError), failed(AbortedError))


def drop_it(rank):
    comm = rank.init(on_async_error="raise")
    work = comm.all_reduce(ones(rank.kit), async_op=True)
    group = comm._group
    del comm
    gc.collect()
    assert group.members.segment.is_mapped  # the Work keeps what it needs
    work.synchronize()
    found = answers(work)
    group.close()
    return found


def test_its_communicator_was_dropped(in_fresh_ranks):
    assert in_fresh_ranks(drop_it) == [WELL] * RANKS


class Asking:
    """Is part of a cycle with a communicator, and asks its Work when all of that is collected."""

    def __init__(self, comm, work, found):
        self.comm, self.work, self.found, self.me = comm, work, found, self

    def __del__(self):
        self.comm._group.close()  # what a collection does first is not for us to choose
        self.found.append(answers(self.work))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def collect_it_in_a_cycle(rank):
    comm = rank.init(on_async_error="raise")
    found: list[Any] = []
    gc.collect()  # what other tests have left would wait for what is held
    with rank.held():
        Asking(comm, comm.all_reduce(ones(rank.kit), async_op=True), found)
        del comm
        gc.collect()
    return found


def test_asked_in_a_garbage_collection(in_fresh_ranks):
    assert in_fresh_ranks(collect_it_in_a_cycle, 1) == [[failed(StateError)]]


def use_everything_after_close(rank):
    comm = rank.init()
    x = ones(rank.kit)
    plan = comm.plan_all_reduce(x)
    plan()
    registered = comm.register(x)
    issuer = comm._gpu._connected.issuer
    comm.close()
    check_unmapped(comm)
    for use in (plan, comm.check, comm.barrier, lambda: comm.probe(0, wait=False)):
        with pytest.raises(StateError, match="is closed"):
            use()
    for read in (
        issuer.calls.compare,
        lambda: issuer.calls.has_uncompared,
        issuer.calls.failed_ranks,
        comm._group.raise_if_aborted,
        comm._group.members.abort_word,
        comm._group.abort,
    ):
        with pytest.raises(StateError, match=f"rank {rank.rank} of {RANKS} is closed"):
            read()
    comm.abort()
    issuer.look()
    issuer.look_from_outside()
    assert not issuer.is_busy
    registered.close()
    return str(comm.describe()), repr(comm)


def test_all_else_after_close(in_fresh_ranks):
    for described, shown in in_fresh_ranks(use_everything_after_close):
        assert "the communicator is closed" in described
        assert shown.endswith("closed>")


def ask_while_closing(rank):
    comm = rank.init()
    work, found = comm.all_reduce(ones(rank.kit), async_op=True), []
    begun = threading.Event()

    def ask():
        while not comm.is_closed:
            found.append(work.done())
            begun.set()
        found.append(work.done())

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(20)
    comm.close()
    thread.join(20)
    return found[-1], thread.is_alive()


def test_asked_by_another_thread_while_it_closes(in_fresh_ranks):
    assert in_fresh_ranks(ask_while_closing) == [(True, False)] * RANKS


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def ask_in_a_child(rank):
    comm = rank.init()
    with rank.held():
        work = comm.all_reduce(ones(rank.kit), async_op=True)
        is_held, is_forked = threading.Event(), threading.Event()

        def hold(lock):  # as the thread that watches may
            with lock:
                is_held.set()
                is_forked.wait(20)

        holder = threading.Thread(target=hold, args=(comm._gpu._connected.issuer.lock,))
        holder.start()
        assert is_held.wait(20)
        child = os.fork()
        if child == 0:
            refused = 0
            signal.alarm(20)  # where it hangs
            for ask in (work.done, work.exception, work.wait, work.synchronize):
                try:
                    ask()
                except StateError:
                    refused += 1
            os._exit(refused)
        is_forked.set()
        holder.join()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.close()
    return code


def test_asked_in_a_forked_child(in_fresh_ranks):
    assert in_fresh_ranks(ask_in_a_child, 1) == [4]
