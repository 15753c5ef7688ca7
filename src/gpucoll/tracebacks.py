"""Tracebacks as users read them: of gpucoll's own errors, without the frames inside gpucoll.

Where a call fails and why is in the user's line and in the message. The frames below it lead
through gpucoll to where the error was made: those who look for a fault in gpucoll want them, and
get them by ``GPUCOLL_FULL_TRACEBACKS=1`` or from a debugger. Other errors keep all of theirs.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gpucoll import config
from gpucoll.errors import GpucollError, LaunchError

__all__ = ["chain", "shorten_uncaught", "shortened"]

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")


def shorten_uncaught() -> None:
    """Have errors that nobody catches shown so, unless something else shows them (IPython)."""
    if sys.excepthook is sys.__excepthook__ and not config.full_tracebacks():
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with shortened(error):
        sys.__excepthook__(kind, error, error.__traceback__ or trace)


@contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Within the block, an error and those that it came of have the tracebacks that users read."""
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
    """Return an error, what it was raised from, what that was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        following = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or following


def _is_of_a_call(error: BaseException) -> bool:
    """Return whether a call raised this: gpucoll's own error, a rank's in `launch`, Ctrl-C."""
    is_own = isinstance(error, GpucollError | KeyboardInterrupt)
    return is_own or isinstance(error.__cause__, LaunchError)


def _without_end_inside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback up to the last line of the user's; the same where there is none."""
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
    """Return whether a file is this package's, or of the standard library, which it calls."""
    if file.startswith(_PACKAGE):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
