"""The fast path of asynchronous calls on NumPy arrays and tensors: compiled code starts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpucoll.arrays.array_kinds import new_like, new_of_rows, note_written, numpy_view
from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.runner import Runner
from gpucoll.calls.work import Work
from gpucoll.types import Collective

_Entry = Callable[..., Any]


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
        self._entries: dict[Collective, _Entry] = {}

    def start(self, collective: Collective, x: Any, given: Mapping[str, Any]) -> Work[Any] | None:
        """Start a call and return its Work; None if no entry can start it."""
        rows = _ROWS.get(collective)
        if rows is None or self._runner.grouped is not None:
            return None
        if given.get("counts") is not None or given.get("receive_counts") is not None:
            return None
        if type(x) is not np.ndarray:
            return self._start_on_tensor(collective, x, rows, given)
        if (out := given.get("out")) is None:
            out = np.empty_like(x) if rows == _SAME else self._new(x, rows)
        return self._begin(collective, x, out, given, out, x)

    def _start_on_tensor(
        self, collective: Collective, x: Any, rows: str, given: Mapping[str, Any]
    ) -> Work[Any] | None:
        """Start a call on a tensor that has a NumPy view."""
        if (shown := numpy_view(x)) is None:
            return None
        if (out := given.get("out")) is x:
            shown_out: Any = shown
        else:
            if out is None:
                out = new_like(x) if rows == _SAME else new_of_rows(x, *self._factor(rows))
            if (shown_out := numpy_view(out)) is None:
                return None
        work = self._begin(collective, shown, shown_out, given, out, x)
        if work is not None and given.get("out") is not None:
            note_written(out)
        return work

    def _begin(
        self,
        collective: Collective,
        x: Any,
        out: Any,
        given: Mapping[str, Any],
        result: Any,
        keep: Any,
    ) -> Work[Any] | None:
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

    def _new(self, x: Any, rows: str) -> Any:
        """Return a new array for the result; None if x has no rows, which Python reports."""
        if x.ndim == 0:
            return None
        multiply, divide = self._factor(rows)
        return np.empty((x.shape[0] * multiply // divide, *x.shape[1:]), x.dtype)

    def _factor(self, rows: str) -> tuple[int, int]:
        """Return the factor and the divisor that turn the rows of x into those of the result."""
        world_size = self._runner.group.world_size
        return (world_size, 1) if rows == _ALL else (1, world_size)


_SAME, _ALL, _BLOCK = "as many rows as x", "those of all ranks", "one rank's part"
_ROWS: Mapping[Collective, str] = {
    Collective.ALL_REDUCE: _SAME,
    Collective.SCAN: _SAME,
    Collective.EXCLUSIVE_SCAN: _SAME,
    Collective.BROADCAST: _SAME,
    Collective.ALL_TO_ALL: _SAME,
    Collective.ALL_GATHER: _ALL,
    Collective.REDUCE_SCATTER: _BLOCK,
}
"""The number of rows of the result. Python starts calls in which only a root has a result."""
