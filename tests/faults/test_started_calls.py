"""Faults while asynchronous calls are pending: posted ahead, run by the thread, or not begun."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.faults.test_ends import errors
from tests.ranks import Ended, Reply
from tests.waiting import is_broken, until

import gpucoll
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.transport.shared.words import Context, State

LARGE = 1 << 18
KINDS = {
    "posted": lambda comm: [comm.all_reduce(np.ones(3), async_op=True)],
    "large": lambda comm: [comm.all_reduce(np.ones(LARGE), async_op=True)],
    "many": lambda comm: [comm.all_reduce(np.ones(n % 7 + 1), async_op=True) for n in range(90)],
    "mixed": lambda comm: [
        comm.all_gather(np.ones(count), async_op=True) for count in (3, LARGE, 5, LARGE // 2)
    ],
    "counts": lambda comm: [comm.all_gather(np.ones(3), counts="auto", async_op=True)],
}


def wait_for(works):
    """Return the error of every Work, or None."""
    found: list[Exception | None] = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            found.append(error)
        else:
            found.append(None)
    return found


def die(comm, make):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return [type(error) for error in wait_for(make(comm))], is_broken(comm)
    except PeerLostError as error:  # it was known before all calls had begun
        broken = is_broken(comm)
        with contextlib.suppress(PeerLostError):  # of those that had
            comm.close()
        return [type(error)], broken


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_that_is_killed(ranks, name):
    replies = ranks.replies(3, die, KINDS[name])

    assert replies[1] == Ended(-signal.SIGKILL)
    for rank in (0, 2):
        kinds, broken = replies[rank].result
        assert set(kinds) == {PeerLostError}
        assert broken


def come_late(comm, make):
    if comm.rank == 1:
        until(lambda: is_broken(comm))
    return [type(error) for error in wait_for(make(comm))]


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_that_does_not_come(ranks, name):
    replies = ranks.replies(3, come_late, KINDS[name], timeout_s=0.3)

    for rank in (0, 2):
        assert set(replies[rank].result) == {DeadlineError}


def close_after_a_loss(comm):
    """Close when the thread has ended a call just after this one has looked whether it had."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    queue = comm._queue
    work = comm.all_reduce(np.ones(LARGE), async_op=True)
    settle = queue._settle_group

    def settle_late():
        until(lambda: comm._group.needs_settling)
        settle()

    queue._settle_group = settle_late
    with pytest.raises(PeerLostError):
        work.wait(40)
    comm.close()
    return queue.is_busy


def test_close_returns_after_a_loss_that_the_thread_has_found(ranks):
    replies = ranks.replies(3, close_after_a_loss)

    assert [replies[rank] for rank in (0, 2)] == [Reply(False)] * 2


def interrupt_after_the_end(comm):
    """An interrupt just after compiled code has run a call, and said that its entry is free."""
    queue = comm._queue
    wait = queue.begin_compiled().wait
    found = []

    def interrupted(number):
        queue._wait = wait
        wait(number)
        raise KeyboardInterrupt

    for count in (4, LARGE):
        work = comm.all_reduce(np.ones(count), async_op=True)
        queue._wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        found.append(work.wait()[0])
        found.append(queue.is_busy)
    return found


def test_an_interrupt_after_a_call_has_ended_leaves_that_well(ranks):
    assert ranks.call(2, interrupt_after_the_end) == [[2.0, False, 2.0, False]] * 2


def poll_behind_a_mismatch(comm):
    """Ask only, of a call behind one in which the ranks differ; then of one behind a loss."""
    comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
    behind = comm.all_reduce(np.ones(4), async_op=True)
    until(behind.done)
    total = behind.wait()[0]
    with pytest.raises(MismatchError):
        comm.check()
    if comm.rank == 1:
        until(lambda: is_broken(comm))
        return total, None
    works = [comm.all_reduce(np.ones(4), async_op=True) for _ in range(3)]
    comm.abort()
    until(works[0].done)
    until(works[2].done)
    return total, [type(work.exception()) for work in works]


def test_a_call_behind_one_that_failed_is_done_for_who_only_asks(ranks):
    found = ranks.call(2, poll_behind_a_mismatch)

    assert found == [(2.0, [AbortedError] * 3), (2.0, None)]


def wait_for_any(comm):
    """Which only asks: nobody runs the call in which the rank is lost."""
    if comm.rank == 1:
        until(lambda: comm._group.members.all_records(0).any())
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(2)]
    place = gpucoll.wait_any(works)
    return place, type(works[place].exception())


def test_a_wait_for_any_ends_with_a_lost_rank(ranks):
    replies = ranks.replies(2, wait_for_any)

    assert replies[0] == Reply((0, PeerLostError))


def interrupt_this(work):
    """Wait, and get a Ctrl-C meanwhile."""
    number = threading.main_thread().ident, signal.SIGINT
    timer = threading.Timer(0.1, signal.pthread_kill, number)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()


