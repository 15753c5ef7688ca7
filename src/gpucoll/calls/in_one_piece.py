"""Calls that are made of several: a rank makes all of them, or breaks the communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpucoll.errors import MismatchError
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.layout import Abort


@contextmanager
def in_one_piece(group: Group) -> Iterator[None]:
    """Make, within the block, the rest of a call of which this rank has made a part.

    The other ranks make that rest. Where this rank raised something of its own (no memory, an
    argument that turns out not to fit, Ctrl-C) and went on, its next call would be paired with it.
    So the communicator is aborted for all. A MismatchError all ranks raise at the same place.
    """
    try:
        yield
    except MismatchError:
        raise
    except BaseException as error:
        give_up(group, error)
        raise


def give_up(group: Group, error: BaseException) -> None:
    """Abort the communicator because this rank leaves a call with `error`; the others are told."""
    if group.is_closed or group.is_forked or group.is_aborted:
        return
    if isinstance(error, Exception):
        group.note_exception(error)
        group.abort()
    else:  # Ctrl-C, or what else a handler raises
        group.abort(Abort.INTERRUPTED)
