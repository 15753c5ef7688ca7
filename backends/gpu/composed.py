"""Composed calls: sequences of kernels and of calls that the backend makes itself.

A composed call is a list of steps over its arrays and a piece of scratch memory. To the other
ranks and to the monitor it is one call: the one that the user made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gpucoll.backends.gpu.steps import Step
from gpucoll.backends.protocol import Request


class Composed(NamedTuple):
    """A call that consists of several steps.

    Attributes
    ----------
    steps : callable
        Returns the steps in order, given the address of the scratch memory and the stream. A step
        is something to enqueue, or a request that the backend can do without scratch memory. The
        steps are kept until they are done.
    scratch_bytes : int
        Size of the scratch memory that the call needs.
    """

    steps: Callable[[int, int], Iterable[Step | Request]]
    scratch_bytes: int


class ComposedLaunch:
    """The steps of a composed call, made anew only for other scratch memory or another stream.

    Parameters
    ----------
    composed : Composed
    prepare : callable
        Returns the backend's launch for a request.
    """

    def __init__(self, composed: Composed, prepare: Callable[[Request], Any]) -> None:
        self.scratch_bytes = composed.scratch_bytes

        @functools.lru_cache(maxsize=1)
        def parts(scratch: int, stream: int) -> tuple[Any, ...]:
            steps = composed.steps(scratch, stream)
            return tuple(prepare(step) if isinstance(step, Request) else step for step in steps)

        self.parts = parts
        """``(scratch, stream)``: returns the steps, with a launch in place of each request."""
