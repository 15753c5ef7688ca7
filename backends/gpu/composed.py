"""Calls that are put together: of kernels, and of calls that the backend makes by itself.

Such a call is a list of steps over its arrays and a piece of scratch memory. For the other ranks,
and for who watches it, it is one call: the one that its user made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gpucoll.backends.gpu.steps import Step
from gpucoll.backends.protocol import Request


class Composed(NamedTuple):
    """A call that is put together.

    Attributes
    ----------
    steps : callable
        Returns them in their order, given the address of scratch memory and the stream: what is
        enqueued, or a request that the backend itself can do without scratch memory. They are kept
        until they are done.
    scratch_bytes : int
        How much of that is needed.
    """

    steps: Callable[[int, int], Iterable[Step | Request]]
    scratch_bytes: int


class ComposedLaunch:
    """How a composed call is enqueued: made anew only for other memory, or another stream.

    Parameters
    ----------
    composed : Composed
    prepare : callable
        Returns what the backend makes of a request.
    """

    def __init__(self, composed: Composed, prepare: Callable[[Request], Any]) -> None:
        self.scratch_bytes = composed.scratch_bytes

        @functools.lru_cache(maxsize=1)
        def parts(scratch: int, stream: int) -> tuple[Any, ...]:
            steps = composed.steps(scratch, stream)
            return tuple(prepare(step) if isinstance(step, Request) else step for step in steps)

        self.parts = parts
        """``(scratch, stream)``: steps, and launches of the backend's own."""
