"""Collectives that pass arrays, or blocks of them, to other ranks, as users call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

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
        X,
    )
    from gpucoll.arrays.library import AnyStream
    from gpucoll.calls.given import AnyInput, AnyResult
    from gpucoll.calls.work import Work


class Movements(Front):
    """The methods of `Communicator` that pass arrays to other ranks."""

    _quick_broadcast: Callable[..., Any]
    _start_broadcast: Callable[..., Any]
    _quick_scatter: Callable[..., Any]
    _quick_scatter_blocks: Callable[..., Any]
    _quick_all_to_all: Callable[..., Any]
    _start_all_to_all: Callable[..., Any]
    _quick_all_to_all_blocks: Callable[..., Any]

    @overload
    def broadcast(self, x: X | None, root: int = 0, **options: Unpack[BlockingInto[X]]) -> X: ...
    @overload
    def broadcast(
        self, x: X | None, root: int = 0, **options: Unpack[AsynchronousInto[X]]
    ) -> Work[X]: ...
    @overload
    def broadcast(
        self, x: X | None, root: int = 0, **options: Unpack[EitherInto[X]]
    ) -> X | Work[X]: ...
    def broadcast(
        self,
        x: AnyInput,
        root: int = 0,
        *,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Give every rank the root's x.

        Parameters
        ----------
        x : array, number, or list or tuple of arrays
            On the root, the data. On the others, a template of the same shape and dtype, or None if
            `out` is given.
        root : int
            The rank whose x is sent.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. ``out=x`` on every rank is the usual in-place broadcast.

        Returns
        -------
        array or number
            The root's x, on every rank.

        Notes
        -----
        Small arrays do not synchronise: the root continues before all ranks have read. A mismatch
        is then found within twelve calls, and breaks the communicator. A mismatch in the last calls
        before `close` may go unnoticed: end with a `barrier` if that matters. Cost: n on the root
        and on each reader.

        Examples
        --------
        >>> comm.broadcast(np.full(2, comm.rank), root=1)
        array([1, 1])
        """
        if not async_op:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_broadcast(x, target, None, root, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        elif timeout_s is stream is None:
            work = self._start_broadcast(x, out, None, root)
            if work is not None:
                return work
        return self._call(Collective.BROADCAST, x, async_op, timeout_s, stream, root=root, out=out)

    @overload
    def scatter(
        self,
        x: A | None = None,
        root: int = 0,
        *,
        counts: Counts = None,
        **options: Unpack[BlockingInto[A]],
    ) -> A: ...
    @overload
    def scatter(
        self,
        x: A | None = None,
        root: int = 0,
        *,
        counts: Counts = None,
        **options: Unpack[AsynchronousInto[A]],
    ) -> Work[A]: ...
    @overload
    def scatter(
        self,
        x: A | None = None,
        root: int = 0,
        *,
        counts: Counts = None,
        **options: Unpack[EitherInto[A]],
    ) -> A | Work[A]: ...
    @overload
    def scatter(
        self,
        x: Sequence[A],
        root: int = 0,
        *,
        counts: Counts = None,
        **options: Unpack[BlockingInto[A]],
    ) -> A: ...
    @overload
    def scatter(
        self,
        x: Sequence[A],
        root: int = 0,
        *,
        counts: Counts = None,
        **options: Unpack[AsynchronousInto[A]],
    ) -> Work[A]: ...
    def scatter(
        self,
        x: AnyInput = None,
        root: int = 0,
        *,
        counts: Counts = None,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Give rank r block r of the root's x.

        Parameters
        ----------
        x : array or list of arrays, optional
            On the root, shape (P m, ...) or (sum(counts), ...), or a list of P arrays, the blocks,
            which are read without being copied together. On the others a template, or nothing if
            `out` is given. (An `out` without rows must still have the other ranks' row shape.)
        root : int
            The rank whose x is scattered.
        counts : sequence of int or "auto", optional
            Rows of axis 0 for each rank, as the whole vector on every rank, even if the root's list
            has blocks of different sizes. "auto" takes each rank's number of rows from its `out`.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. In place, `out` is block r of x, on the root.

        Returns
        -------
        array
            Shape (m, ...), or (counts[r], ...).

        Notes
        -----
        Small arrays do not synchronise, see `broadcast`. Cost: n on the root, n/P on the others.

        Examples
        --------
        >>> rows = comm.scatter(x if comm.rank == 0 else None, out=np.empty((5, 3)))
        """
        try:
            is_root = not self.rank != root  # noqa: SIM202  (an array raises, and costs others nothing)
        except (ValueError, RuntimeError):  # raised by NumPy's and PyTorch's arrays
            is_root = self._is_root(root)
        plain = counts is None and (is_root or self._is_template(x, out))
        if plain and not async_op:
            target = self._block_like(x) if out is None else out
            mine = x if is_root else target
            result = self._quick_scatter(mine, target, None, root, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        if not async_op and (counts is not None or type(x) is list):
            rows = as_entries_read(counts)
            target = self._block_of(x, rows) if out is None else out
            mine = x if is_root else target if x is None else None
            result = self._quick_scatter_blocks(mine, target, None, root, timeout_s, rows, None)
            if result is not None:
                return result
            self._raise_left()
        return self._call(
            Collective.SCATTER, x, async_op, timeout_s, stream, root=root, counts=counts, out=out
        )

    @overload
    def all_to_all(
        self,
        x: A,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        **options: Unpack[BlockingInto[A]],
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        x: A,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        **options: Unpack[AsynchronousInto[A]],
    ) -> Work[A]: ...
    @overload
    def all_to_all(
        self,
        x: A,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        **options: Unpack[EitherInto[A]],
    ) -> A | Work[A]: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[A],
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        out: A,
        **options: Unpack[Blocking],
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[A] | A,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        out: list[A],
        **options: Unpack[Blocking],
    ) -> list[A]: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[A] | A,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        out: list[A],
        **options: Unpack[Asynchronous],
    ) -> Work[list[A]]: ...
    @overload
    def all_to_all(
        self,
        x: list[A],
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        **options: Unpack[Blocking],
    ) -> list[A]: ...
    @overload
    def all_to_all(
        self,
        x: list[A],
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        **options: Unpack[Asynchronous],
    ) -> Work[list[A]]: ...
    def all_to_all(
        self,
        x: AnyInput,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        out: AnyInput = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Give every rank s this rank's block s, and put the blocks from all ranks side by side.

        Parameters
        ----------
        x : array or list of arrays
            Shape (P m, ...): block s goes to rank s. Or a list of P arrays, the blocks, which are
            read without being copied together; they may have different numbers of rows.
        send_counts : sequence of int, optional
            Rows of axis 0 to send to each rank. Default: equal blocks.
        recv_counts : sequence of int or "auto", optional
            Rows to receive from each rank. "auto", the default with `send_counts`, first obtains
            them from the other ranks.
        out : array or list of arrays, optional
            See `ArrayCollectives`. In place, `out` is x; with counts, only if `send_counts` and
            `recv_counts` are equal. A list of P arrays gets a block from each rank.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or list of arrays
            Shape (P m, ...), or (sum(recv_counts), ...): block s is block r of rank s. A list if x
            is a list and `out` is not given.

        Notes
        -----
        A call with a list counts as a call with counts, the rows of its blocks: the other ranks
        must pass lists or counts, too. Cost: n (P-1)/P into shared memory and as much out of it.

        Examples
        --------
        >>> comm.all_to_all(np.arange(2) + 10 * comm.rank)  # on rank 1 of 2
        array([ 1, 11])
        """
        plain = send_counts is None and recv_counts is None
        if plain and not async_op:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_all_to_all(x, target, None, None, timeout_s)
            if result is not None:
                return result
            self._raise_left()
        if not async_op and (not plain or type(x) is list or type(out) is list):
            sent, received = as_entries_read(send_counts), as_entries_read(recv_counts)
            target = self._rows_like(x, received) if out is None else out
            result = self._quick_all_to_all_blocks(x, target, None, None, timeout_s, sent, received)
            if result is not None:
                return result
            self._raise_left()
        if async_op and plain and timeout_s is stream is None:
            work = self._start_all_to_all(x, out)
            if work is not None:
                return work
        return self._call(
            Collective.ALL_TO_ALL,
            x,
            async_op,
            timeout_s,
            stream,
            counts=send_counts,
            receive_counts=recv_counts,
            out=out,
        )
