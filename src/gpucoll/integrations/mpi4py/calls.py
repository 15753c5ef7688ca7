"""Translation of MPI's collectives: each is one call of gpucoll, and what follows it.

Each function reads the specifications of one collective. MPI compares only counts, so arrays are
passed as rows of elements. Data with gaps is packed before the call and unpacked after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gpucoll.integrations.mpi4py.constants import IN_PLACE
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.specifications import Finish, Simple, Typed, Vector, numbers

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.state import State
    from gpucoll.integrations.mpi4py.typing import BufSpec, BufSpecB, BufSpecV, BufSpecW, InPlace


class Ranks(Protocol):
    """What the translation of a call needs of a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def _state(self) -> State: ...


class Call(NamedTuple):
    """One call of gpucoll's communicator."""

    method: str
    given: tuple[Any, ...]
    named: dict[str, Any]
    finish: Finish | None = None


def together(*functions: Finish | None) -> Finish | None:
    """Return one function that calls all given functions, or None if there is none."""
    there = [function for function in functions if function is not None]
    if len(there) < 2:
        return there[0] if there else None

    def finish() -> None:
        for function in there:
            function()

    return finish


def in_place(given: object) -> bool:
    """Return whether a buffer is IN_PLACE or None, which mpi4py treats alike."""
    return given is None or given is IN_PLACE


def checked_root(comm: Ranks, root: Unchecked) -> int:
    """Return the root as an int; raise if there is no such rank."""
    rank = integer(root)
    if not 0 <= rank < comm.size:
        raise argument_error(f"root must be 0 to {comm.size - 1}; got {root!r}", "ERR_ROOT")
    return rank


def barrier(comm: Ranks) -> Call:
    """Synchronise with an all_reduce of one byte: it can be started, unlike gpucoll's barrier."""
    byte = np.zeros(1, np.uint8)
    return Call("all_reduce", (byte,), {"out": byte})


def bcast(comm: Ranks, buf: BufSpec, root: int = 0) -> Call:
    root = checked_root(comm, root)
    if comm.rank == root:
        row = Simple(buf, False).row()
        named = {"out": row} if getattr(getattr(row, "flags", None), "writeable", True) else {}
        return Call("broadcast", (row, root), named)
    row, finish = Simple(buf, True).target()
    return Call("broadcast", (row, root), {"out": row}, finish)


def gather(
    comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB | None, root: int = 0
) -> Call:
    root = checked_root(comm, root)
    if comm.rank != root:
        return Call("gather", (Simple(sendbuf, False).row(), root), {})
    x, out, finish = _gathered(comm, sendbuf, recvbuf)
    return Call("gather", (x, root), {"out": out}, finish)


