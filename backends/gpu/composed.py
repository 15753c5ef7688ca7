"""Calls that are put together: of kernels, and of calls that the backend makes by itself.

Such a call is a list of steps over its arrays and a piece of scratch memory. For the other ranks,
and for who watches it, it is one call: the one that its user made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

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
