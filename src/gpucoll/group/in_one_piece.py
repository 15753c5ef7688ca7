"""Calls that consist of several: a rank makes all of them, or breaks the communicator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpucoll.errors import MismatchError
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.layout import Abort

_LEAST_S = 1e-3


@contextmanager
def in_one_piece(group: Group) -> Iterator[None]:
    """Make, in the context, the rest of a call of which this rank has made a part.

    The other ranks make that rest. If this rank raised an error of its own (no memory, an argument
    that turns out not to fit, Ctrl-C) and continued, its next call would be paired with the rest.
    The communicator is therefore aborted on all ranks. A MismatchError does not abort it, because
    all ranks raise it at the same place.
    """
    try:
        yield
    except MismatchError:
        raise
    except BaseException as error:
        give_up(group, error)
        raise


class Deadline:
    """The deadline of a call that consists of several; each gets what is left.

    Parameters
    ----------
    timeout_s : float
        What all of them may take together, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._stop = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The rest, in seconds, at least a millisecond: the next call then says what is late."""
        return max(self._stop - time.monotonic(), _LEAST_S)


def give_up(group: Group, error: BaseException) -> None:
    """Abort the communicator because `error` ends this rank's call; the other ranks are told."""
    if group.is_closed or group.is_forked or group.is_aborted:
        return
    if isinstance(error, Exception):
        group.note_exception(error)
        group.abort()
    else:  # Ctrl-C, or another exception of a signal handler
        group.abort(Abort.INTERRUPTED)
