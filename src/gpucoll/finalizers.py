"""The threads to which finalizers leave their work.

A finalizer (``__del__``, the callback of a `weakref`) runs wherever garbage is collected, that is
inside any allocation. The thread may hold the very lock that the finalizer would take, or wait for.
Finalizers of gpucoll therefore take no lock, wait for nothing and call no driver. They leave such
work to a thread that holds no lock, or append it to a deque that is emptied at a known place
(`gpucoll.backends.gpu.abandoned`). `tests/test_finalizers.py` enforces the rule.
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
    """Runs the calls that finalizers leave, in order, in a thread that exists while there are any.

    There is one for each kind of work that may wait, because a call that waits delays all others.
    """

    def __init__(self) -> None:
        self._left: deque[_Task] = deque()
        self._is_working = _thread.allocate_lock()
        """Held while there is a thread. No code waits for it."""
        _all.add(self)

    def leave(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the thread call ``function(*arguments)``. For finalizers: neither locks nor waits.

        Exceptions go to ``sys.unraisablehook``. A forked child makes none of its parent's calls. At
        the end of the interpreter no thread can start: the process ends without the calls.
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
        self._start()  # for a call that was left just before the release

    def forget_in_child(self) -> None:
        """Drop the calls that the parent has left."""
        self._left = deque()
        self._is_working = _thread.allocate_lock()


def is_first(owner: object, what: str) -> bool:
    """Return whether this is the first call for this object and `what`, in any thread.

    For work that must be done once, by the object's owner or by a finalizer's call. Takes no lock,
    because the owner's own finalizer may ask, too.
    """
    mine = object()
    return owner.__dict__.setdefault(f"_first_to_{what}", mine) is mine


def run_all(*steps: Callable[[], object]) -> None:
    """Call all steps in order, even if an earlier one raises; then raise the last error."""
    with contextlib.ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
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
"""For work that waits for no GPU and no program: communicators dropped without `close`."""


def _after_fork() -> None:
    for thread in list(_all):
        thread.forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
