"""How the ranks' pseudo-gradients travel and become their mean: whole, rounded or sparse.

An exchange starts a transfer, which runs while the program computes. What it is given is unchanged,
so that the ranks that are left can repeat the transfer if one is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpucoll import ArgumentError, ArgumentTypeError, Communicator, Compression, Work
from gpucoll.training import sparse
from gpucoll.training.parameters import Vector

_SHORT_NAMES = {"int8": "int8_block", "float8": "float8_block"}
_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8_block": 1 + 4 / 256, "float8_block": 1 + 4 / 256}


@dataclass(frozen=True)
class Transfer:
    """A transfer that has started; at its end `residual` is what was given and not sent."""

    work: Work[Any]
    residual: Vector | None
    finish: Callable[[], Vector]

    def mean(self) -> Vector:
        """Wait, and return the mean over the ranks."""
        self.work.wait()
        return self.finish()


@dataclass(frozen=True)
class Exchange:
    """The way in which vectors travel; `how` is None if they are whole."""

    how: Compression | None

    @staticmethod
    def parse(compression: object, dtype: np.dtype[Any]) -> Exchange:
        """Return the exchange for an argument `compression` and vectors of a dtype."""
        if compression is None:
            return Exchange(None)
        if not isinstance(compression, str | Compression):
            raise ArgumentTypeError(
                f"compression must be None, a name or a Compression; got {compression!r}"
            )
        how = compression
        if isinstance(how, str):
            how = Compression(_SHORT_NAMES.get(how, how))
        if dtype != np.float32:
            raise ArgumentError(
                f"compression {how.name} takes float32, float16 and bfloat16 parameters; one is "
                f"{dtype}"
            )
        return Exchange(how)

    @property
    def is_sparse(self) -> bool:
        """Whether only the greatest values travel."""
        return self.how is not None and self.how.name == "topk"

    def start(
        self, comm: Communicator, given: Vector, residual: Vector | None, step: int
    ) -> Transfer:
        """Start the transfer of outer step number `step`, which makes another seed. Collective."""
        how, mean = self.how, np.empty_like(given)
        if how is not None:
            assert residual is not None
            if self.is_sparse:
                return _start_sparse(how, comm, given, residual)
            if how.seed is not None:
                how = replace(how, seed=(int(how.seed) + step) % (1 << 64))
            residual = residual.copy()
        work = comm.all_reduce(
            given, "avg", out=mean, compression=how, residual=residual, async_op=True
        )
        return Transfer(work, residual, lambda: mean)

    def sent_bytes(self, count: int, item_bytes: int, world_size: int) -> float:
        """Return the bytes that a rank sends for `count` values, on average over the ranks.

        That is 2 n (P-1)/P; with topk m (P-1) for a message of m bytes. The filling of a rounded
        message's last blocks is not counted.
        """
        if self.how is not None and self.is_sparse:
            return float(sparse.message_bytes(self.how, count) * (world_size - 1))
        of_value = item_bytes if self.how is None else _BYTES[self.how.name]
        return 2 * count * of_value * (world_size - 1) / world_size


def _start_sparse(
    how: Compression, comm: Communicator, given: Vector, residual: Vector
) -> Transfer:
    """Start an all_gather of what this rank sends; every rank adds up in rank order."""
    left = residual * np.float32(how.decay)
    left += given
    message = sparse.take(how, left)
    messages = np.empty((comm.world_size, len(message)), np.uint8)
    work = comm.all_gather(message, out=messages, async_op=True)

    def finish() -> Vector:
        total = np.zeros_like(given)
        for of_rank in messages:
            sparse.add(how, of_rank, total)
        total /= np.float32(len(messages))
        return total

    return Transfer(work, left, finish)
