"""Prepared collectives, as users ask for them: one method for each collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from gpucoll.api.front import Front
from gpucoll.calls.plan import Plan
from gpucoll.collectives import Collective

if TYPE_CHECKING:
    from gpucoll.api.call_types import A, Op, Rows
    from gpucoll.calls.given import AnyInput, AnyResult


class Plans(Front):
    """The methods of `Communicator` that prepare a collective to run repeatedly on the same memory.

    Arguments are checked and everything is looked up once. ``plan_NAME`` accepts the arguments of
    ``NAME``, except `async_op`, `timeout_s` and ``counts="auto"``. x and `out` must be
    C-contiguous; every call reads x and writes `out`. Without `out`, one new array is made, which
    every call writes.

    Other ranks may make the same call as a plan or as an ordinary call.

    >>> step = comm.plan_all_reduce(gradient, "avg", out=gradient)
    >>> for batch in batches:
    ...     compute(batch, gradient)
    ...     step()
    """

    def plan_all_reduce(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare an `all_reduce` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.ALL_REDUCE, x, op=op, out=out)

    def plan_reduce(
        self, x: A, op: Op = "sum", root: int = 0, *, out: A | None = None
    ) -> Plan[A | None]:
        """Prepare a `reduce` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.REDUCE, x, op=op, root=root, out=out)

    def plan_reduce_scatter(
        self, x: A | Sequence[A], op: Op = "sum", *, counts: Rows = None, out: A | None = None
    ) -> Plan[A]:
        """Prepare a `reduce_scatter` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.REDUCE_SCATTER, x, op=op, counts=counts, out=out)

    def plan_scan(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare a `scan` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.SCAN, x, op=op, out=out)

    def plan_exclusive_scan(self, x: A, op: Op = "sum", *, out: A | None = None) -> Plan[A]:
        """Prepare an `exclusive_scan` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.EXCLUSIVE_SCAN, x, op=op, out=out)

    def plan_broadcast(self, x: A | None, root: int = 0, *, out: A | None = None) -> Plan[A]:
        """Prepare a `broadcast` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.BROADCAST, x, root=root, out=out)

    @overload
    def plan_all_gather(self, x: A, *, counts: Rows = None, out: A | None = None) -> Plan[A]: ...
    @overload
    def plan_all_gather(self, x: A, *, counts: Rows = None, out: list[A]) -> Plan[list[A]]: ...
    def plan_all_gather(
        self, x: AnyInput, *, counts: Rows = None, out: AnyInput = None
    ) -> Plan[AnyResult]:
        """Prepare an `all_gather` that runs repeatedly on the same memory."""
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
        self, x: AnyInput, root: int = 0, *, counts: Rows = None, out: AnyInput = None
    ) -> Plan[AnyResult]:
        """Prepare a `gather` that runs repeatedly on the same memory."""
        return self._collectives.plan(Collective.GATHER, x, root=root, counts=counts, out=out)

    def plan_scatter(
        self,
        x: A | Sequence[A] | None = None,
        root: int = 0,
        *,
        counts: Rows = None,
        out: A | None = None,
    ) -> Plan[A]:
        """Prepare a `scatter` that runs repeatedly on the same memory."""
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
        self,
        x: AnyInput,
        *,
        send_counts: Rows = None,
        recv_counts: Rows = None,
        out: AnyInput = None,
    ) -> Plan[AnyResult]:
        """Prepare an `all_to_all` that runs repeatedly on the same memory."""
        return self._collectives.plan(
            Collective.ALL_TO_ALL, x, counts=send_counts, receive_counts=recv_counts, out=out
        )