def interrupt(comm, make):
    if comm.rank == 1:
        until(lambda: is_broken(comm))
        return None
    works = make(comm)
    if comm.rank == 0:
        interrupt_this(works[-1])
    return [type(error) for error in wait_for(works)]


def test_ctrl_c_in_a_wait_that_runs_the_call(ranks):
    replies = ranks.replies(3, interrupt, KINDS["posted"])

    assert errors(replies) == [None] * 3
    for rank in (0, 2):
        assert set(replies[rank].result) == {AbortedError}


def interrupt_and_close(comm, make, is_held):
    own = comm.duplicate()
    if comm.rank == 1:
        until(lambda: is_broken(own))
    else:  # held: else a thread may run it, and go on
        with own._queue.held() if is_held else contextlib.nullcontext():
            interrupt_this(make(own)[-1])
    own.close()


@pytest.mark.parametrize(
    ("name", "is_held"), [("posted", False), ("posted", True), ("counts", True)]
)
def test_an_interrupt_that_was_handled_does_not_come_out_of_close(ranks, name, is_held):
    found = errors(ranks.replies(2, interrupt_and_close, KINDS[name], is_held))

    assert found == [None, None]


def interrupt_what_goes_on(comm):
    x, other = np.full(LARGE, comm.rank + 1.0), comm.duplicate()
    if comm.rank == 1:
        other.barrier()
    work = comm.all_reduce(x, async_op=True)
    if comm.rank == 0:
        until(lambda: comm._group.context[Context.state] == State.BUSY)
        interrupt_this(work)
        other.barrier()
    total = work.wait()[0]
    other.close()
    return total


def test_ctrl_c_in_a_wait_for_what_the_thread_runs_leaves_that_going_on(ranks):
    assert ranks.call(2, interrupt_what_goes_on) == [3.0, 3.0]


EXITS = {
    "ends": "",
    "raises": "raise ValueError('bad value')",
    "exits": "raise SystemExit(3)",
    "drops": "del comm, works",
}


@pytest.mark.soak
@pytest.mark.parametrize("name", EXITS)
def test_a_program_may_end_with_calls_pending(tmp_path, name):
    """Whatever they are doing: nothing crashes, nobody waits for long."""
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, gpucoll\n"
        "comm = gpucoll.init(timeout_s=20)\n"
        "works = [comm.all_reduce(np.ones(n), async_op=True) for n in (3, 1 << 20, 5, 1 << 22)]\n"
        "if comm.rank == 0:\n"
        "    works[0].wait()\n"
        f"{EXITS[name]}\n"
    )
    path = str(Path(gpucoll.__file__).parent.parent)
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-m", "gpucoll", "run", "-n", "2", str(program)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode in ({"raises": 1, "exits": 3}.get(name, 0), 1), ended.stderr
        assert "Segmentation" not in ended.stderr
        assert "died" not in ended.stderr


def use_many(comm):
    """Make communicators with asynchronous calls; return what is left of them."""
    x, out = np.ones(3), np.ones(3)

    def use_one():
        with comm.duplicate() as own:
            own.all_reduce(np.ones(LARGE // 8), async_op=True).wait()
            works = [own.all_reduce(x, out=out, async_op=True) for _ in range(70)]
            gpucoll.wait_all(works)

    def left():
        n_threads = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), n_threads

    for _ in range(10):
        use_one()
    before, memory_kib = left(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        use_one()
    for _ in range(20_000):
        comm.all_reduce(x, out=out, async_op=True).wait()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib
    until(lambda: left()[1] <= before[1])  # a thread that was joined may be there a moment longer
    return before[0], left()[0], grown_kib


@pytest.mark.soak
def test_nothing_is_left_of_many_communicators_and_calls(ranks):
    for before, after, grown_kib in ranks.call(2, use_many):
        assert after == before
        assert grown_kib < 8 << 10  # 100 communicators' queues alone take 4 MiB


def interrupt_before_it_is_noted(comm):
    """An interrupt between the compiled entry and the line that remembers the call."""
    x, large = np.ones(4), np.ones(500_000)
    comm.all_reduce(x, async_op=True).wait()
    queue = comm._queue
    note, counts = queue.note_started, []

    def fail(*arguments):
        queue.note_started = note
        raise KeyboardInterrupt

    for array in (x, large):
        out = np.zeros_like(array)
        queue.note_started = fail
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(array, out=out, async_op=True)
        counts.append(sys.getrefcount(out))
        assert comm.all_reduce(np.ones(4), async_op=True).wait()[0] == 2
        until(lambda queue=queue: queue._settle_ended() or not queue.is_busy)
        assert out[-1] == 2  # it went on
        counts.append(sys.getrefcount(out))
    assert comm.all_reduce(np.ones(4))[0] == 2
    return counts


def test_an_interrupt_before_a_call_is_noted_leaves_it_going_on(ranks):
    for counts in ranks.call(2, interrupt_before_it_is_noted):
        kept, let_go, kept_too, let_go_too = counts
        assert kept > let_go
        assert kept_too > let_go_too
