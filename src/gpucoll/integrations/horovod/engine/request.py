"""What a rank submits to the engine: arrays, what is to be done with them, and a name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.forms import Form

__all__ = ["ArrayLibrary", "Kind", "ReduceOp", "Request"]


class Kind(enum.IntEnum):
    """What is done; the names are those of Horovod's messages."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    JOIN = 3
    ADASUM = 4
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7

    __hash__ = int.__hash__  # Enum's is written in Python


class ReduceOp(enum.IntEnum):
    """The reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__


class ArrayLibrary(Protocol):
    """What the engine needs to know about the arrays of a request."""

    name: str
    """Either "numpy" or "torch": a joined rank makes zeros of the same library."""

    def dtype(self, x: Any) -> str:
        """Return a name of the element type, the same in every library: "float32"."""
        ...

    def device(self, x: Any) -> str:
        """Return "CPU" or "GPU"."""
        ...

    def look(self, x: Any) -> Hashable:
        """Return what tells arrays of different dtype, device or shape apart, in no time."""
        ...

    def zeros(self, dtype: str, shape: tuple[int, ...], device: str) -> Any:
        """Return zeros: what a joined rank contributes."""
        ...

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return an array of the dtype and device of `like`."""
        ...

    def scale(self, x: Any, factor: float, out: Any) -> None:
        """Write factor x into `out`, which may be x: half types in float32, integers truncated.

        A factor of 1 copies exactly.
        """
        ...

    def submitted(self, request: Request) -> None:
        """Note where the stream of the submitting thread stands. Nothing for host arrays."""
        ...

    def begin(self, requests: Sequence[Request]) -> None:
        """Order this thread's stream behind what `submitted` noted. Nothing for host arrays."""
        ...

    def ended(self, requests: Sequence[Request]) -> None:
        """Note where the results stand on this thread's stream. Nothing for host arrays."""
        ...

    def received(self, request: Request) -> None:
        """Order the stream of the thread that takes the results. Nothing for host arrays."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """One operation, of one array or of a group; also the handle that is waited for.

    Parameters
    ----------
    kind : Kind
    name : str
        Unique among the pending requests of a process set; every rank has the same.
    library : ArrayLibrary
        Of the arrays.
    arrays : list
        The inputs, contiguous; gpucoll takes them as they are. They are not changed unless they
        are outputs, too.
    outputs : list of arrays, optional
        Where results go (may be the inputs). None: results are made, and found in `results`.
        For allgather, alltoall and reducescatter always None, since nobody knows the sizes.
    op : ReduceOp
        Of an allreduce or reducescatter. AVERAGE divides by the ranks of the set, joined ones too.
    root : int
        Of a broadcast: a rank of the process set.
    prescale, postscale : float
        Factors before and after a reduction.
    splits : sequence of int, optional
        Of an alltoall: rows for each rank. None: equal blocks.
    finished : callable, optional
        Called with the request when it is done, by the thread that did it: not for long.
    """

    kind: Kind
    name: str
    library: ArrayLibrary
    arrays: list[Any] = field(default_factory=list)
    outputs: list[Any] | None = None
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: Sequence[int] | None = None
    finished: Callable[[Request], None] | None = None
    is_done: bool = False
    """Whether `results` or `error` is there."""
    error: BaseException | None = None
    results: list[Any] | None = None
    """One for each array. The outputs, or new arrays."""
    received_splits: list[int] | None = None
    """After an alltoall: rows from each rank."""
    last_joined: int = -1
    """After a join: the rank that joined last."""
    notes: Any = None
    """For the library: events of streams."""
    form: Form | None = None
    """Set by the engine, unless a request like an earlier one brings that one's."""
    since: float = 0.0
    """When it was submitted (`time.monotonic`)."""

    def signature(self) -> Hashable:
        """Return what must be equal on all ranks."""
        describe = self.library
        free = self.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
        arrays = tuple(
            (
                describe.dtype(x),
                describe.device(x),
                (len(x.shape), *x.shape[1:]) if free else tuple(x.shape),
            )
            for x in self.arrays
        )
        return (*self.constants(), arrays)

    def constants(self) -> tuple[Hashable, ...]:
        """Return what is part of the signature beside the arrays."""
        factors = self.prescale, self.postscale
        return (int(self.kind), int(self.op), self.root, *factors, self.library.name)
