"""Schedules between leaders, as the rows that connections run (`gpucoll.transport.tcp.streams`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.algorithms.steps import NOBODY, Span, Step
from gpucoll.transport.tcp.streams import Row

Rows = npt.NDArray[np.int64]


class Schedule(NamedTuple):
    """What one leader does.

    Attributes
    ----------
    make : callable
        A function of `gpucoll.algorithms`, or one of those here: ``(here, count)`` -> steps, with
        the root's host as third argument where there is one.
    edges : tuple of int
        Where in the working buffer each block begins, and the last one ends.
    root : int or None
        The root's host.
    """

    make: Callable[..., list[Step]]
    edges: tuple[int, ...]
    root: int | None = None

    def steps(self, here: int, count: int) -> list[Step]:
        """Return what a host does, of so many."""
        root = () if self.root is None else (self.root,)
        return self.make(here, count, *root)


def partners(steps: Iterable[Step]) -> set[int]:
    """Return the hosts with which steps exchange anything."""
    found = {host for step in steps for host in (step.send_to, step.receive_from)}
    return found - {NOBODY}


@functools.lru_cache(maxsize=128)
def rows_of(schedule: Schedule, here: int, count: int, links: tuple[int, ...]) -> Rows:
    """Return a schedule as rows.

    Parameters
    ----------
    links : tuple of int
        By host, the number of its link; -1 where there is none.
    """
    rows: list[list[int]] = []
    for number, step in enumerate(schedule.steps(here, count)):
        sent = _ranges(step.send_to, step.send, schedule.edges, links)
        received = _ranges(step.receive_from, step.receive, schedule.edges, links)
        reduces = int(step.reduces)
        theirs_first = int(step.receive_from < here)
        for send, receive in itertools.zip_longest(sent, received, fillvalue=(-1, 0, 0)):
            rows.append([number, *send, *receive, reduces, theirs_first, int(step.forwards)])
    made = np.array(rows, np.int64).reshape(len(rows), len(Row))
    made.flags.writeable = False  # all calls of this size use it
    return made


def _ranges(
    host: int, spans: Sequence[Span], edges: tuple[int, ...], links: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Return link, offset and size of each span."""
    if host == NOBODY:
        return []
    found = []
    for span in spans:
        start = edges[span.first]
        found.append((links[host], start, edges[span.first + span.count] - start))
    return found


# --- straight between the root and each other host ------------------------------------------------


def gather_directly(here: int, count: int, root: int) -> list[Step]:
    """Give block h of each host h to the root, which takes all of them at the same time.

    Cost: one step; each block sent once. A link between the root and every other host.
    """
    if here != root:
        return [Step(send_to=root, send=_block(here))]
    others = [host for host in range(count) if host != root]
    return [Step(receive_from=host, receive=_block(host)) for host in others]


def scatter_directly(here: int, count: int, root: int) -> list[Step]:
    """Give block h of the root to each host h, to all of them at the same time.

    Cost: one step; each block sent once. A link between the root and every other host.
    """
    if here != root:
        return [Step(receive_from=root, receive=_block(here))]
    others = [(root + distance) % count for distance in range(1, count)]
    return [Step(send_to=host, send=_block(host)) for host in others]


def _block(number: int) -> tuple[Span, ...]:
    return (Span(number, 1),)
