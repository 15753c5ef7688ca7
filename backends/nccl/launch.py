"""What a call enqueues, as data: copies, fills and kernels, and calls of the library, in phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpucoll.backends.gpu.steps import Step

FunctionArguments = tuple[int | None, ...]
"""Of a function of NCCL's, but for the communicator and the stream, which come last."""


class Phase(NamedTuple):
    """What is enqueued together.

    Attributes
    ----------
    calls : sequence of (str, FunctionArguments)
        Functions by name; several are made within one ncclGroupStart and ncclGroupEnd.
    before, after : sequence of Step
        What is enqueued before and after them.
    """

    calls: tuple[tuple[str, FunctionArguments], ...] = ()
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()


class Launch(NamedTuple):
    """One collective with its buffers, ready to be enqueued as often as wanted.

    Attributes
    ----------
    phases : callable
        Returns them, given the address of scratch memory and the stream; they live until they are
        done.
    scratch_bytes : int
        How much of that is needed; one with any is not part of a group of the library's.
    factor : (bytes, int), optional
        Of a premultiplied sum: the element and its type; `OPERATION` stands for the op.
    call : (str, FunctionArguments), optional
        Where one call is all that there is to it: that call. Such a launch is the fastest.
    """

    phases: Callable[[int, int], Iterable[Phase]]
    scratch_bytes: int = 0
    factor: tuple[bytes, int] | None = None
    call: tuple[str, FunctionArguments] | None = None


def plain(*calls: tuple[str, FunctionArguments]) -> Launch:
    """Return a launch of these calls."""
    phases = (Phase(calls),) if calls else ()
    return Launch(lambda *_: phases, call=calls[0] if len(calls) == 1 else None)
