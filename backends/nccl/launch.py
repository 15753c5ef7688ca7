"""The content of a call as data: copies, fills, kernels and calls of the library, in phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpucoll.backends.gpu.steps import Step

FunctionArguments = tuple[int | None, ...]
"""Arguments of an NCCL function, without the communicator and the stream, which come last."""


class Phase(NamedTuple):
    """A part of a call that is enqueued together.

    Attributes
    ----------
    calls : sequence of (str, FunctionArguments)
        The functions, by name; several run between one ncclGroupStart and ncclGroupEnd.
    before : sequence of Step
        Steps that are enqueued before the functions.
    """

    calls: tuple[tuple[str, FunctionArguments], ...] = ()
    before: tuple[Step, ...] = ()


class Launch(NamedTuple):
    """One collective with its buffers, ready to be enqueued any number of times.

    Attributes
    ----------
    phases : callable
        Returns the phases, given the address of the scratch memory and the stream. They live until
        they are done.
    scratch_bytes : int
        Size of the scratch memory. A launch that needs any cannot be part of a group of the
        library.
    factor : (bytes, int), optional
        For a premultiplied sum: the element and its type; `OPERATION` stands for the op.
    call : (str, FunctionArguments), optional
        For a launch that consists of one call: that call. Such a launch is the fastest.
    """

    phases: Callable[[int, int], Iterable[Phase]]
    scratch_bytes: int = 0
    factor: tuple[bytes, int] | None = None
    call: tuple[str, FunctionArguments] | None = None


def plain(*calls: tuple[str, FunctionArguments]) -> Launch:
    """Return a launch that consists of these calls."""
    phases = (Phase(calls),) if calls else ()
    return Launch(lambda *_: phases, call=calls[0] if len(calls) == 1 else None)
