"""Collectives of arrays, with a fast path for NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import gpucoll
from gpucoll import GpucollError, UsageError
from gpucoll.integrations.mpi4py import calls, reductions
from gpucoll.integrations.mpi4py.calls import Call
from gpucoll.integrations.mpi4py.constants import IN_PLACE
from gpucoll.integrations.mpi4py.datatypes import Datatype
from gpucoll.integrations.mpi4py.errors import Exception
from gpucoll.integrations.mpi4py.operations import LOGICAL, SUM, Op
from gpucoll.integrations.mpi4py.requests import After, AnyWork, Prequest, Request

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.infos import Info
    from gpucoll.integrations.mpi4py.specifications import AnySpec
    from gpucoll.integrations.mpi4py.state import AnyComm
    from gpucoll.integrations.mpi4py.typing import BufSpec, BufSpecB, BufSpecV, InPlace

_array = np.ndarray


class Collectives:
    """The collectives of `Comm` on arrays.

    An exact, contiguous NumPy array is passed straight to gpucoll's call. Anything else, and an
    array that this call refuses, is read as a specification.
    """

    _state: Any
    _failed: Callable[[GpucollError], Exception]
    _all_reduce: Any
    _reduce: Any
    _broadcast: Any
    _all_gather: Any
    _gather: Any
    _scatter: Any
    _all_to_all: Any
    _barrier: Any
    rank: Any
    size: Any

    # --- how calls run ----------------------------------------------------------------------------

    def _run(self, call: Call) -> None:
        """Make a call and process its result."""
        comm = self._state.comm
        method = getattr(comm, call.method)
        try:
            if _certifies(call):
                method(*call.given, **call.named, async_op=True).synchronize()
            else:
                _run_or_queue(comm, method, call)
        except GpucollError as error:
            raise self._failed(error) from None
        if call.finish is not None:
            call.finish()

    def _start(self, call: Call) -> Request:
        """Start a call."""
        try:
            method = getattr(self._state.comm, call.method)
            work = method(*call.given, **call.named, async_op=True)
        except GpucollError as error:
            raise self._failed(error) from None
        certifies = _certifies(call)
        plain = call.finish is None and not certifies
        after = None if plain else After(call.finish, certifies=certifies)
        return Request._started(work, after)

    # --- the most frequent ones -------------------------------------------------------------------

    def Barrier(self) -> None:
        """Return when all ranks have called it."""
        try:
            self._barrier()
        except UsageError:
            self._run(calls.barrier(self))
        except GpucollError as error:
            raise self._failed(error) from None

    barrier = Barrier

    def Allreduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: Op = SUM) -> None:
        """Reduce to all ranks."""
        if type(recvbuf) is _array and recvbuf.flags.c_contiguous:
            x = recvbuf if sendbuf is IN_PLACE else sendbuf
            if (
                type(x) is _array
                and x.flags.c_contiguous
                and (name := getattr(op, "_native", None))
                and (name not in LOGICAL or self.size > 1)
            ):
                if x.ndim != 1 or recvbuf.ndim != 1:
                    flat = recvbuf.reshape(-1)
                    x, recvbuf = flat if x is recvbuf else x.reshape(-1), flat
                try:
                    self._all_reduce(x, name, out=recvbuf)
                    return
                except UsageError:
                    pass
                except GpucollError as error:
                    raise self._failed(error) from None
        self._run(reductions.allreduce(self, sendbuf, recvbuf, op))

    def Bcast(self, buf: BufSpec, root: int = 0) -> None:
        """Send the root's data to all ranks."""
        if type(buf) is _array and buf.flags.c_contiguous:
            row = buf if buf.ndim == 1 else buf.reshape(-1)
            try:
                self._broadcast(row, root, out=row)
                return
            except UsageError:
                pass
            except GpucollError as error:
                raise self._failed(error) from None
        self._run(calls.bcast(self, buf, root))

    def Allgather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> None:
        """Gather to all ranks."""
        if (
            type(sendbuf) is _array
            and type(recvbuf) is _array
            and sendbuf.flags.c_contiguous
            and recvbuf.flags.c_contiguous
        ):
            try:
                self._all_gather(
                    sendbuf if sendbuf.ndim == 1 else sendbuf.reshape(-1),
                    out=recvbuf if recvbuf.ndim == 1 else recvbuf.reshape(-1),
                )
                return
            except UsageError:
                pass
            except GpucollError as error:
                raise self._failed(error) from None
        self._run(calls.allgather(self, sendbuf, recvbuf))

    def Alltoall(self, sendbuf: BufSpecB | InPlace, recvbuf: BufSpecB) -> None:
        """Send a block to each rank."""
        if (
            type(sendbuf) is _array
            and type(recvbuf) is _array
            and sendbuf.flags.c_contiguous
            and recvbuf.flags.c_contiguous
        ):
            try:
                self._all_to_all(
                    sendbuf if sendbuf.ndim == 1 else sendbuf.reshape(-1),
                    out=recvbuf if recvbuf.ndim == 1 else recvbuf.reshape(-1),
                )
                return
            except UsageError:
                pass
            except GpucollError as error:
                raise self._failed(error) from None
        self._run(calls.alltoall(self, sendbuf, recvbuf))

    def Reduce(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: Op = SUM, root: int = 0
    ) -> None:
        """Reduce to the root."""
        if (
            type(sendbuf) is _array
            and sendbuf.flags.c_contiguous
            and (name := getattr(op, "_native", None))
            and (name not in LOGICAL or self.size > 1)
            and (self.rank != root or (type(recvbuf) is _array and recvbuf.flags.c_contiguous))
        ):
            out = None if self.rank != root else _flat(recvbuf)
            try:
                self._reduce(sendbuf.reshape(-1), name, root, out=out)
                return
            except UsageError:
                pass
            except GpucollError as error:
                raise self._failed(error) from None
        self._run(reductions.reduce(self, sendbuf, recvbuf, op, root))

    def Gather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB | None, root: int = 0) -> None:
        """Gather to the root."""
        if _is_plain(sendbuf) and (self.rank != root or _is_plain(recvbuf)):
            out = None if self.rank != root else _flat(recvbuf)
            if self._goes(self._gather, _flat(sendbuf), root, out=out):
                return
        self._run(calls.gather(self, sendbuf, recvbuf, root))

    def Scatter(self, sendbuf: BufSpecB | None, recvbuf: BufSpec | InPlace, root: int = 0) -> None:
        """Send each rank a block of the root's data."""
        if _is_plain(recvbuf) and (self.rank != root or _is_plain(sendbuf)):
            x = None if self.rank != root else _flat(sendbuf)
            if self._goes(self._scatter, x, root, out=_flat(recvbuf)):
                return
        self._run(calls.scatter(self, sendbuf, recvbuf, root))

    def Allgatherv(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecV) -> None:
        """Gather blocks of different sizes to all ranks."""
        if _is_plain(sendbuf) and (vector := _plain_vector(recvbuf)) is not None:
            out, counts = vector
            if self._goes(self._all_gather, _flat(sendbuf), counts=counts, out=out):
                return
        self._run(calls.allgatherv(self, sendbuf, recvbuf))

    def Alltoallv(self, sendbuf: BufSpecV | InPlace, recvbuf: BufSpecV) -> None:
        """Send each rank a block of its own size."""
        sent, received = _plain_vector(sendbuf), _plain_vector(recvbuf)
        if sent is not None and received is not None:
            x, counts = sent
            named = {"send_counts": counts, "recv_counts": received[1], "out": received[0]}
            if self._goes(self._all_to_all, x, **named):
                return
        self._run(calls.alltoallv(self, sendbuf, recvbuf))

    def _goes(self, call: Callable[..., object], *given: object, **named: object) -> bool:
        """Make a call of gpucoll's; return False if it refuses these arguments."""
        try:
            call(*given, **named)
        except UsageError:
            return False
        except GpucollError as error:
            raise self._failed(error) from None
        return True

    def Ibarrier(self) -> Request:
        """Start a barrier."""
        return self._start(calls.barrier(self))

    def Barrier_init(self, info: Info | None = None) -> Prequest:
        """Prepare a barrier."""
        return Prequest._of(self.Ibarrier)


