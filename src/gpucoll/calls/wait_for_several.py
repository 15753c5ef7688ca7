"""Waiting for several asynchronous calls, of any communicators."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpucoll.calls.given import AnyResult
from gpucoll.calls.work import Work
from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError

_POLLS = 200
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


def wait_all(works: Iterable[Work[object]], timeout_s: float | None = None) -> list[AnyResult]:
    """Wait until all works are done; return their results, in order.

    Parameters
    ----------
    works : iterable of Work
        Of any communicators.
    timeout_s : float, optional
        Deadline of the whole wait, in seconds. The calls have deadlines of their own.

    Raises
    ------
    DeadlineError
        Some were not done after `timeout_s`; they go on.
    GpucollError
        The error of the first work that failed, raised after all are done.
    """
    works = _checked(works, "wait_all")
    until = None
    if timeout_s is not None:
        check_timeout_s(timeout_s, may_be_endless=True)
        until = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
    results, failure = [], None
    for work in works:
        try:
            results.append(work.wait() if until is None else work.wait(_left_s(until)))
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def _left_s(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def wait_any(works: Iterable[Work[object]], timeout_s: float | None = None) -> int:
    """Wait until one of the works is done, well or not; return its index.

    `Work.wait` then returns its result or raises its error. If several are done, the index is that
    of the first.

    Parameters
    ----------
    works : iterable of Work
        At least one; of any communicators.
    timeout_s : float, optional
        Deadline of this wait, in seconds. The calls have deadlines of their own.

    Raises
    ------
    DeadlineError
        None was done after `timeout_s`; all of them go on.

    Notes
    -----
    Polls all works in turn, first without a pause, then every 20 us to 1 ms.
    """
    works = _checked(works, "wait_any")
    if not works:
        raise ArgumentError("wait_any needs at least one Work")
    check_timeout_s(timeout_s, may_be_endless=True)
    until = None if timeout_s is None else time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
    n_looks, pause_s = 0, _SHORTEST_PAUSE_S
    while True:
        for place, work in enumerate(works):
            if work.done():
                return place
        if until is not None and time.monotonic() > until:
            raise DeadlineError(
                f"none of {len(works)} calls was done after {timeout_s:g} s of waiting for their "
                "Works; they go on"
            )
        n_looks += 1
        if n_looks > _POLLS:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _checked(works: Iterable[Work[object]], name: str) -> Sequence[Work[object]]:
    found: list[Any] = list(works)
    for work in found:
        if not isinstance(work, Work) and not (
            callable(getattr(work, "wait", None)) and callable(getattr(work, "done", None))
        ):
            raise ArgumentTypeError(f"{name} needs Works that async_op=True returned; got {work!r}")
    return found
