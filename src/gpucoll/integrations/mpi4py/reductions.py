"""Translation of MPI's reductions: gpucoll's own, or rows that are gathered and reduced here.

The latter serve functions of the program, pairs of value and index, and long doubles, for which
gpucoll has no kernel. Rows are reduced in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpucoll.integrations.mpi4py import operations
from gpucoll.integrations.mpi4py.calls import (
    Call,
    Ranks,
    block_counts,
    checked_root,
    in_place,
    together,
)
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.operations import SUM, Op
from gpucoll.integrations.mpi4py.specifications import Finish, Simple

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.integrations.mpi4py.datatypes import Datatype
    from gpucoll.integrations.mpi4py.typing import BufSpec, BufSpecB, InPlace

Row = npt.NDArray[np.generic]


def reduce(
    comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: Op = SUM, root: int = 0
) -> Call:
    root = checked_root(comm, root)
    if comm.rank == root:
        x, out, finish, datatype = _both(sendbuf, recvbuf, op)
    else:
        sent = Simple(sendbuf, False)
        operations.check(op, sent.datatype)
        x, out, finish, datatype = sent.row(), None, None, sent.datatype
    name = operations.native_name(op, x, comm.size)
    if name is not None:
        return Call("reduce", (x, name, root), {} if out is None else {"out": out}, finish)
    if out is None:
        return Call("gather", (_bytes(x), root), {})
    rows, made = _gathered_rows(comm, x)

    def fold() -> None:
        out[...] = operations.fold(op, rows, datatype)

    return Call("gather", (_bytes(x), root), {"out": made}, together(fold, finish))


def allreduce(comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: Op = SUM) -> Call:
    x, out, finish, datatype = _both(sendbuf, recvbuf, op)
    name = operations.native_name(op, x, comm.size)
    if name is not None:
        return Call("all_reduce", (x, name), {"out": out}, finish)
    return _folded(comm, x, out, finish, datatype, op, range(comm.size))


def scan(comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: Op = SUM) -> Call:
    x, out, finish, datatype = _both(sendbuf, recvbuf, op)
    name = operations.native_name(op, x, 1)
    if name is not None:
        return Call("scan", (x, name), {"out": out}, finish)
    return _folded(comm, x, out, finish, datatype, op, range(comm.rank + 1))


def exscan(comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: Op = SUM) -> Call:
    x, out, finish, datatype = _both(sendbuf, recvbuf, op)
    name = operations.native_name(op, x, 1)
    if name is not None and comm.rank == 0:  # MPI leaves rank 0's buffer unchanged
        return Call("exclusive_scan", (x, name), {})
    if name is not None:
        return Call("exclusive_scan", (x, name), {"out": out}, finish)
    return _folded(comm, x, out, finish, datatype, op, range(comm.rank))


def reduce_scatter_block(
    comm: Ranks, sendbuf: BufSpecB | InPlace, recvbuf: BufSpec | BufSpecB, op: Op = SUM
) -> Call:
    if in_place(sendbuf):
        whole = Simple(recvbuf, True, comm.size)
        share = whole.count * whole.map.n_elements
    else:
        received, whole = Simple(recvbuf, True), Simple(sendbuf, False, comm.size)
        _check_alike(whole, received)
        share = received.count * received.map.n_elements
    return _scattered(comm, sendbuf, recvbuf, op, [share] * comm.size, whole.row(comm.size))


def reduce_scatter(
    comm: Ranks,
    sendbuf: BufSpec | InPlace,
    recvbuf: BufSpec,
    recvcounts: Sequence[int] | None = None,
    op: Op = SUM,
) -> Call:
    whole = Simple(recvbuf if in_place(sendbuf) else sendbuf, in_place(sendbuf))
    if recvcounts is None:
        if in_place(sendbuf):
            raise argument_error("Reduce_scatter in place needs recvcounts", "ERR_COUNT")
        mine = Simple(recvbuf, True).count
        counts = [int(count) for count in comm._state.comm.all_gather(np.array([mine]))]
    else:
        counts = block_counts(recvcounts, comm)
    if sum(counts) != whole.count:
        raise argument_error(
            f"mismatch in send count {whole.count} and sum(counts) {sum(counts)}", "ERR_COUNT"
        )
    if not in_place(sendbuf):
        received = Simple(recvbuf, True)
        if received.count != counts[comm.rank]:
            raise argument_error(
                f"mismatch in receive count {received.count} and counts[{comm.rank}] "
                f"{counts[comm.rank]}",
                "ERR_COUNT",
            )
    elements = [count * whole.map.n_elements for count in counts]
    return _scattered(comm, sendbuf, recvbuf, op, elements, whole.row())


def _scattered(
    comm: Ranks,
    sendbuf: BufSpec | InPlace,
    recvbuf: BufSpec,
    op: Op,
    counts: list[int],
    x: AnyArray,
) -> Call:
    received = Simple(recvbuf, True)
    operations.check(op, received.datatype)
    mine, finish = counts[comm.rank], None
    if in_place(sendbuf):
        target, unpack = received.target()
        part = np.empty(mine, x.dtype)

        def put() -> None:
            target[:mine] = part

        finish = together(put, unpack)
    else:
        part, finish = received.target()
    name = operations.native_name(op, x, comm.size)
    if name is not None:
        return Call("reduce_scatter", (x, name), {"counts": counts, "out": part}, finish)
    made = np.empty(mine * comm.size, x.dtype)

    def fold() -> None:
        rows = [made[n * mine : (n + 1) * mine] for n in range(comm.size)]
        part[...] = operations.fold(op, rows, received.datatype)

    size = x.dtype.itemsize
    named = {
        "send_counts": [count * size for count in counts],
        "recv_counts": [mine * size] * comm.size,
        "out": made.view(np.uint8),
    }
    return Call("all_to_all", (_bytes(x),), named, together(fold, finish))


def _both(
    sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: Op
) -> tuple[AnyArray, AnyArray, Finish | None, Datatype]:
    """Return the data to send, the place of the result, the function to call then, the datatype."""
    received = Simple(recvbuf, True)
    operations.check(op, received.datatype)
    out, finish = received.target()
    if in_place(sendbuf):
        return out, out, finish, received.datatype
    sent = Simple(sendbuf, False)
    _check_alike(sent, received)
    return sent.row(), out, finish, received.datatype


def _check_alike(sent: Simple, received: Simple) -> None:
    one, other = sent.map, received.map
    if sent.datatype != received.datatype and (one.dtype, one.size) != (other.dtype, other.size):
        raise argument_error(
            f"mismatch in send and receive MPI datatypes: {sent.datatype!r} and "
            f"{received.datatype!r}",
            "ERR_TYPE",
        )
    if sent.count != received.count:
        raise argument_error(
            f"mismatch in send count {sent.count} and receive count {received.count}", "ERR_COUNT"
        )


def _bytes(row: Row) -> Row:
    return np.ascontiguousarray(row).view(np.uint8)


def _gathered_rows(comm: Ranks, x: Row) -> tuple[list[Row], Row]:
    """Return one row for each rank, and the bytes that hold them all."""
    made = np.empty(len(x) * comm.size, x.dtype)
    rows = [made[n * len(x) : (n + 1) * len(x)] for n in range(comm.size)]
    return rows, made.view(np.uint8)


def _folded(
    comm: Ranks, x: Row, out: Row, finish: Finish | None, datatype: Datatype, op: Op, ranks: range
) -> Call:
    """Gather the rows of all ranks, and reduce those of some ranks here."""
    rows, made = _gathered_rows(comm, x)

    def fold() -> None:
        if len(ranks):
            out[...] = operations.fold(op, [rows[rank] for rank in ranks], datatype)

    return Call("all_gather", (_bytes(x),), {"out": made}, together(fold, finish))
