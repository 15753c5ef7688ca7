"""The fast path of asynchronous calls on NumPy arrays and tensors: compiled code starts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays.array_kinds import new_like, new_of_rows, note_written, numpy_view
from gpucoll.arrays.library import AnyArray
from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.given import Given
from gpucoll.calls.runner import Runner
from gpucoll.calls.work import Work
from gpucoll.collectives import Collective, Flow

_Entry = Callable[..., Any]

_ALIKE_EVERYWHERE = frozenset(
    each for each in Collective if each.flow != Flow.TO_ROOT and not each.knows_one_block
)
"""Collectives in which all ranks pass and get the same; Python starts the others."""
_KEEPS_ROWS = frozenset(each for each in Collective if each.spreads == each.gathers)
"""Collectives whose results have as many rows as x."""


class Starting:
    """Starts collectives of a dtype, op and root seen before.

    Parameters
    ----------
    runner : Runner
        Its queue takes the calls.
    host : HostBackend
        Has the entries, which are made when they are first needed.
    """

    def __init__(self, runner: Runner, host: HostBackend) -> None:
        self._runner = runner
        self._queue = runner.queue
        self._host = host
        self._world_size = runner.group.world_size
        self._entries: dict[Collective, _Entry] = {}

    def start(self, collective: Collective, x: AnyArray, given: Given) -> Work[object] | None:
        """Start a call and return its Work; None if no entry can start it."""
        if collective not in _ALIKE_EVERYWHERE:
            return None
        if self._runner.grouped is not None:
            return None
        if given.get("counts") is not None or given.get("receive_counts") is not None:
            return None
        if type(x) is not np.ndarray:
            return self._start_on_tensor(collective, x, given)
        if (out := given.get("out")) is None:
            out = np.empty_like(x) if collective in _KEEPS_ROWS else self._new(collective, x)
        return self._begin(collective, x, out, given, out, x)

    def _start_on_tensor(
        self, collective: Collective, x: AnyArray, given: Given
    ) -> Work[object] | None:
        """Start a call on a tensor that has a NumPy view."""
        if (shown := numpy_view(x)) is None:
            return None
        if (out := given.get("out")) is x:
            shown_out: Any = shown
        else:
            if out is None:
                factors = collective.rows_factor(self._world_size)
                out = new_like(x) if collective in _KEEPS_ROWS else new_of_rows(x, *factors)
            if (shown_out := numpy_view(out)) is None:
                return None
        work = self._begin(collective, shown, shown_out, given, out, x)
        if work is not None and given.get("out") is not None:
            note_written(out)
        return work

    def _begin(
        self,
        collective: Collective,
        x: AnyArray,
        out: AnyArray,
        given: Given,
        result: object,
        keep: object,
    ) -> Work[object] | None:
        """Start a call on NumPy arrays and return its Work; None if the entry cannot start it."""
        entry = self._entries.get(collective) or self._entry(collective)
        name = collective.spelled
        try:
            number = entry(x, out, given.get("op"), given.get("root"))
            return None if number is None else self._queue.note_started(number, name, result, keep)
        except BaseException as error:
            self._queue.note_lost(name, result, keep, error)
            raise

    def _entry(self, collective: Collective) -> _Entry:
        self._queue.begin_compiled()
        entry = self._entries[collective] = self._host.starter(collective)
        return entry

    def _new(self, collective: Collective, x: AnyArray) -> AnyArray:
        """Return a new array for the result; None if x has no rows, which Python reports."""
        if x.ndim == 0:
            return None
        multiply, divide = collective.rows_factor(self._world_size)
        return np.empty((x.shape[0] * multiply // divide, *x.shape[1:]), x.dtype)
