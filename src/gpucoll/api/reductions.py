"""Reductions over all ranks, as users call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gpucoll.api.front import Front, as_entries_read
from gpucoll.collectives import Collective

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.api.call_types import A, AsynchronousInto, BlockingInto, Counts, EitherInto, Op, X
    from gpucoll.arrays.library import AnyStream
    from gpucoll.calls.given import AnyInput, AnyResult
    from gpucoll.calls.work import Work
    from gpucoll.compression import Compression


class Reductions(Front):
    """The methods of `Communicator` that reduce over all ranks."""

    _quick_all_reduce: Callable[..., Any]
    _quick_all_reduce_list: Callable[..., Any]
    _start_all_reduce: Callable[..., Any]
    _quick_reduce: Callable[..., Any]
    _quick_reduce_scatter: Callable[..., Any]
    _start_reduce_scatter: Callable[..., Any]
    _quick_reduce_scatter_blocks: Callable[..., Any]

    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: AnyInput = None,
        **options: Unpack[BlockingInto[X]],
    ) -> X: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: AnyInput = None,
        **options: Unpack[AsynchronousInto[X]],
    ) -> Work[X]: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: AnyInput = None,
        **options: Unpack[EitherInto[X]],
    ) -> X | Work[X]: ...
    def all_reduce(
        self,
        x: AnyInput,
        op: Op = "sum",
        *,
        out: AnyInput = None,
        compression: str | Compression | None = None,
        residual: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Reduce x over all ranks; every rank gets the result.

        Parameters
        ----------
        x : array, number, or list or tuple of arrays
            The same shape and dtype on every rank. The arrays of a list or tuple are reduced in one
            fused call for each dtype, and the result is a list or tuple.
        op : str or ReduceOp
            "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor",
            ``ReduceOp.scaled_sum(factor)`` or ``ReduceOp.custom(function)``.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. For a list, `out` is a list.
        compression : str or Compression, optional
            Format in which x travels: "float16", "bfloat16", "int8_block" or "float8_block". The
            block formats have one scale for each 256 elements. For float32 (block formats: also
            half types) with op "sum" or "avg". Each element is rounded twice;
            ``docs/compression.md`` derives the bound.
        residual : array or list of arrays, optional
            With compression: the rounding error of earlier calls. It is added to x and replaced by
            the error of this call (error feedback). A float32 array with as many elements as x, on
            its device, zeros at first. The caller keeps it; each rank has its own.

        Returns
        -------
        array or number
            `out`, or a new array or number of x's kind; a `Work` with ``async_op=True``.

        Notes
        -----
        On one host, ranks are combined in the order 0 to P-1, and half types are accumulated in
        float32 and rounded once. Between hosts, with the vendors' libraries and around a ring of
        GPUs the order depends on size and placement, unless ``deterministic="order"`` was asked for
        (``docs/sharp_bits.md``). The result has the same bits on every rank and in every run.

        Cost: for small arrays one copy and one pass over P slots; for larger ones 2 n (P-1)/P.

        Examples
        --------
        >>> comm.all_reduce(np.ones(3))  # on 4 ranks
        array([4., 4., 4.])
        """
        if compression is not None or residual is not None:
            from gpucoll.calls import compressed

            how = compression, residual, async_op, timeout_s, stream
            return compressed.all_reduce(self._collectives, x, op, out, *how)
        if not async_op:
            if type(x) is list:
                target = self._list_like(x) if out is None else out
                result = self._quick_all_reduce_list(x, target, op, timeout_s)
            else:
                target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
                result = self._quick_all_reduce(x, target, op, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        elif timeout_s is stream is None:
            work = self._start_all_reduce(x, out, op)
            if work is not None:
                return work
        return self._call(Collective.ALL_REDUCE, x, async_op, timeout_s, stream, op=op, out=out)

    @overload
    def reduce(
        self, x: X, op: Op = "sum", root: int = 0, **options: Unpack[BlockingInto[X]]
    ) -> X | None: ...
    @overload
    def reduce(
        self, x: X, op: Op = "sum", root: int = 0, **options: Unpack[AsynchronousInto[X]]
    ) -> Work[X | None]: ...
    @overload
    def reduce(
        self, x: X, op: Op = "sum", root: int = 0, **options: Unpack[EitherInto[X]]
    ) -> X | Work[X | None] | None: ...
    def reduce(
        self,
        x: AnyInput,
        op: Op = "sum",
        root: int = 0,
        *,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Reduce x over all ranks; the root gets the result.

        Parameters
        ----------
        x, op
            As for `all_reduce`.
        root : int
            The rank that gets the result.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; `out` is used on the root only.

        Returns
        -------
        array, number or None
            The result on the root, None elsewhere.

        Notes
        -----
        Rounding as for `all_reduce`, with the same bits. Cost: for small arrays one copy, and only
        the root waits; for larger ones 2 n (P-1)/P.

        Examples
        --------
        >>> comm.reduce(np.ones(3), "max", root=1)  # on rank 1; None on the others
        array([1., 1., 1.])
        """
        if not async_op:
            try:
                is_root = not self.rank != root  # noqa: SIM202  (an array raises, and costs others nothing)
            except (ValueError, RuntimeError):  # raised by NumPy's and PyTorch's arrays
                is_root = self._is_root(root)
            target = out if is_root else x
            if target is None and type(x) is np.ndarray:
                target = np.empty_like(x)
            result = self._quick_reduce(x, target, op, root, timeout_s)
            if result is not None:
                return result if is_root else None
            self._raise_left()
        return self._call(
            Collective.REDUCE, x, async_op, timeout_s, stream, op=op, root=root, out=out
        )

    @overload
    def reduce_scatter(
        self, x: A, op: Op = "sum", *, counts: Counts = None, **options: Unpack[BlockingInto[A]]
    ) -> A: ...
    @overload
    def reduce_scatter(
        self, x: A, op: Op = "sum", *, counts: Counts = None, **options: Unpack[AsynchronousInto[A]]
    ) -> Work[A]: ...
    @overload
    def reduce_scatter(
        self, x: A, op: Op = "sum", *, counts: Counts = None, **options: Unpack[EitherInto[A]]
    ) -> A | Work[A]: ...
    @overload
    def reduce_scatter(
        self,
        x: Sequence[A],
        op: Op = "sum",
        *,
        counts: Counts = None,
        **options: Unpack[BlockingInto[A]],
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        x: Sequence[A],
        op: Op = "sum",
        *,
        counts: Counts = None,
        **options: Unpack[AsynchronousInto[A]],
    ) -> Work[A]: ...
    def reduce_scatter(
        self,
        x: AnyInput,
        op: Op = "sum",
        *,
        counts: Counts = None,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Reduce x over all ranks; rank r gets block r of the result.

        Parameters
        ----------
        x : array or list of arrays
            Shape (P m, ...), the same on every rank. Or a list of P arrays, the blocks, which are
            read without being copied together; they may have different numbers of rows.
        op
            As for `all_reduce`.
        counts : sequence of int or "auto", optional
            Rows of axis 0 for each rank, as the whole vector on every rank. Default: equal blocks.
            "auto" takes each rank's number of rows from its `out`.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. In place, `out` is block r of x.

        Returns
        -------
        array
            Shape (m, ...), or (counts[r], ...), or the shape of block r.

        Notes
        -----
        Rounding as for `all_reduce`. Cost: n (P-1)/P.

        Examples
        --------
        >>> comm.reduce_scatter(np.arange(4.0))  # on rank 1 of 2
        array([4., 6.])
        """
        if counts is None and not async_op:
            target = self._block_like(x) if out is None else out
            result = self._quick_reduce_scatter(x, target, op, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        if not async_op and (counts is not None or type(x) is list):
            rows = as_entries_read(counts)
            target = self._block_of(x, rows) if out is None else out
            result = self._quick_reduce_scatter_blocks(x, target, op, None, timeout_s, rows, None)
            if result is not None:
                return result
            self._raise_left()
        if async_op and counts is None and timeout_s is stream is None:
            work = self._start_reduce_scatter(x, out, op)
            if work is not None:
                return work
        return self._call(
            Collective.REDUCE_SCATTER, x, async_op, timeout_s, stream, op=op, counts=counts, out=out
        )