# --- what the quick path takes: NumPy arrays, and vectors of adjacent blocks ----------------------


def _is_plain(x: AnyArray) -> bool:
    """Return whether x is exactly a NumPy array, in native byte order and contiguous."""
    return type(x) is _array and x.flags.c_contiguous and x.dtype.isnative


def _flat(x: AnyArray) -> AnyArray:
    """Return an array as one row: a view."""
    return x if x.ndim == 1 else x.reshape(-1)


def _plain_vector(message: AnySpec) -> tuple[AnyArray, Sequence[int]] | None:
    """Return the row of all blocks and their counts; None if the specification is not plain."""
    if type(message) not in (list, tuple) or not 2 <= len(message) <= 4:
        return None
    x, counts, displacements = message[0], message[1], None
    if not _is_plain(x):
        return None
    if len(message) == 4:
        displacements = message[2]
    elif type(counts) is tuple:
        if len(counts) != 2:
            return None
        counts, displacements = counts
    if len(message) > 2 and not _is_of(message[-1], x.dtype):
        return None
    counts = _numbers(counts)
    if counts is None or (displacements is not None and not _follow(counts, displacements)):
        return None
    try:
        total = sum(counts)
    except TypeError:
        return None
    row = _flat(x)
    return (row if row.size == total else row[:total]), counts


