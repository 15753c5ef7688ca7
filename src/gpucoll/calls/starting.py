"""The quick way of an asynchronous call on NumPy arrays: compiled code starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.runner import Runner
from gpucoll.calls.work import Work
from gpucoll.types import Collective

_Entry = Callable[..., Any]


class Starting:
    """Starts collectives whose dtype, op and root were seen before.

    Parameters
    ----------
    runner : Runner
        Whose queue takes them.
    host : HostBackend
        Has the entries, which are made when they are first needed.
    """

    def __init__(self, runner: Runner, host: HostBackend) -> None:
        self._runner = runner
        self._queue = runner.queue
        self._host = host
        self._entries: dict[Collective, _Entry] = {}

    def start(self, collective: Collective, x: Any, given: Mapping[str, Any]) -> Work[Any] | None:
        """Start a call and return its Work; None: not that way."""
        rows = _ROWS.get(collective)
        if rows is None or type(x) is not np.ndarray or self._runner.grouped is not None:
            return None
        if given.get("counts") is not None or given.get("receive_counts") is not None:
            return None
        if (out := given.get("out")) is None:
            out = np.empty_like(x) if rows == _SAME else self._new(x, rows)
        entry = self._entries.get(collective) or self._entry(collective)
        number = entry(x, out, given.get("op"), given.get("root"))
        if number is None:
            return None
        return self._queue.note_started(number, collective.spelled, out, x)

    def _entry(self, collective: Collective) -> _Entry:
        self._queue.begin_compiled()
        entry = self._entries[collective] = self._host.starter(collective)
        return entry

    def _new(self, x: Any, rows: str) -> Any:
        """Return a new array for what comes; None where x has no rows, which Python says."""
        if x.ndim == 0:
            return None
        world_size = self._runner.group.world_size
        n_rows = x.shape[0] * world_size if rows == _ALL else x.shape[0] // world_size
        return np.empty((n_rows, *x.shape[1:]), x.dtype)


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
"""How many rows the result has; what only a root gets or gives is started by Python."""
