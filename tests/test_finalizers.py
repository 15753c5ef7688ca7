"""Finalizers take no lock, wait for nothing, and call no driver (`gpucoll.finalizers`).

They run wherever garbage is collected: under any lock, in any thread. Held twice: by reading what
every finalizer in the sources calls, and by collecting garbage of all kinds while another thread
has all of the library's locks.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpucoll
from gpucoll import config
from gpucoll.errors import AbortedError, GpucollError
from gpucoll.finalizers import FinalizerThread, run_all
from tests.test_layers import ROOT, sources
from tests.waiting import SOON_S, until

MAY_CALL = {
    *("append", "leave"),  # of a deque; to the thread, or to who ends it later
    *("getpid", "getattr", "who", "warn"),
    "os.close",
}
"""None of them takes a lock of the library's."""
KNOWN = {
    "alive": "a weak reference",
    "queue": "a weak reference",
    "streams.give_back": "appends to a list",
    "self.streams.give_back": "appends to a list",
    "device.leave_unused": "appends to a deque",
    "delete": "TensorFlow frees memory",
}
"""What else is called, or is the callback of a weak reference, and what it does."""


# --- by reading -----------------------------------------------------------------------------------


def finalizers_of(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Yield what finalizers are: bodies of ``__del__``, and callbacks of weak references."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WEAK and len(node.args) > 1:
            yield node.args[1]


WEAK = {"weakref.finalize", "weakref.ref", "weakref.WeakMethod", "weakref.proxy"}


def called_by(found: ast.AST, functions: dict[str, ast.AST]) -> Iterator[str]:
    """Yield what a finalizer calls, through functions of its own module."""
    if isinstance(found, ast.Name | ast.Attribute):
        names = [ast.unparse(found)]
    else:
        calls = (node for node in ast.walk(found) if isinstance(node, ast.Call))
        names = [ast.unparse(call.func) for call in calls]
    for name in names:
        if (function := functions.get(name.removeprefix("self."))) is not None:
            yield from called_by(function, functions)
        else:
            yield name


def is_allowed(name: str) -> bool:
    return name in KNOWN or name in MAY_CALL or name.rpartition(".")[2] in MAY_CALL - {"close"}


def offences(source: str) -> list[str]:
    """Return what finalizers of a module call that they may not."""
    if "__del__" not in source and "weakref" not in source:
        return []
    tree = ast.parse(source)
    functions: dict[str, ast.AST] = {
        node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    return [
        f"line {found.lineno}: {name}"
        for found in finalizers_of(tree)
        for name in called_by(found, functions)
        if not is_allowed(name)
    ]


def test_finalizers_take_no_lock() -> None:
    found = {str(path.relative_to(ROOT)): offences(path.read_text("utf-8")) for path in sources()}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __del__(self):\n  self.close()",
        "class A:\n def __del__(self):\n  self._let_go()\n def _let_go(self):\n  lock.acquire()",
        "weakref.finalize(a, thread.remove, 1)",
        "weakref.ref(a, lambda _: event.set())",
    ],
)
def test_one_that_might_is_found(source: str) -> None:
    assert len(offences(source)) == 1


# --- by collecting --------------------------------------------------------------------------------


def locks() -> list[Any]:
    """Return every lock that a module of the library, or an object of its classes, has.

    But for those that say whether there is a thread for finalizers: nobody waits for one.
    """
    kinds = type(threading.Lock()), type(threading.RLock())
    found: dict[int, Any] = {}
    holders = [vars(module) for name, module in sys.modules.items() if name.startswith("gpucoll")]
    for thing in gc.get_objects():
        kind = type(thing)
        if str(kind.__module__).startswith("gpucoll") and kind is not FinalizerThread:
            with contextlib.suppress(TypeError):
                holders.append(vars(thing))
    for holder in holders:
        for value in list(holder.values()):
            lock = getattr(value, "_lock", value)  # of a Condition
            lock = getattr(getattr(value, "_cond", None), "_lock", lock)  # of an Event
            if isinstance(lock, kinds):
                found[id(lock)] = lock
    return list(found.values())


