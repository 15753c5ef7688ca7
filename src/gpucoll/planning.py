"""Prepared collectives, as users ask for them: one method beside each collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucoll.calling import Calling
from gpucoll.plan import Plan
from gpucoll.types import Collective, ReduceOp


class Planning(Calling):
    """The same collective on the same memory, again and again, with nothing left to look up.

    ``plan_NAME`` takes what ``NAME`` takes, but for `async_op`, `timeout_s` and ``counts="auto"``;
    see there for what the arguments mean. x and `out` must be C-contiguous: x is read and `out`
    written at every call. Without `out` a new array is made once, the same for every call.

    To the other ranks a plan's call is an ordinary one, so not every rank needs a plan.

    >>> step = comm.plan_all_reduce(gradient, "avg", out=gradient)
    >>> for batch in batches:
    ...     compute(batch, gradient)
    ...     step()
    """

    def plan_all_reduce(self, x: Any, op: str | ReduceOp = "sum", *, out: Any = None) -> Plan:
        """Prepare an `all_reduce` that is done again and again on the same memory."""
        return self._plan(Collective.ALL_REDUCE, x, op=op, out=out)

    def plan_reduce(
        self, x: Any, op: str | ReduceOp = "sum", root: int = 0, *, out: Any = None
    ) -> Plan:
        """Prepare a `reduce` that is done again and again on the same memory."""
        return self._plan(Collective.REDUCE, x, op=op, root=root, out=out)

    def plan_reduce_scatter(
        self,
        x: Any,
        op: str | ReduceOp = "sum",
        *,
        counts: Sequence[int] | np.ndarray[Any, Any] | None = None,
        out: Any = None,
    ) -> Plan:
        """Prepare a `reduce_scatter` that is done again and again on the same memory."""
        return self._plan(Collective.REDUCE_SCATTER, x, op=op, counts=counts, out=out)

    def plan_scan(self, x: Any, op: str | ReduceOp = "sum", *, out: Any = None) -> Plan:
        """Prepare a `scan` that is done again and again on the same memory."""
        return self._plan(Collective.SCAN, x, op=op, out=out)

    def plan_exclusive_scan(self, x: Any, op: str | ReduceOp = "sum", *, out: Any = None) -> Plan:
        """Prepare an `exclusive_scan` that is done again and again on the same memory."""
        return self._plan(Collective.EXCLUSIVE_SCAN, x, op=op, out=out)

    def plan_broadcast(self, x: Any, root: int = 0, *, out: Any = None) -> Plan:
        """Prepare a `broadcast` that is done again and again on the same memory."""
        return self._plan(Collective.BROADCAST, x, root=root, out=out)

    def plan_all_gather(
        self, x: Any, *, counts: Sequence[int] | np.ndarray[Any, Any] | None = None, out: Any = None
    ) -> Plan:
        """Prepare an `all_gather` that is done again and again on the same memory."""
        return self._plan(Collective.ALL_GATHER, x, counts=counts, out=out)

    def plan_gather(
        self,
        x: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | np.ndarray[Any, Any] | None = None,
        out: Any = None,
    ) -> Plan:
        """Prepare a `gather` that is done again and again on the same memory."""
        return self._plan(Collective.GATHER, x, root=root, counts=counts, out=out)

    def plan_scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | np.ndarray[Any, Any] | None = None,
        out: Any = None,
    ) -> Plan:
        """Prepare a `scatter` that is done again and again on the same memory."""
        return self._plan(Collective.SCATTER, x, root=root, counts=counts, out=out)

    def plan_all_to_all(
        self,
        x: Any,
        *,
        send_counts: Sequence[int] | np.ndarray[Any, Any] | None = None,
        recv_counts: Sequence[int] | np.ndarray[Any, Any] | None = None,
        out: Any = None,
    ) -> Plan:
        """Prepare an `all_to_all` that is done again and again on the same memory."""
        return self._plan(
            Collective.ALL_TO_ALL, x, counts=send_counts, receive_counts=recv_counts, out=out
        )
