"""Tracebacks for users: those of gpucoll's own errors omit the frames inside gpucoll.

The user's line and the message tell which call failed and why. The frames below lead through
gpucoll to the place that raised the error. To look for a fault in gpucoll, show them by
``GPUCOLL_FULL_TRACEBACKS=1`` or a debugger. Other errors keep all their frames.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gpucoll import config
from gpucoll.errors import GpucollError, LaunchError

__all__ = ["chain", "shorten_uncaught", "shortened"]

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def shorten_uncaught() -> None:
    """Shorten the tracebacks of uncaught errors, unless another hook shows them (IPython)."""
    if sys.excepthook is sys.__excepthook__ and not config.full_tracebacks():
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with shortened(error):
        sys.__excepthook__(kind, error, error.__traceback__ or trace)


@contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Shorten the tracebacks of an error and its causes, within the context."""
    kept = [(each, each.__traceback__) for each in chain(error)]
    try:
        if not config.full_tracebacks():
            for each, trace in kept:
                if _is_of_a_call(each):
                    each.__traceback__ = _without_end_inside(trace)
        yield
    finally:
        for each, trace in kept:
            each.__traceback__ = trace


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        following = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or following


def _is_of_a_call(error: BaseException) -> bool:
    """Return whether a call raised this: an error of gpucoll's, a rank's in `launch`, or Ctrl-C."""
    is_own = isinstance(error, GpucollError | KeyboardInterrupt)
    return is_own or isinstance(error.__cause__, LaunchError)


def _without_end_inside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback up to the user's last line, or all of it if there is no such line."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    end = len(entries)
    while end and _is_inside(entries[end - 1].tb_frame.f_code.co_filename):
        end -= 1
    made: TracebackType | None = None
    for entry in reversed(entries[: end or len(entries)]):
        made = TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made


def _is_inside(file: str) -> bool:
    """Return whether a file belongs to this package, or to the standard library that it calls."""
    if file.startswith(_PACKAGE):
        return True
    import sysconfig

    standard_library = os.path.join(sysconfig.get_path("stdlib"), "")
    return file.startswith(standard_library) and "-packages" not in file
