"""What a communicator needs of a backend."""

from __future__ import annotations

from typing import Any, Protocol

from gpucoll.arrays.buffer import Buffer
from gpucoll.types import ReduceOp


class PreparedCall(Protocol):
    """A collective with its buffers, ready to run as often as wanted.

    On a host backend `run` returns when the data is there. On a GPU backend it enqueues the work on
    the buffers' stream and returns.
    """

    def run(self, timeout_s: float | None = None) -> None:
        """Do it; raise what went wrong."""


class Backend(Protocol):
    """Moves buffers of one kind of device between the ranks of a group."""

    name: str

    def all_reduce(self, source: Buffer, destination: Buffer, op: ReduceOp) -> PreparedCall:
        """Prepare an all_reduce. ArgumentTypeError where the dtype lacks the op."""

    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> PreparedCall:
        """Prepare a broadcast."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in memory that the backend can use without a copy."""

    def describe(self) -> dict[str, str]:
        """Return what is worth knowing: name -> sentence."""