def collect_under_locks(garbage: list[Any]) -> tuple[int, bool]:
    """Let go of garbage while another thread has the locks; return how many, and if it could."""
    ready, collected, was_soon = threading.Event(), threading.Event(), []
    mine = locks()

    def hold() -> None:
        held = [lock for lock in mine if lock.acquire(blocking=False)]
        ready.set()
        was_soon.append(collected.wait(SOON_S))
        for lock in held:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(SOON_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        garbage.clear()
        gc.collect()
    collected.set()
    thread.join()
    return len(mine), was_soon[0]


class Cycle:
    """Keeps things that only a collection lets go of."""

    def __init__(self, *things: Any) -> None:
        self.things, self.me = things, self


def collect_communicators(comm: gpucoll.Communicator) -> tuple[int, bool]:
    """Of one that nobody used, and of some with calls and messages, pending or given up."""
    before = threading.active_count()
    garbage = []
    for kind in range(4):
        own = comm.duplicate()
        works: list[Any] = []
        with contextlib.suppress(GpucollError):  # the other rank may have aborted by then
            if kind > 0:
                works += [own.all_reduce(np.ones(n), async_op=True) for n in (3, 1 << 18)]
                works.append(own.all_gather(np.ones(3), counts="auto", async_op=True))
            if kind > 1:
                works += [own.recv(np.ones(1 << 17), comm.rank, 5, async_op=True)]
                works[0].fileno()
            if kind > 2:
                works[1].add_done_callback(bool)
                own.abort()
        garbage.append(Cycle(own, *works))
        del own, works
    found = collect_under_locks(garbage)
    until(lambda: gc.collect() >= 0 and threading.active_count() <= before)
    with contextlib.suppress(GpucollError):
        comm.barrier()
    return found


def test_communicators_are_collected_under_any_lock() -> None:
    # Not ranks of tests, which keep their communicators.
    for n_locks, was_soon in gpucoll.launch(collect_communicators, 2, timeout_s=100):
        assert n_locks > 20
        assert was_soon


def test_one_that_has_failed_is_collected() -> None:
    """Frames of its failure keep it, and the thread of its calls kept the failure."""
    comm = gpucoll.init(rank=0, world_size=1)
    comm.all_gather(np.ones(3), counts="auto", async_op=True).wait()
    assert "gpucoll" in {thread.name for thread in threading.enumerate()}
    comm.abort()
    with contextlib.suppress(AbortedError):
        comm.barrier()
    kept = weakref.ref(comm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del comm
        until(lambda: gc.collect() >= 0 and kept() is None)


def collect_arrays(comm: Any) -> tuple[tuple[int, bool], int]:
    """Arrays of a Host device, memory of the communicator's there, a stream, a kernel's table."""
    from gpucoll.testing import device_arrays, host_device

    like = device_arrays.asarray(np.ones(1000, np.float32), device=comm.rank)
    bytes_before = host_device.counts(comm.rank)["bytes"]
    with comm.duplicate() as own:
        x = device_arrays.asarray(np.ones(1000, np.float32), device=comm.rank)
        made = own.empty(1000, np.float32, like=own.all_reduce(x))
        own.all_reduce([x, made], async_op=True).synchronize()  # packed: by a table
        garbage = [Cycle(x, made, device_arrays.Stream(comm.rank))]
        del x, made
        found = collect_under_locks(garbage)
    device_arrays.synchronize(comm.rank)
    with comm.duplicate() as own:  # gives back what is left
        own.all_reduce(like)
    device_arrays.synchronize(comm.rank)
    return found, host_device.counts(comm.rank)["bytes"] - bytes_before


def test_arrays_are_collected_under_any_lock(monkeypatch) -> None:
    for name, value in {config.CPU_ONLY: "0", config.DEVICE: "host"}.items():
        monkeypatch.setenv(name, value)
    for (n_locks, was_soon), n_bytes in gpucoll.launch(collect_arrays, 2, timeout_s=100):
        assert n_locks > 20
        assert was_soon
        assert n_bytes < 100_000


# --- the thread -----------------------------------------------------------------------------------


def test_what_is_left_is_called_in_order_by_a_thread_that_ends():
    called: list[Any] = []
    threads: set[int] = set()
    thread = FinalizerThread()

    def note(number):
        called.append(number)
        threads.add(threading.get_ident())

    for number in range(100):
        thread.leave(note, number)
        if number % 10 == 0:
            time.sleep(0)
    until(lambda: len(called) == 100)
    assert called == list(range(100))
    assert threading.get_ident() not in threads
    until(lambda: all(each.name != "gpucoll-finalizers" for each in threading.enumerate()))


def test_what_it_raises_is_shown_and_the_rest_is_called(monkeypatch):
    raised: list[Any] = []
    called = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    thread = FinalizerThread()
    thread.leave(int, "no number")
    thread.leave(called.set)
    assert called.wait(SOON_S)
    assert [type(item.exc_value) for item in raised] == [ValueError]


def test_all_steps_are_made_whatever_one_raises():
    made: list[int] = []

    def fail():
        made.append(2)
        raise KeyError("two")

    with pytest.raises(KeyError, match="two"):
        run_all(lambda: made.append(1), fail, lambda: made.append(3))
    assert made == [1, 2, 3]
