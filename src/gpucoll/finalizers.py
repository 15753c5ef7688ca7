"""What a finalizer leaves to a thread.

A finalizer (``__del__``, the callback of a `weakref`) runs wherever garbage is collected, which is
inside any allocation: in a thread that holds the very lock which the finalizer would take, or that
it would wait for. So finalizers of the library take no lock, wait for nothing and call no driver.
They leave that to a thread that holds no lock, or append what they have to a deque that is emptied
at a known place (`gpucoll.backends.gpu.abandoned`). `tests/test_finalizers.py` holds the rule.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["FinalizerThread", "is_first", "leave", "run_all"]

_Task = tuple[Callable[..., object], tuple[Any, ...]]


class FinalizerThread:
    """Runs what finalizers leave, in order: a thread that exists while there is something to do.

    One for each kind of work that may wait for something: what waits keeps the rest behind it.
    """

    def __init__(self) -> None:
        self._left: deque[_Task] = deque()
        self._is_working = _thread.allocate_lock()
        """Held while there is a thread. Nobody waits for it."""
        _all.add(self)

    def leave(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call ``function(*arguments)``. For finalizers: neither locks nor waits.

        What is raised goes to ``sys.unraisablehook``. A forked child calls nothing that its parent
        has left. At the interpreter's end no thread can start: the process takes all with it.
        """
        self._left.append((function, arguments))
        self._start()

    def _start(self) -> None:
        if self._left and self._is_working.acquire(False):
            try:  # `Thread.start` itself takes locks
                _thread.start_new_thread(self._begin, ())
            except RuntimeError:  # no thread can be started
                self._is_working.release()

    def _begin(self) -> None:
        try:
            thread = threading.Thread(target=self._run, name="gpucoll-finalizers", daemon=True)
            thread.start()
        except RuntimeError:
            self._is_working.release()

    def _run(self) -> None:
        while self._left:
            _call(*self._left.popleft())
        self._is_working.release()
        self._start()  # for what came just before that

    def forget_in_child(self) -> None:
        """Call nothing of what the parent has left."""
        self._left = deque()
        self._is_working = _thread.allocate_lock()


def is_first(owner: object, what: str) -> bool:
    """Return whether nobody has asked this before of the same object, in whichever thread.

    For what must be done once, by its owner or by what a finalizer has left. Takes no lock: the
    owner's own finalizer may ask, too.
    """
    mine = object()
    return owner.__dict__.setdefault(f"_first_to_{what}", mine) is mine


def run_all(*steps: Callable[[], object]) -> None:
    """Call all of these in order, each although one before it has raised; raise the last error."""
    with contextlib.ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)


def _call(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
    except BaseException as error:
        raised: Any = SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg="Exception ignored in what a finalizer has left",
            object=function,
        )
        sys.unraisablehook(raised)


_all: weakref.WeakSet[FinalizerThread] = weakref.WeakSet()
leave = FinalizerThread().leave
"""For what waits for no GPU and no program: communicators that were dropped without `close`."""


def _after_fork() -> None:
    for thread in list(_all):
        thread.forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
