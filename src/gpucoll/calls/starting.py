"""The fast path of asynchronous calls on NumPy arrays and tensors: compiled code starts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays.array_kinds import new_like, new_of_rows, note_written, numpy_view
from gpucoll.arrays.library import AnyArray
from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.given import AnyInput, Unchecked
from gpucoll.calls.runner import Runner
from gpucoll.calls.work import Work
from gpucoll.collectives import Collective, Flow

ALIKE_EVERYWHERE = frozenset(
    each for each in Collective if each.flow != Flow.TO_ROOT and not each.knows_one_block
)
"""Collectives in which all ranks pass and get the same; Python starts the others."""


class Starting:
    """Starts a collective with a dtype, op and root seen before.

    Parameters
    ----------
    collective : Collective
        One of `ALIKE_EVERYWHERE`.
    runner : Runner
        Its queue takes the calls.
    host : HostBackend
        Has the entry, which is made when it is first needed.
    """

    def __init__(self, collective: Collective, runner: Runner, host: HostBackend) -> None:
        self._collective = collective
        self._name = collective.spelled
        self._keeps_rows = collective.spreads == collective.gathers
        """Whether a result has as many rows as x."""
        self._runner = runner
        self._queue = runner.queue
        self._host = host
        self._world_size = runner.group.world_size
        self._entry: Callable[..., Any] | None = None

    def start(
        self, x: AnyInput, out: AnyInput, op: Unchecked = None, root: Unchecked = None
    ) -> Work[object] | None:
        """Start a call without counts and return its Work; None if no entry can start it."""
        if self._runner.grouped is not None:
            return None
        if type(x) is not np.ndarray:
            return self._start_on_tensor(x, out, op, root)
        if out is None:
            out = np.empty_like(x) if self._keeps_rows else self._new(x)
        return self._begin(x, out, op, root, out, x)

    def _start_on_tensor(
        self, x: AnyArray, given_out: AnyArray, op: Unchecked, root: Unchecked
    ) -> Work[object] | None:
        """Start a call on a tensor that has a NumPy view."""
        if (shown := numpy_view(x)) is None:
            return None
        if (out := given_out) is x:
            shown_out: Any = shown
        else:
            if out is None:
                factors = self._collective.rows_factor(self._world_size)
                out = new_like(x) if self._keeps_rows else new_of_rows(x, *factors)
            if (shown_out := numpy_view(out)) is None:
                return None
        work = self._begin(shown, shown_out, op, root, out, x)
        if work is not None and given_out is not None:
            note_written(out)
        return work

    def _begin(
        self,
        x: AnyArray,
        out: AnyArray,
        op: Unchecked,
        root: Unchecked,
        result: object,
        keep: object,
    ) -> Work[object] | None:
        """Start a call on NumPy arrays and return its Work; None if the entry cannot start it."""
        entry = self._entry or self._make_entry()
        try:
            number = entry(x, out, op, root)
            if number is None:
                return None
            return self._queue.note_started(number, self._name, result, keep)
        except BaseException as error:
            self._queue.note_lost(self._name, result, keep, error)
            raise

    def _make_entry(self) -> Callable[..., Any]:
        self._queue.begin_compiled()
        self._entry = entry = self._host.starter(self._collective)
        return entry

    def _new(self, x: AnyArray) -> AnyArray:
        """Return a new array for the result; None if x has no rows, which Python reports."""
        if x.ndim == 0:
            return None
        multiply, divide = self._collective.rows_factor(self._world_size)
        return np.empty((x.shape[0] * multiply // divide, *x.shape[1:]), x.dtype)
