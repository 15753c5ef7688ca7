"""Where the context of `Arena.shared_arrays` ends: errors, threads, tasks, generators, the exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.memory.arena_books import check_books, holds

from gpucoll.errors import BackendUnavailableError
from gpucoll.memory import numpy_memory

N = 1000


def inside(arena):
    return holds(arena, np.ones(N))


def nest(arena, other):
    with arena.shared_arrays():
        with other.shared_arrays():
            assert inside(other)
            with arena.shared_arrays():
                assert inside(arena)
            assert inside(other)
        assert inside(arena)
        raise LookupError


def test_nested_and_after_an_error(arena, new_arena):
    other = new_arena(1 << 22)
    with pytest.raises(LookupError):
        nest(arena, other)
    assert not inside(arena)
    assert not inside(other)
    with arena.shared_arrays():
        array = other.array((N,), np.dtype(np.float64))
        assert holds(other, array)
        assert inside(arena), "making one array elsewhere ended the context"
        with pytest.raises(MemoryError):
            other.array((1 << 22,), np.dtype(np.float64))
        assert inside(arena)


def test_the_same_context_object_twice(arena):
    context = arena.shared_arrays()
    with context:
        assert inside(arena)
    with pytest.raises((RuntimeError, AttributeError)), context:
        pass
    assert not inside(arena)


def test_a_generator_carries_it_until_it_ends(arena):
    def generate():
        with arena.shared_arrays():
            yield inside(arena)

    generator = generate()
    assert next(generator)
    assert inside(arena), "no longer a trap: mend the documentation"
    generator.close()
    assert not inside(arena)


def test_tasks_and_contexts_are_apart(arena):
    async def within(entered, left):
        with arena.shared_arrays():
            entered.set()
            await left.wait()
            return inside(arena)

    async def without(entered, left):
        await entered.wait()
        found = inside(arena)
        left.set()
        return found

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(within(entered, left), without(entered, left))

    assert asyncio.run(both()) == [True, False]
    with arena.shared_arrays():
        carried = contextvars.copy_context()
    assert carried.run(inside, arena)


def test_a_thread_does_not_inherit_it(arena):
    found = []

    def work():
        found.append(inside(arena))
        with arena.shared_arrays():
            found.append(inside(arena))

    with arena.shared_arrays():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
        assert inside(arena)
    inherits = getattr(sys.flags, "thread_inherit_context", False)  # Python 3.14, free-threaded
    assert found == [bool(inherits), True]


def test_threads_at_once(arena):
    wrong = []

    def work(value):
        drawn = random.Random(value)
        with arena.shared_arrays():
            held = [np.full(drawn.randrange(200, 5000), value) for _ in range(10)]
            for _ in range(2000):
                place = drawn.randrange(10)
                if not (held[place] == value).all():
                    wrong.append(value)
                held[place] = np.zeros(drawn.randrange(200, 5000), np.int64) + value

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    check_books(arena)


def test_retired_arrays_stay_valid(arena):
    with arena.shared_arrays():
        array = np.ones(N)
        address = array.ctypes.data
        arena.retire()
        assert np.ones(N).ctypes.data != address
        array.resize(5 * N, refcheck=False)
        assert array.sum() == N
        assert array.ctypes.data != address
        del array
        assert np.ones(N).ctypes.data != address
    assert arena.retired_bytes == 8 * 1024


@pytest.mark.parametrize(
    "broken", ["_API_VERSION", "_ARRAY_API", "get_handler_name"], ids=lambda name: name.strip("_")
)
def test_another_numpy_is_refused(new_arena, monkeypatch, broken):
    numpy_memory._handler_functions.cache_clear()
    internals = numpy_memory._numpy_internals()

    names = ("_ARRAY_API", "get_handler_name")
    another = SimpleNamespace(**{name: getattr(internals, name) for name in names})
    if broken == "_API_VERSION":
        monkeypatch.setattr(numpy_memory, "_FEATURE_VERSION", 0x1000)
    elif broken == "_ARRAY_API":
        del another._ARRAY_API
    else:
        another.get_handler_name = lambda array: "default_allocator"
    monkeypatch.setattr(numpy_memory, "_numpy_internals", lambda: another)
    arena = new_arena(1 << 22)
    for make in (arena.shared_arrays, lambda: arena.array((4,), np.dtype(np.uint8))):
        with pytest.raises(BackendUnavailableError, match=r"NumPy 1\.25 to 2\.x"):
            make()
    assert not inside(arena), "the handler that was tried is still there"
    numpy_memory._handler_functions.cache_clear()


AT_EXIT = """
import atexit, gc, sys, threading
import numpy as np
from gpucoll.memory.arena import process_arena

arena = process_arena()
context = arena.shared_arrays()
context.__enter__()  # and never left
np.kept_by_a_module_that_goes_late = np.ones(10_000)
sys.kept = [np.array([object()] * 1000, dtype=object), arena.array((5000,), np.dtype("f4"))]

class Cycle:
    def __init__(self):
        self.me, self.array = self, np.zeros(5000)
    def __del__(self):
        self.array = self.array + np.ones(5000)

builtins_cycle = Cycle()
gc.disable()
cycles = [Cycle() for _ in range(3)]
del cycles
atexit.register(lambda: np.ones(10_000).sum())

def work():
    with arena.shared_arrays():
        while True:
            np.ones(5000)

threading.Thread(target=work, daemon=True).start()
print(np.kept_by_a_module_that_goes_late.sum())
"""


def test_arrays_outlive_the_interpreter():
    """Live arrays in modules and cycles, a context never left, a daemon thread: a quiet end."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "10000.0\n", "")


def test_an_interrupt_leaves_no_handler_behind(arena):
    """Ctrl-C at any moment of making an array: the next ones are ordinary again."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    drawn = random.Random(1)
    gc.disable()  # what is raised within a collection is lost
    try:
        for _ in range(100):
            give_up_s = time.monotonic() + 2.0
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-5, 3e-4))
                for _ in range(5000):
                    arena.array((N,), np.dtype(np.float64))
                # The interpreter may miss a signal that comes while it has just served another, and
                # serve it much later: this call looks for it.
                while time.monotonic() < give_up_s:
                    signal.pthread_sigmask(signal.SIG_BLOCK, [])
            assert not inside(arena)
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
