"""Calls that consist of several: a rank makes all of them, or breaks the communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpucoll.errors import MismatchError
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.layout import Abort


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


def give_up(group: Group, error: BaseException) -> None:
    """Abort the communicator because `error` ends this rank's call; the other ranks are told."""
    if group.is_closed or group.is_forked or group.is_aborted:
        return
    if isinstance(error, Exception):
        group.note_exception(error)
        group.abort()
    else:  # Ctrl-C, or another exception of a signal handler
        group.abort(Abort.INTERRUPTED)