def _numbers(given: Unchecked) -> Sequence[int] | None:
    """Convert a list or an array of numbers to a list; return None for anything else."""
    if type(given) is _array and given.ndim == 1:
        numbers: list[int] = given.tolist()
        return numbers
    return given if type(given) in (list, tuple) else None


def _follow(counts: Unchecked, displacements: Unchecked) -> bool:
    """Return whether blocks are adjacent, from the first element on."""
    places, end = _numbers(displacements), 0
    if places is None or len(places) != len(counts):
        return False
    for count, place in zip(counts, places, strict=True):
        if count and place != end:
            return False
        end += count
    return True


def _is_of(datatype: object, dtype: np.dtype[np.generic]) -> bool:
    """Return whether a predefined datatype is the type of an array's elements."""
    if not isinstance(datatype, Datatype) or datatype._core is None:
        return False
    core = datatype._core
    return bool(core.combiner == "NAMED" and core.map.is_dense and core.map.element == dtype)


# --- how calls run, and the other forms of collectives --------------------------------------------


def _certifies(call: Call) -> bool:
    """Return whether the arrays are on a GPU: the call then ends when the GPU's work does."""
    x = call.given[0] if call.given[0] is not None else call.named["out"]
    x = x[0] if isinstance(x, list) else x
    return not isinstance(x, np.ndarray)


def _run_or_queue(comm: AnyComm, method: Callable[..., AnyWork], call: Call) -> None:
    """Make a blocking call; if another thread is in a call, queue behind it."""
    try:
        method(*call.given, **call.named)
    except gpucoll.StateError:
        if comm.is_closed:
            raise
        method(*call.given, **call.named, async_op=True).wait()


def _blocking(build: Callable[..., Call]) -> Callable[..., None]:
    def method(self: Collectives, *args: object, **named: object) -> None:
        self._run(build(self, *args, **named))

    return method


def _starting(build: Callable[..., Call]) -> Callable[..., Request]:
    def method(self: Collectives, *args: object, **named: object) -> Request:
        return self._start(build(self, *args, **named))

    return method


def _prepared(build: Callable[..., Call]) -> Callable[..., Prequest]:
    def method(
        self: Collectives, *args: object, info: Info | None = None, **named: object
    ) -> Prequest:
        build(self, *args, **named)  # raises if an argument is wrong
        return Prequest._of(lambda: self._start(build(self, *args, **named)))

    return method


def add_forms(kind: type, builders: dict[str, Callable[..., Call]]) -> None:
    """Add the missing forms of collectives to a class: Name, Iname, Name_init."""
    for name, build in builders.items():
        forms = (name, _blocking), (f"I{name.lower()}", _starting), (f"{name}_init", _prepared)
        for form, make in forms:
            if form not in vars(kind):
                method = make(build)
                method.__name__ = form
                method.__qualname__ = f"{kind.__name__}.{form}"
                method.__doc__ = build.__doc__
                setattr(kind, form, method)


add_forms(
    Collectives,
    {
        "Bcast": calls.bcast,
        "Gather": calls.gather,
        "Gatherv": calls.gatherv,
        "Scatter": calls.scatter,
        "Scatterv": calls.scatterv,
        "Allgather": calls.allgather,
        "Allgatherv": calls.allgatherv,
        "Alltoall": calls.alltoall,
        "Alltoallv": calls.alltoallv,
        "Alltoallw": calls.alltoallw,
        "Reduce": reductions.reduce,
        "Allreduce": reductions.allreduce,
        "Reduce_scatter": reductions.reduce_scatter,
        "Reduce_scatter_block": reductions.reduce_scatter_block,
    },
)
