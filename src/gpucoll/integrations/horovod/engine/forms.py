"""What of a request is the same each time it comes: its digests, and how it is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["MASK", "Form", "Forms"]

MASK = (1 << 63) - 1
_NAMES = {
    ReduceOp.AVERAGE: "avg",
    ReduceOp.SUM: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "prod",
}


@dataclass(frozen=True, slots=True)
class Form:
    """All that requests of one name and signature have in common."""

    key: int
    """Digest of the name."""
    digest: int
    """Digest of the signature."""
    kind: Kind
    operation: str
    """gpucoll's name of the reduction."""
    factor: float
    """What is left to multiply its result with."""
    batch: tuple[Any, ...]
    """What requests that one call does have in common."""
    n_bytes: int
    mark: int
    """Key and digest in one number."""
    row: memoryview = field(compare=False)
    """The beginning of a row of `Exchange` that tells of it alone."""
    differs: ClassVar[bool] = False
    """What `Entry` says: ranks whose forms are equal have submitted the same."""


class Forms:
    """Gives requests their forms, and remembers those that come again.

    Parameters
    ----------
    world_size : int
        Ranks of the process set.
    capacity : int
        How many forms; then all are forgotten, since unnamed tensors never come again.
    """

    def __init__(self, world_size: int, capacity: int) -> None:
        self._world_size, self._capacity = world_size, capacity
        self._known: dict[Hashable, Form] = {}
        self._batches: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def of(self, request: Request) -> Form:
        """Return a request's form."""
        look = request.library.look
        what = (
            *(request.name, request.kind, request.op, request.root),
            *(request.prescale, request.postscale, *[look(x) for x in request.arrays]),
        )
        found = self._known.get(what)
        if found is None:
            found = self._make(request)
            if len(self._known) >= self._capacity:
                self._known.clear()
                self._batches.clear()
            self._known[what] = found
        return found

    def _make(self, request: Request) -> Form:
        library, arrays = request.library, request.arrays
        operation, factor = _NAMES.get(request.op, ""), request.postscale
        is_whole = any(library.dtype(x).startswith(("int", "uint", "bool")) for x in arrays)
        if operation == "avg" and (is_whole or factor != 1.0):
            # The sum of integers is divided once, together with the factor, and truncated.
            operation, factor = "sum", factor / self._world_size
        device = library.device(arrays[0]) if arrays else "CPU"
        name, signature = request.name, request.signature()
        batch = (*request.constants(), operation, factor, device)
        key, number, mark = digest(name), digest(signature), digest((name, signature)) & MASK
        return Form(
            *(key, number, request.kind, operation, factor),
            self._batches.setdefault(batch, batch),
            sum(x.nbytes for x in arrays),
            mark,
            memoryview(cast(Any, np.array([1, 0, 1, mark, key, number], np.int64))),
        )


def digest(what: object) -> int:
    """Return 64 bits that are the same on every rank."""
    whole = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(whole, "little", signed=True)