def allgather(comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> Call:
    x, out, finish = _gathered(comm, sendbuf, recvbuf)
    return Call("all_gather", (x,), {"out": out}, finish)


def _gathered(
    comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB
) -> tuple[AnyArray, AnyArray, Finish | None]:
    out, finish = Simple(recvbuf, True, comm.size).target(comm.size)
    if in_place(sendbuf):
        share = _size(out) // comm.size
        return out[comm.rank * share : (comm.rank + 1) * share], out, finish
    x = Simple(sendbuf, False).row()
    out = _read_as(out, x)
    if _size(x) * comm.size != _size(out):
        raise argument_error(
            f"rank {comm.rank} of {comm.size}: {_size(x)} elements are sent by each rank, but the "
            f"receive buffer has room for {_size(out)}",
            "ERR_TRUNCATE",
        )
    return x, out, finish


def scatter(
    comm: Ranks, sendbuf: BufSpecB | None, recvbuf: BufSpec | InPlace, root: int = 0
) -> Call:
    root = checked_root(comm, root)
    if comm.rank != root:
        out, finish = Simple(recvbuf, True).target()
        return Call("scatter", (None, root), {"out": out}, finish)
    x = Simple(sendbuf, False, comm.size).row(comm.size)
    if in_place(recvbuf):
        return Call("scatter", (x, root), {"out": np.empty_like(x[: _size(x) // comm.size])})
    out, finish = Simple(recvbuf, True).target()
    return Call("scatter", (x, root), {"out": _read_as(out, x)}, finish)


def alltoall(comm: Ranks, sendbuf: BufSpecB | InPlace, recvbuf: BufSpecB) -> Call:
    out, finish = Simple(recvbuf, True, comm.size).target(comm.size)
    if in_place(sendbuf):
        return Call("all_to_all", (out.copy(),), {"out": out}, finish)
    x = Simple(sendbuf, False, comm.size).row(comm.size)
    return Call("all_to_all", (x,), {"out": _read_as(out, x)}, finish)


# --- blocks of different sizes --------------------------------------------------------------------


def gatherv(
    comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpecV | None, root: int = 0
) -> Call:
    root = checked_root(comm, root)
    if comm.rank != root:
        return Call("gather", (Simple(sendbuf, False).row(), root), {"counts": "auto"})
    received = Vector(recvbuf, True, comm.size)
    out, finish = received.target()
    x = _own(received, comm.rank) if in_place(sendbuf) else Simple(sendbuf, False).row()
    named = {"counts": "auto", "out": _read_as(out, x)}
    return Call("gather", (x, root), named, finish)


def allgatherv(comm: Ranks, sendbuf: BufSpec | InPlace, recvbuf: BufSpecV) -> Call:
    received = Vector(recvbuf, True, comm.size)
    out, finish = received.target()
    if in_place(sendbuf):
        x = _own(received, comm.rank)
    else:
        x = _read_as(Simple(sendbuf, False).row(), out)
    named = {"counts": received.element_counts, "out": out}
    return Call("all_gather", (x,), named, finish)


def scatterv(
    comm: Ranks, sendbuf: BufSpecV | None, recvbuf: BufSpec | InPlace, root: int = 0
) -> Call:
    root = checked_root(comm, root)
    if comm.rank != root:
        out, finish = Simple(recvbuf, True).target()
        return Call("scatter", (None, root), {"counts": "auto", "out": out}, finish)
    sent = Vector(sendbuf, False, comm.size)
    blocks = [sent.block(number) for number in range(comm.size)]
    if in_place(recvbuf):
        out, finish = np.empty_like(blocks[root]), None
    else:
        out, finish = Simple(recvbuf, True).target()
    named = {"counts": "auto", "out": _read_as(out, blocks[root])}
    return Call("scatter", (blocks, root), named, finish)


def alltoallv(comm: Ranks, sendbuf: BufSpecV | InPlace, recvbuf: BufSpecV) -> Call:
    received = Vector(recvbuf, True, comm.size)
    out, finish = received.target()
    if in_place(sendbuf):
        x, send_counts = out.copy(), received.element_counts
    else:
        sent = Vector(sendbuf, False, comm.size)
        x, send_counts = sent.row(), sent.element_counts
        if not _alike(x, out):
            x, out = x.view(np.uint8), out.view(np.uint8)
            send_counts = [count * sent.map.dtype.itemsize for count in send_counts]
            named = _counted(send_counts, [n * received.map.size for n in received.counts], out)
            return Call("all_to_all", (x,), named, finish)
    return Call("all_to_all", (x,), _counted(send_counts, received.element_counts, out), finish)


def alltoallw(comm: Ranks, sendbuf: BufSpecW | InPlace, recvbuf: BufSpecW) -> Call:
    received = Typed(recvbuf, True, comm.size)
    sent = received if in_place(sendbuf) else Typed(sendbuf, False, comm.size)
    out = np.empty(sum(received.sizes), np.uint8)
    named = _counted(sent.sizes, received.sizes, out)
    return Call("all_to_all", (sent.row(),), named, lambda: received.spread(out))


# --- pieces ---------------------------------------------------------------------------------------


def block_counts(given: Unchecked, comm: Ranks) -> list[int]:
    """Return one count for each rank."""
    return numbers(given, comm.size, "counts")


def _counted(send: list[int], receive: list[int], out: AnyArray) -> dict[str, object]:
    return {"send_counts": send, "recv_counts": receive, "out": out}


def _own(received: Vector, rank: int) -> AnyArray:
    """Return a copy of this rank's block from the receive buffer."""
    return received.block(rank).copy()


def _size(row: AnyArray) -> int:
    size = getattr(row, "size", None)
    return size if isinstance(size, int) else int(np.prod(row.shape, dtype=np.int64))


def _alike(one: AnyArray, other: AnyArray) -> bool:
    return not isinstance(one, np.ndarray) or bool(one.dtype == other.dtype)


def _read_as(row: AnyArray, like: AnyArray) -> AnyArray:
    """Return a row viewed with the dtype of another row, if they differ."""
    if not isinstance(like, np.ndarray) or not isinstance(row, np.ndarray) or _alike(row, like):
        return row
    if row.nbytes % like.dtype.itemsize:
        raise argument_error(
            f"{row.nbytes} bytes are not a whole number of {like.dtype} elements", "ERR_TYPE"
        )
    return row.view(like.dtype)
