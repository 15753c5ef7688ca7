"""How the ranks' pseudo-gradients travel and become their mean: whole, rounded or sparse.

An exchange starts a transfer, which runs while the program computes. What it is given is unchanged,
so that the transfer can be repeated by the ranks that are left if one is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from gpucoll import ArgumentError, ArgumentTypeError, Communicator, Compression, Work
from gpucoll.training import sparse
from gpucoll.training.parameters import Vector

_SHORT_NAMES = {"int8": "int8_block", "float8": "float8_block"}
_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8_block": 1 + 4 / 256, "float8_block": 1 + 4 / 256}


@dataclass(frozen=True)
class Transfer:
    """A transfer that has started.

    Attributes
    ----------
    residual : Vector or None
        When it has ended: what this rank gave and has not been sent.
    """

    work: Work[Any]
    residual: Vector | None
    finish: Callable[[], Vector]

    def mean(self) -> Vector:
        """Wait, and return the mean over the ranks."""
        self.work.wait()
        return self.finish()


class Exchange(Protocol):
    """A way for vectors to travel."""

    has_residual: bool

    def start(
        self, comm: Communicator, given: Vector, residual: Vector | None, step: int
    ) -> Transfer:
        """Start the transfer of outer step number `step`. Collective."""
        ...

    def sent_bytes(self, count: int, item_bytes: int, world_size: int) -> float:
        """Return the bytes that a rank sends for `count` values, on average over the ranks."""
        ...


class Whole:
    """All values as they are, by an all_reduce."""

    has_residual = False

    def start(
        self, comm: Communicator, given: Vector, residual: Vector | None, step: int
    ) -> Transfer:
        """Start an all_reduce."""
        mean = np.empty_like(given)
        work = comm.all_reduce(given, "avg", out=mean, async_op=True)
        return Transfer(work, None, lambda: mean)

    def sent_bytes(self, count: int, item_bytes: int, world_size: int) -> float:
        """Return 2 n (P-1)/P."""
        return 2 * count * item_bytes * (world_size - 1) / world_size


class Rounded:
    """All values in a byte or two each, by a compressed all_reduce with a residual."""

    has_residual = True

    def __init__(self, how: Compression) -> None:
        self._how = how

    def start(
        self, comm: Communicator, given: Vector, residual: Vector | None, step: int
    ) -> Transfer:
        """Start a compressed all_reduce; a seed is another one for each outer step."""
        assert residual is not None
        how, mean, kept = self._how, np.empty_like(given), residual.copy()
        if how.seed is not None:
            how = replace(how, seed=(int(how.seed) + step) % (1 << 64))
        work = comm.all_reduce(
            given, "avg", out=mean, compression=how, residual=kept, async_op=True
        )
        return Transfer(work, kept, lambda: mean)

    def sent_bytes(self, count: int, item_bytes: int, world_size: int) -> float:
        """Return 2 c n (P-1)/P for c bytes a value, without the filling of the last blocks."""
        return 2 * count * _BYTES[self._how.name] * (world_size - 1) / world_size


class Sparse:
    """The greatest values of each chunk, by an all_gather; every rank adds up in rank order."""

    has_residual = True

    def __init__(self, how: Compression) -> None:
        self._how = how

    def start(
        self, comm: Communicator, given: Vector, residual: Vector | None, step: int
    ) -> Transfer:
        """Start an all_gather of what this rank sends."""
        assert residual is not None
        how = self._how
        left = residual * np.float32(how.decay)
        left += given
        message = sparse.take(how, left)
        size, ranks = len(message), comm.world_size
        messages = np.empty(size * ranks, np.uint8)
        work = comm.all_gather(message, out=messages, async_op=True)

        def finish() -> Vector:
            total = np.zeros_like(given)
            for rank in range(ranks):
                sparse.add(how, messages[rank * size : (rank + 1) * size], total)
            total /= np.float32(ranks)
            return total

        return Transfer(work, left, finish)

    def sent_bytes(self, count: int, item_bytes: int, world_size: int) -> float:
        """Return m (P-1) for a message of m bytes."""
        return float(sparse.message_bytes(self._how, count) * (world_size - 1))


def exchange_for(compression: object, dtype: np.dtype[Any]) -> Exchange:
    """Return the exchange for an argument `compression` and vectors of a dtype."""
    if compression is None:
        return Whole()
    if not isinstance(compression, str | Compression):
        raise ArgumentTypeError(
            f"compression must be None, a name or a Compression; got {compression!r}"
        )
    how = compression
    if isinstance(how, str):
        how = Compression(_SHORT_NAMES.get(how, how))
    if dtype != np.float32:
        raise ArgumentError(
            f"compression {how.name} takes float32, float16 and bfloat16 parameters; one is {dtype}"
        )
    return Sparse(how) if how.name == "topk" else Rounded(how)
