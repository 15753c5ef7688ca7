"""What is wrong with a request, in Horovod's words, which programs and their tests look for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpucoll.integrations.horovod.engine.request import Kind

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["DUPLICATE", "Described", "mismatch", "not_with_join"]

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
    "that is currently being processed.  If you want to request another tensor, use a different "
    "tensor name."
)
_NOT_WITH_JOIN = {
    Kind.ALLGATHER: (
        "Allgather is not supported with Join at this time. Specify sparse_to_dense=True if using "
        "DistributedOptimizer"
    ),
    Kind.BROADCAST: "Broadcast is not supported with Join at this time.",
    Kind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    Kind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    Kind.ADASUM: "Adasum is not supported with Join at this time.",
}
_OF_ONE_SHAPE = (Kind.ALLREDUCE, Kind.ADASUM, Kind.BROADCAST, Kind.REDUCESCATTER)


class Described(NamedTuple):
    """A request, as another rank is told of it."""

    name: str
    library: str
    kind: Kind
    op: int
    root: int
    prescale: float
    postscale: float
    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    """Of each array: element type, shape, "CPU" or "GPU"."""

    @classmethod
    def of(cls, request: Request) -> Described:
        """Describe a request."""
        library = request.library
        arrays = tuple(
            (library.dtype(x), tuple(x.shape), library.device(x)) for x in request.arrays
        )
        factors = request.prescale, request.postscale
        return cls(
            *(request.name, library.name, request.kind, int(request.op)),
            *(request.root, *factors, arrays),
        )


def not_with_join(kind: Kind) -> str | None:
    """Return why a request cannot be done while a rank has joined; None if it can."""
    return _NOT_WITH_JOIN.get(kind)


def mismatch(asked: dict[int, Described]) -> str:
    """Return how ranks differ that have submitted different things under one name.

    Parameters
    ----------
    asked : dict
        By rank.
    """
    (first, one), *others = sorted(asked.items())
    for rank, other in others:
        if text := _difference(one, other):
            return f"{text} Rank {first} and rank {rank} differ in {one.name!r}."
    return f"{one.name!r} is not the same on all ranks."


def _difference(one: Described, other: Described) -> str:
    if len(one.arrays) != len(other.arrays):
        return (
            f"Mismatched group sizes: One rank sent {len(one.arrays)} tensors, but another rank "
            f"sent {len(other.arrays)} tensors."
        )
    for (dtype, _, _), (its_dtype, _, _) in zip(one.arrays, other.arrays, strict=True):
        if dtype != its_dtype:
            return (
                f"Mismatched data types: One rank had type {dtype}, but another rank had type "
                f"{its_dtype}."
            )
    if one.kind != other.kind:
        return (
            f"Mismatched operations: One rank did an {one.kind.name}, but another rank did an "
            f"{other.kind.name}."
        )
    for mine, its in zip(one.arrays, other.arrays, strict=True):
        if text := _shapes_differ(one.kind, mine[1], its[1]):
            return text
    return _parameters_differ(one, other) or _devices_differ(one, other)


def _shapes_differ(kind: Kind, shape: tuple[int, ...], other: tuple[int, ...]) -> str:
    begin = f"Mismatched {kind.name} tensor shapes: One rank sent a tensor "
    if kind in _OF_ONE_SHAPE:
        if shape == other:
            return ""
        return (
            f"{begin}of shape {list(shape)}, but another rank sent a tensor of shape {list(other)}."
        )
    if len(shape) != len(other):
        return f"{begin}of rank {len(shape)}, but another rank sent a tensor of rank {len(other)}."
    for axis in range(1, len(shape)):
        if shape[axis] != other[axis]:
            return (
                f"{begin}with dimension {axis} equal to {shape[axis]}, but another rank sent a "
                f"tensor with dimension {axis} equal to {other[axis]}."
            )
    return ""


def _parameters_differ(one: Described, other: Described) -> str:
    if (one.prescale, one.postscale) != (other.prescale, other.postscale):
        return (
            "Mismatched prescale and/or postscale factors: One rank sent factors "
            f"({one.prescale:g}, {one.postscale:g}), but another rank sent factors "
            f"({other.prescale:g}, {other.postscale:g})."
        )
    if one.op != other.op:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {one.op}, but another "
            f"rank sent reduction op {other.op}."
        )
    if one.root != other.root:
        return (
            f"Mismatched {one.kind.name} root ranks: One rank specified root rank {one.root}, but "
            f"another rank specified root rank {other.root}."
        )
    return ""


def _devices_differ(one: Described, other: Described) -> str:
    for mine, its in zip(one.arrays, other.arrays, strict=True):
        if mine[2] != its[2]:
            return (
                f"Mismatched {one.kind.name} CPU/GPU device selection: One rank specified device "
                f"{mine[2]}, but another rank specified device {its[2]}."
            )
    return ""
