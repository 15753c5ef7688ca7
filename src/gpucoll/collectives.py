"""The collectives on arrays, as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from gpucoll.compressing import Compressing
from gpucoll.compression import Compression
from gpucoll.types import Collective, ReduceOp

Op: TypeAlias = str | ReduceOp
Counts: TypeAlias = Sequence[int] | np.ndarray[Any, Any] | Literal["auto"] | None


class ArrayCollectives(Compressing):
    """What `Communicator` can do with arrays.

    Every method takes these, described here once:

    out : array, optional
        Where the result goes: an array of x's library, dtype and device with as many elements as
        the result, in whatever shape. Default: a new array. Nothing else is ever written. It may be
        x itself or, where x is one block of the result or the result one block of x, exactly that
        block (in place); any other overlap is refused.
    async_op : bool
        Return a `Work` at once; input and output belong to it until it is done.
    timeout_s : float, optional
        Deadline of this call, in seconds. Default: the communicator's. For GPU arrays it counts
        from the call's start on the stream.
    stream : stream, optional
        For GPU arrays: where to run instead of the current stream of the arrays' library. A stream
        of CuPy, PyTorch or Numba, its handle, or anything with ``__cuda_stream__``.

    and raises:

    ArgumentError, ArgumentTypeError
        An argument cannot serve; nothing was sent.
    MismatchError
        The ranks did not make the same call.
    DeadlineError, PeerLostError
        A rank did not come in time, or is gone.
    BackendUnavailableError
        No backend of this communicator moves such arrays; `Communicator.describe` says why.

    A call on host arrays returns when it is done. One on GPU arrays is put on a stream and returns:
    what comes on that stream afterwards sees the result. What goes wrong there is raised later, by
    the next call, and for certain by `Work.synchronize`, `Communicator.check` and
    `Communicator.close`; nothing in an output may be trusted before.

    P is the number of ranks, r this rank, n the bytes of x. Costs are bytes that this rank moves
    through shared memory; arrays of `empty` are read where they lie instead.
    """

    # --- reductions -------------------------------------------------------------------------------

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
            The same shape and dtype on every rank. A list is reduced in one fused call for each
            dtype in it, and gives a list.
        op : str or ReduceOp
            "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor",
            ``ReduceOp.scaled_sum(factor)`` or ``ReduceOp.custom(function)``.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. For a list, `out` is a list.
        compression : str or Compression, optional
            What travels instead of x: "float16", "bfloat16", or, in blocks of 256 elements with a
            scale each, "int8_block" or "float8_block". For float32 (the block formats also take
            half types), op "sum" or "avg", on the host. The result is rounded twice, by the bound
            that ``docs/compression.md`` derives.
        residual : array or list of arrays, optional
            With compression: what earlier calls have lost, added to x and replaced by what this one
            loses (error feedback). float32, as many elements as x, zeros at first, kept by the
            caller; each rank has its own.

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
            return self._all_reduce_compressed(
                x, op, out, compression, residual, async_op, timeout_s
            )
        if not async_op and timeout_s is None:
            if type(x) is list:
                result = self._quick_list(x, self._list_like(x) if out is None else out, op)
            else:
                target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
                result = self._quick_all_reduce(x, target, op, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.ALL_REDUCE,
            x,
            op=op,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

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
        if not async_op and timeout_s is None:
            is_root = self.rank == root
            target = out if is_root else x
            if target is None and type(x) is np.ndarray:
                target = np.empty_like(x)
            result = self._quick_reduce(x, target, op, root)
            if result is not None:
                return result if is_root else None
            self._raise_quick()
        return self._call(
            Collective.REDUCE,
            x,
            op=op,
            root=root,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

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
        x : array
            Shape (P m, ...): the same on every rank.
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
            Shape (m, ...), or (counts[r], ...).

        Notes
        -----
        Rounding as for `all_reduce`. Cost: n (P-1)/P, once.

        Examples
        --------
        >>> comm.reduce_scatter(np.arange(4.0))  # on rank 1 of 2
        array([4., 6.])
        """
        if counts is None and not async_op and timeout_s is None:
            target = self._block_like(x) if out is None else out
            result = self._quick_reduce_scatter(x, target, op, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.REDUCE_SCATTER,
            x,
            op=op,
            counts=counts,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def scan(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce x over the ranks up to this one, it included.

        Parameters
        ----------
        x, op
            As for `all_reduce`; "avg" divides by the ranks so far.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            x of rank 0 op ... op x of rank r.

        Notes
        -----
        Rounding as for `all_reduce`. Cost: as `all_reduce`, whatever the number of ranks. Small
        arrays do not synchronise: a rank waits only for those before it, and a mismatch with a
        later one is found within fifteen calls.

        Examples
        --------
        >>> comm.scan(comm.rank + 1)  # on ranks 0, 1, 2: 1, 3, 6
        """
        if not async_op and timeout_s is None:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_scan(x, target, op, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.SCAN,
            x,
            op=op,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def exclusive_scan(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce x over the ranks before this one; rank 0 gets the op's identity.

        Parameters
        ----------
        x, op
            As for `all_reduce`, but for "avg": the mean of nothing is undefined. A custom op must
            have an identity.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            x of rank 0 op ... op x of rank r-1.

        Notes
        -----
        The identity of min and max is the greatest and the least value of the dtype (infinity where
        it has one). Rounding and cost as for `scan`.

        Examples
        --------
        >>> first_row = comm.exclusive_scan(n_rows)  # where this rank's rows begin
        """
        if not async_op and timeout_s is None:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_exclusive_scan(x, target, op, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.EXCLUSIVE_SCAN,
            x,
            op=op,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    # --- movements --------------------------------------------------------------------------------

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Give every rank the root's x.

        Parameters
        ----------
        x : array, number, or list or tuple of arrays
            On the root, the data; on the others a template of the same shape and dtype, or None
            where `out` is given.
        root : int
            Whose x.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`. ``out=x`` on every rank is the usual in-place broadcast.

        Returns
        -------
        array or number
            The root's x, on every rank.

        Notes
        -----
        Small arrays do not synchronise: the root goes on before everybody has read. A mismatch is
        then found within fifteen calls; one in the very last calls before `close` may stay unseen
        (end with a `barrier` where that matters). Cost: n once on the root and once on each reader.

        Examples
        --------
        >>> comm.broadcast(np.full(2, comm.rank), root=1)
        array([1, 1])
        """
        if not async_op and timeout_s is None:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_broadcast(x, target, None, root)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.BROADCAST,
            x,
            root=root,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def all_gather(
        self,
        x: Any,
        *,
        counts: Counts = None,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Put the x of all ranks side by side along axis 0; every rank gets the whole.

        Parameters
        ----------
        x : array or number
            Shape (m, ...), the same on every rank; with `counts`, (counts[r], ...).
        counts : sequence of int or "auto", optional
            Rows of axis 0 per rank, the whole vector on every rank; "auto" exchanges them first.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; in place x is block r of it.

        Returns
        -------
        array
            Shape (P m, ...), or (sum(counts), ...); (P,) for a number or a 0-d x.

        Notes
        -----
        Cost: n once into shared memory, the others' blocks once out of it.

        Examples
        --------
        >>> comm.all_gather(np.array([comm.rank]))  # on 3 ranks
        array([0, 1, 2])
        """
        if counts is None and not async_op and timeout_s is None:
            target = self._whole_like(x) if out is None else out
            result = self._quick_all_gather(x, target, None, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.ALL_GATHER,
            x,
            counts=counts,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        counts: Counts = None,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Put the x of all ranks side by side along axis 0; the root gets the whole.

        Parameters
        ----------
        x, counts
            As for `all_gather`.
        root : int
            Who gets it.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; `out` counts on the root only.

        Returns
        -------
        array or None
            As for `all_gather` on the root, None elsewhere.

        Notes
        -----
        Cost: n once on each sender; small arrays do not make the senders wait.

        Examples
        --------
        >>> comm.gather(np.array([comm.rank]))  # on rank 0 of 3; None on the others
        array([0, 1, 2])
        """
        if counts is None and not async_op and timeout_s is None:
            is_root = self.rank == root
            target = out if is_root else x
            if target is None:
                target = self._whole_like(x)
            result = self._quick_gather(x, target, None, root)
            if result is not None:
                return result if is_root else None
            self._raise_quick()
        return self._call(
            Collective.GATHER,
            x,
            root=root,
            counts=counts,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Counts = None,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Give rank r block r of the root's x.

        Parameters
        ----------
        x : array, optional
            On the root, shape (P m, ...) or (sum(counts), ...). On the others a template of it, or
            nothing where `out` is given (with no rows of its own, `out` has the others' row shape).
        root : int
            Whose x.
        counts : sequence of int or "auto", optional
            Rows of axis 0 per rank, the whole vector on every rank; "auto" takes each rank's from
            its `out`.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; in place it is block r of x, on the root.

        Returns
        -------
        array
            Shape (m, ...), or (counts[r], ...).

        Notes
        -----
        Small arrays do not synchronise, see `broadcast`. Cost: n once on the root, n/P on the rest.

        Examples
        --------
        >>> rows = comm.scatter(x if comm.rank == 0 else None, out=np.empty((5, 3)))
        """
        is_root = self.rank == root
        plain = counts is None and (is_root or self._is_template(x, out))
        if plain and not async_op and timeout_s is None:
            target = self._block_like(x) if out is None else out
            mine = x if is_root else target
            result = self._quick_scatter(mine, target, None, root)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.SCATTER,
            x,
            root=root,
            counts=counts,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )

    def all_to_all(
        self,
        x: Any,
        *,
        send_counts: Counts = None,
        recv_counts: Counts = None,
        out: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Give every rank s this rank's block s, and put the blocks from all ranks side by side.

        Parameters
        ----------
        x : array
            Shape (P m, ...): block s goes to rank s.
        send_counts : sequence of int, optional
            Rows of axis 0 to each rank. Default: equal blocks.
        recv_counts : sequence of int or "auto", optional
            Rows from each rank; "auto" (also the default with `send_counts`) asks the others first.
        out, async_op, timeout_s, stream
            See `ArrayCollectives`; in place it is x, with counts only where both are the same.

        Returns
        -------
        array
            Shape (P m, ...), or (sum(recv_counts), ...): block s is block r of rank s.

        Notes
        -----
        Cost: n (P-1)/P into shared memory and as much out of it.

        Examples
        --------
        >>> comm.all_to_all(np.arange(2) + 10 * comm.rank)  # on rank 1 of 2
        array([ 1, 11])
        """
        plain = send_counts is None and recv_counts is None
        if plain and not async_op and timeout_s is None:
            target = np.empty_like(x) if out is None and type(x) is np.ndarray else out
            result = self._quick_all_to_all(x, target, None, None)
            if result is not None:
                return result
            self._raise_quick()
        return self._call(
            Collective.ALL_TO_ALL,
            x,
            counts=send_counts,
            receive_counts=recv_counts,
            out=out,
            async_op=async_op,
            timeout_s=timeout_s,
            stream=stream,
        )
