"""Reductions over the ranks up to this one, as users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gpucoll.api.front import Front
from gpucoll.collectives import Collective

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.api.call_types import AsynchronousInto, BlockingInto, EitherInto, M, Op
    from gpucoll.arrays.library import AnyStream
    from gpucoll.calls.given import AnyInput, AnyResult
    from gpucoll.calls.work import Work


class Scans(Front):
    """The methods of `Communicator` that reduce over the ranks up to this one."""

    _quick_scan: Callable[..., Any]
    _start_scan: Callable[..., Any]
    _quick_exclusive_scan: Callable[..., Any]
    _start_exclusive_scan: Callable[..., Any]

    @overload
    def scan(self, x: M, op: Op = "sum", **options: Unpack[BlockingInto[M]]) -> M: ...
    @overload
    def scan(self, x: M, op: Op = "sum", **options: Unpack[AsynchronousInto[M]]) -> Work[M]: ...
    @overload
    def scan(self, x: M, op: Op = "sum", **options: Unpack[EitherInto[M]]) -> M | Work[M]: ...
    def scan(
        self,
        x: AnyInput,
        op: Op = "sum",
        *,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Reduce x over the ranks up to and including this one.

        Parameters
        ----------
        x, op
            As for `all_reduce`; "avg" divides by the number of ranks up to this one.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            x of rank 0 op ... op x of rank r.

        Notes
        -----
        Rounding as for `all_reduce`. The cost is that of `all_reduce`, whatever the number of
        ranks. Small arrays do not synchronise: a rank waits only for those before it. A mismatch
        with a later rank is found within twelve calls, and breaks the communicator.

        Examples
        --------
        >>> comm.scan(comm.rank + 1)  # on ranks 0, 1, 2: 1, 3, 6
        """
        if not async_op:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_scan(x, target, op, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        elif timeout_s is stream is None:
            work = self._start_scan(x, out, op)
            if work is not None:
                return work
        return self._call(Collective.SCAN, x, async_op, timeout_s, stream, op=op, out=out)

    @overload
    def exclusive_scan(self, x: M, op: Op = "sum", **options: Unpack[BlockingInto[M]]) -> M: ...
    @overload
    def exclusive_scan(
        self, x: M, op: Op = "sum", **options: Unpack[AsynchronousInto[M]]
    ) -> Work[M]: ...
    @overload
    def exclusive_scan(
        self, x: M, op: Op = "sum", **options: Unpack[EitherInto[M]]
    ) -> M | Work[M]: ...
    def exclusive_scan(
        self,
        x: AnyInput,
        op: Op = "sum",
        *,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Reduce x over the ranks before this one; rank 0 gets the op's identity.

        Parameters
        ----------
        x, op
            As for `all_reduce`, except "avg": the mean of no values is undefined. A custom op needs
            an identity.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            x of rank 0 op ... op x of rank r-1.

        Notes
        -----
        The identity of min is the greatest value of the dtype, that of max the least (infinities if
        the dtype has them). Rounding and cost as for `scan`.

        Examples
        --------
        >>> first_row = comm.exclusive_scan(n_rows)  # the index of this rank's first row
        """
        if not async_op:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_exclusive_scan(x, target, op, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        elif timeout_s is stream is None:
            work = self._start_exclusive_scan(x, out, op)
            if work is not None:
                return work
        return self._call(Collective.EXCLUSIVE_SCAN, x, async_op, timeout_s, stream, op=op, out=out)
