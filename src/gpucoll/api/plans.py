"""Prepared collectives, as users ask for them: one method beside each collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from gpucoll.api.front import Front
from gpucoll.calls.plan import Plan
from gpucoll.types import Collective

if TYPE_CHECKING:
    from gpucoll.api.call_types import A, Op, Rows


class Plans(Front):
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

    def plan_all_reduce(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare an `all_reduce` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.ALL_REDUCE, x, op=op, out=out)

    def plan_reduce(
        self, x: A, op: Op = "sum", root: int = 0, *, out: A | None = None
    ) -> Plan[A | None]:
        """Prepare a `reduce` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.REDUCE, x, op=op, root=root, out=out)

    def plan_reduce_scatter(
        self, x: A | Sequence[A], op: Op = "sum", *, counts: Rows = None, out: A | None = None
    ) -> Plan[A]:
        """Prepare a `reduce_scatter` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.REDUCE_SCATTER, x, op=op, counts=counts, out=out)

    def plan_scan(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare a `scan` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.SCAN, x, op=op, out=out)

    def plan_exclusive_scan(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare an `exclusive_scan` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.EXCLUSIVE_SCAN, x, op=op, out=out)

    def plan_broadcast(self, x: A | None, root: int = 0, *, out: A | None = None) -> Plan[A]:
        """Prepare a `broadcast` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.BROADCAST, x, root=root, out=out)

    @overload
    def plan_all_gather(self, x: A, *, counts: Rows = None, out: A | None = None) -> Plan[A]: ...
    @overload
    def plan_all_gather(self, x: A, *, counts: Rows = None, out: list[A]) -> Plan[list[A]]: ...
    def plan_all_gather(self, x: Any, *, counts: Rows = None, out: Any = None) -> Plan[Any]:
        """Prepare an `all_gather` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.ALL_GATHER, x, counts=counts, out=out)

    @overload
    def plan_gather(
        self, x: A, root: int = 0, *, counts: Rows = None, out: A | None = None
    ) -> Plan[A | None]: ...
    @overload
    def plan_gather(
        self, x: A, root: int = 0, *, counts: Rows = None, out: list[A]
    ) -> Plan[list[A] | None]: ...
    def plan_gather(
        self, x: Any, root: int = 0, *, counts: Rows = None, out: Any = None
    ) -> Plan[Any]:
        """Prepare a `gather` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.GATHER, x, root=root, counts=counts, out=out)

    def plan_scatter(
        self,
        x: A | Sequence[A] | None = None,
        root: int = 0,
        *,
        counts: Rows = None,
        out: A | None = None,
    ) -> Plan[A]:
        """Prepare a `scatter` that is done again and again on the same memory."""
        return self._collectives.plan(Collective.SCATTER, x, root=root, counts=counts, out=out)

    @overload
    def plan_all_to_all(
        self, x: A, *, send_counts: Rows = None, recv_counts: Rows = None, out: A | None = None
    ) -> Plan[A]: ...
    @overload
    def plan_all_to_all(
        self,
        x: Sequence[A] | A,
        *,
        send_counts: Rows = None,
        recv_counts: Rows = None,
        out: list[A],
    ) -> Plan[list[A]]: ...
    def plan_all_to_all(
        self, x: Any, *, send_counts: Rows = None, recv_counts: Rows = None, out: Any = None
    ) -> Plan[Any]:
        """Prepare an `all_to_all` that is done again and again on the same memory."""
        return self._collectives.plan(
            Collective.ALL_TO_ALL, x, counts=send_counts, receive_counts=recv_counts, out=out
        )
