"""Reductions over all ranks, as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gpucoll.api.front import Front, as_entries_read
from gpucoll.compression import compressed
from gpucoll.types import Collective

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.api.call_types import A, AsynchronousInto, BlockingInto, Counts, EitherInto, Op, X
    from gpucoll.calls.work import Work
    from gpucoll.compression.options import Compression


class Reductions(Front):
    """What `Communicator` can reduce over all ranks."""

    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: Any = None,
        **options: Unpack[BlockingInto[X]],
    ) -> X: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: Any = None,
        **options: Unpack[AsynchronousInto[X]],
    ) -> Work[X]: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: Op = "sum",
        *,
        compression: str | Compression | None = None,
        residual: Any = None,
        **options: Unpack[EitherInto[X]],
    ) -> X | Work[X]: ...
    def all_reduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        compression: str | Compression | None = None,
        residual: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce x over all ranks; every rank gets the result.

        Parameters
        ----------
        x : array, number, or list or tuple of arrays
            The same shape and dtype on every rank. A list or tuple is reduced in one fused call for
            each dtype in it, and gives one.
        op : str or ReduceOp
            "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor",
            ``ReduceOp.scaled_sum(factor)`` or ``ReduceOp.custom(function)``.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. For a list, `out` is a list.
        compression : str or Compression, optional
            What travels instead of x: "float16", "bfloat16", or, in blocks of 256 elements with a
            scale each, "int8_block" or "float8_block". For float32 (the block formats also take
            half types), op "sum" or "avg". The result is rounded twice, by the bound that
            ``docs/compression.md`` derives.
        residual : array or list of arrays, optional
            With compression: what earlier calls have lost, added to x and replaced by what this one
            loses (error feedback). float32, as many elements as x, on its device, zeros at first,
            kept by the caller; each rank has its own.

        Returns
        -------
        array or number
            `out`, or a new array or number of x's kind; a `Work` with ``async_op=True``.

        Notes
        -----
        Ranks are combined in order 0 to P-1, so the bits are the same on every rank, run after run,
        whatever the size and placement. Half types are accumulated in float32 and rounded once.

        Cost: small arrays one copy and one pass over P slots; larger ones 2 n (P-1)/P.

        Examples
        --------
        >>> comm.all_reduce(np.ones(3))  # on 4 ranks
        array([4., 4., 4.])
        """
        if compression is not None or residual is not None:
            how = compression, residual, async_op, timeout_s, stream
            return compressed.all_reduce(self._collectives, x, op, out, *how)
        if not async_op:
            if type(x) is list:
                target = self._list_like(x) if out is None else out
                result = self._quick_list(x, target, op, timeout_s)
            else:
                target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
                result = self._quick_all_reduce(x, target, op, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
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
        x: Any,
        op: Op = "sum",
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce x over all ranks; the root gets the result.

        Parameters
        ----------
        x, op
            As for `all_reduce`.
        root : int
            Who gets it.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; `out` counts on the root only.

        Returns
        -------
        array, number or None
            The result on the root, None elsewhere.

        Notes
        -----
        Rounding as for `all_reduce`: the same bits. Cost: small arrays one copy, and only the root
        waits; larger ones 2 n (P-1)/P.

        Examples
        --------
        >>> comm.reduce(np.ones(3), "max", root=1)  # on rank 1; None on the others
        array([1., 1., 1.])
        """
        if not async_op:
            try:
                is_root = not self.rank != root  # noqa: SIM202  (an array raises, and costs others nothing)
            except (ValueError, RuntimeError):  # NumPy's, and PyTorch's
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
        x: Any,
        op: Op = "sum",
        *,
        counts: Counts = None,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce x over all ranks; rank r gets block r of the result.

        Parameters
        ----------
        x : array or list of arrays
            Shape (P m, ...): the same on every rank. Or a list of P arrays, the blocks, which are
            read where they lie; they may have different numbers of rows.
        op
            As for `all_reduce`.
        counts : sequence of int or "auto", optional
            Rows of axis 0 per rank, the whole vector on every rank. Default: equal blocks. "auto"
            takes each rank's from its `out`.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; in place it is block r of x.

        Returns
        -------
        array
            Shape (m, ...), or (counts[r], ...), or that of block r.

        Notes
        -----
        Rounding as for `all_reduce`. Cost: n (P-1)/P, once.

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
        return self._call(
            Collective.REDUCE_SCATTER, x, async_op, timeout_s, stream, op=op, counts=counts, out=out
        )
