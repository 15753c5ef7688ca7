"""Collectives that concatenate the arrays of all ranks, as users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from gpucoll.api.front import Front, as_entries_read
from gpucoll.collectives import Collective

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.api.call_types import (
        A,
        Asynchronous,
        AsynchronousInto,
        Blocking,
        BlockingInto,
        Counts,
        EitherInto,
        Number,
        Numbers,
    )
    from gpucoll.arrays.library import AnyStream
    from gpucoll.calls.given import AnyInput, AnyResult
    from gpucoll.calls.work import Work


class Gathering(Front):
    """The methods of `Communicator` that concatenate the arrays of all ranks."""

    _quick_all_gather: Callable[..., Any]
    _start_all_gather: Callable[..., Any]
    _quick_all_gather_blocks: Callable[..., Any]
    _quick_gather: Callable[..., Any]
    _quick_gather_blocks: Callable[..., Any]

    @overload
    def all_gather(
        self, x: A, *, counts: Counts = None, **options: Unpack[BlockingInto[A]]
    ) -> A: ...
    @overload
    def all_gather(
        self, x: A, *, counts: Counts = None, **options: Unpack[AsynchronousInto[A]]
    ) -> Work[A]: ...
    @overload
    def all_gather(
        self, x: A, *, counts: Counts = None, **options: Unpack[EitherInto[A]]
    ) -> A | Work[A]: ...
    @overload
    def all_gather(
        self, x: A, *, counts: Counts = None, out: list[A], **options: Unpack[Blocking]
    ) -> list[A]: ...
    @overload
    def all_gather(
        self, x: A, *, counts: Counts = None, out: list[A], **options: Unpack[Asynchronous]
    ) -> Work[list[A]]: ...
    @overload
    def all_gather(self, x: Number, **options: Unpack[Blocking]) -> Numbers: ...
    @overload
    def all_gather(self, x: Number, **options: Unpack[Asynchronous]) -> Work[Numbers]: ...
    def all_gather(
        self,
        x: AnyInput,
        *,
        counts: Counts = None,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Concatenate the x of all ranks along axis 0; every rank gets the result.

        Parameters
        ----------
        x : array or number
            Shape (m, ...), the same on every rank; with `counts`, (counts[r], ...).
        counts : sequence of int or "auto", optional
            Rows of axis 0 for each rank, as the whole vector on every rank; "auto" exchanges them
            first.
        out : array or list of arrays, optional
            See `ArrayCollectives`. In place, x is block r of `out`. A list of P arrays gets one
            block each, without an intermediate copy; blocks of different sizes need no `counts` if
            every rank passes a list.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array
            Shape (P m, ...), or (sum(counts), ...); (P,) for a number or a 0-d x. `out` if given.

        Notes
        -----
        Cost: n into shared memory, and the other ranks' blocks out of it.

        Examples
        --------
        >>> comm.all_gather(np.array([comm.rank]))  # on 3 ranks
        array([0, 1, 2])
        """
        if counts is None and not async_op:
            target = self._whole_like(x) if out is None else out
            result = self._quick_all_gather(x, target, None, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        if not async_op and (counts is not None or type(out) is list):
            rows = as_entries_read(counts)
            target = self._rows_like(x, rows) if out is None else out
            result = self._quick_all_gather_blocks(x, target, None, None, timeout_s, rows, None)
            if result is not None:
                return result
            self._raise_left()
        if async_op and counts is None and timeout_s is stream is None:
            work = self._start_all_gather(x, out)
            if work is not None:
                return work
        return self._call(
            Collective.ALL_GATHER, x, async_op, timeout_s, stream, counts=counts, out=out
        )

    @overload
    def gather(
        self, x: A, root: int = 0, *, counts: Counts = None, **options: Unpack[BlockingInto[A]]
    ) -> A | None: ...
    @overload
    def gather(
        self, x: A, root: int = 0, *, counts: Counts = None, **options: Unpack[AsynchronousInto[A]]
    ) -> Work[A | None]: ...
    @overload
    def gather(
        self, x: A, root: int = 0, *, counts: Counts = None, **options: Unpack[EitherInto[A]]
    ) -> A | Work[A | None] | None: ...
    @overload
    def gather(
        self,
        x: A,
        root: int = 0,
        *,
        counts: Counts = None,
        out: list[A],
        **options: Unpack[Blocking],
    ) -> list[A] | None: ...
    @overload
    def gather(
        self,
        x: A,
        root: int = 0,
        *,
        counts: Counts = None,
        out: list[A],
        **options: Unpack[Asynchronous],
    ) -> Work[list[A] | None]: ...
    @overload
    def gather(self, x: Number, root: int = 0, **options: Unpack[Blocking]) -> Numbers | None: ...
    @overload
    def gather(
        self, x: Number, root: int = 0, **options: Unpack[Asynchronous]
    ) -> Work[Numbers | None]: ...
    def gather(
        self,
        x: AnyInput,
        root: int = 0,
        *,
        counts: Counts = None,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Concatenate the x of all ranks along axis 0; the root gets the result.

        Parameters
        ----------
        x, counts
            As for `all_gather`.
        root : int
            The rank that gets the result.
        out, async_op, timeout_s, stream
            As for `all_gather`; `out` is used on the root only. A list of blocks of different sizes
            needs `counts` on every rank, because the other ranks do not know the sizes.

        Returns
        -------
        array or None
            As for `all_gather` on the root, None elsewhere.

        Notes
        -----
        Cost: n on each sender. With small arrays the senders do not wait.

        Examples
        --------
        >>> comm.gather(np.array([comm.rank]))  # on rank 0 of 3; None on the others
        array([0, 1, 2])
        """
        try:
            is_root = not self.rank != root  # noqa: SIM202  (an array raises, and costs others nothing)
        except (ValueError, RuntimeError):  # raised by NumPy's and PyTorch's arrays
            is_root = self._is_root(root)
        if counts is None and not async_op:
            target = out if is_root else x
            if target is None:
                target = self._whole_like(x)
            result = self._quick_gather(x, target, None, root, timeout_s)
            if result is not None:
                return result if is_root else None
            self._raise_left()
        if not async_op and (counts is not None or type(out) is list):
            rows = as_entries_read(counts)
            target = out if is_root else x
            if target is None:
                target = self._rows_like(x, rows)
            result = self._quick_gather_blocks(x, target, None, root, timeout_s, rows, None)
            if result is not None:
                return result if is_root else None
            self._raise_left()
        return self._call(
            Collective.GATHER, x, async_op, timeout_s, stream, root=root, counts=counts, out=out
        )
