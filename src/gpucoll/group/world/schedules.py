"""Turn schedules between leaders into rows for connections (`gpucoll.transport.tcp.streams`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.algorithms.steps import NOBODY, Span, Step
from gpucoll.transport.tcp.streams import Row

Rows = npt.NDArray[np.int64]
Links = tuple[tuple[int, ...], ...]
"""By lane and host: the number of a link; -1: there is none."""
LANE_BYTES: Final = 64 << 10
"""A block is divided among connections if each of them gets this many bytes or more."""
_LANE_UNIT: Final = 64
"""Blocks are divided at multiples of this many bytes, which every element's size divides."""
_NOTHING: Final = (-1, 0, 0)


class Section(NamedTuple):
    """A part of the working buffer. A schedule runs over each section independently.

    Attributes
    ----------
    starts, sizes : tuple of int
        By block: where it begins in the working buffer, and its size in bytes.
    gates : tuple of int
        By block: how many pieces must be ready on this host before the block has its data.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    gates: tuple[int, ...]

    @staticmethod
    def of(edges: Sequence[int], gates: int | Sequence[int] = 0) -> Section:
        """Return a section of adjacent blocks, with one gate for all of them or one for each."""
        count = len(edges) - 1
        of_blocks = (gates,) * count if isinstance(gates, int) else tuple(gates)
        sizes = (end - start for start, end in itertools.pairwise(edges))
        return Section(tuple(edges[:-1]), tuple(sizes), of_blocks)


class Schedule(NamedTuple):
    """One leader's part in a transfer.

    Attributes
    ----------
    make : callable
        A function of `gpucoll.algorithms`: ``(here, count)`` -> steps, with the root's host as
        third argument if there is a root.
    sections : tuple of Section
        The schedule runs over all sections at the same time.
    root : int or None
        The root's host.
    is_one_step : bool
        Whether steps send only data that was there from the start, so that all can begin at once.
    """

    make: Callable[..., list[Step]]
    sections: tuple[Section, ...]
    root: int | None = None
    is_one_step: bool = False

    def steps(self, here: int, count: int) -> list[Step]:
        """Return the steps that host `here` of `count` hosts takes over each section."""
        root = () if self.root is None else (self.root,)
        return self.make(here, count, *root)

    @property
    def work_bytes(self) -> int:
        """The end of the last block in the working buffer."""
        ends = (
            start + size
            for section in self.sections
            for start, size in zip(section.starts, section.sizes, strict=True)
        )
        return max(ends, default=0)


class Table(NamedTuple):
    """A schedule as rows that connections run.

    Attributes
    ----------
    rows : ndarray
        See `gpucoll.transport.tcp.streams`.
    ends : tuple of int
        By step of each section: how many rows there are up to its end.
    n_steps : int
        Number of steps of each section.
    """

    rows: Rows
    ends: tuple[int, ...]
    n_steps: int


def partners(steps: Iterable[Step]) -> set[int]:
    """Return the hosts that the steps send to or receive from."""
    found = {host for step in steps for host in (step.send_to, step.receive_from)}
    return found - {NOBODY}


@functools.lru_cache(maxsize=128)
def table_of(schedule: Schedule, here: int, count: int, links: Links) -> Table:
    """Return a schedule as rows: the steps of the first section, then those of the next one."""
    steps = schedule.steps(here, count)
    rows: list[list[int]] = []
    ends: list[int] = []
    for section in schedule.sections:
        made: list[list[int]] = []
        for number, step in enumerate(steps):
            made += _rows_of(0 if schedule.is_one_step else number, step, section, here, links)
            ends.append(len(rows) + len(made))
        first = len(rows)
        for row in made:
            row[Row.first], row[Row.end] = first, first + len(made)
        rows += made
    table = np.array(rows, np.int64).reshape(len(rows), Row.n_words)
    table.flags.writeable = False  # all calls of this size use it
    return Table(table, tuple(ends), len(steps))


def _rows_of(number: int, step: Step, section: Section, here: int, links: Links) -> list[list[int]]:
    """Return the rows of a step: lane by lane, range by range."""
    blocks = [
        block
        for span in (*step.send, *step.receive)
        for block in range(span.first, span.first + span.count)
    ]
    gate = max((section.gates[block] for block in blocks), default=0)
    facts = int(step.reduces), int(step.receive_from < here), int(step.forwards), 0, 0, gate
    rows = []
    for lane, by_host in enumerate(links):
        sent = _ranges(step.send_to, step.send, section, lane, len(links), by_host)
        received = _ranges(step.receive_from, step.receive, section, lane, len(links), by_host)
        for send, receive in itertools.zip_longest(sent, received, fillvalue=_NOTHING):
            rows.append([number, *send, *receive, *facts])
    return rows


def _ranges(
    host: int,
    spans: Sequence[Span],
    section: Section,
    lane: int,
    n_lanes: int,
    by_host: tuple[int, ...],
) -> list[tuple[int, int, int]]:
    """Return link, offset and size of the ranges that go over one lane; join adjacent ones."""
    if host == NOBODY:
        return []
    found: list[tuple[int, int, int]] = []
    for span in spans:
        at_first = len(found)
        for block in range(span.first, span.first + span.count):
            start, size = section.starts[block], section.sizes[block]
            begin, end = lane_of(size, lane, n_lanes)
            if begin == end and (lane > 0 or block > span.first):
                continue
            last = found[-1] if len(found) > at_first else _NOTHING
            if last[0] >= 0 and last[1] + last[2] == start + begin:
                found[-1] = (last[0], last[1], last[2] + end - begin)
            else:
                found.append((by_host[host], start + begin, end - begin))
    return found


def lane_of(size: int, lane: int, n_lanes: int) -> tuple[int, int]:
    """Return which part of a block goes over one of several connections; only its size matters."""
    if size < LANE_BYTES * n_lanes:
        return (0, size) if lane == 0 else (0, 0)
    units = size // _LANE_UNIT
    begin = units * lane // n_lanes * _LANE_UNIT
    end = units * (lane + 1) // n_lanes * _LANE_UNIT if lane + 1 < n_lanes else size
    return begin, end
