"""Prepared collectives: the same call on the same memory, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_R = TypeVar("_R", covariant=True)


class Plan(Generic[_R]):
    """A prepared collective. Calling it runs the collective and returns its output array.

    Made by ``comm.plan_all_reduce`` and the other plan methods. It keeps its arrays alive; their
    memory must not be resized or freed meanwhile.
    """

    __slots__ = ("_raise_status", "_run", "_run_slowly", "out")

    def __init__(
        self,
        run: Callable[[], int],
        raise_status: Callable[[int], None],
        run_slowly: Callable[[], object] | None,
        out: _R,
    ) -> None:
        self._run = run
        self._raise_status = raise_status
        self._run_slowly = run_slowly
        self.out: _R = out
        """The output array: it holds the result after each call."""

    def __call__(self) -> _R:
        """Run the collective and return `out`."""
        if status := self._run():
            self._raise_status(status)
            if self._run_slowly is not None:
                self._run_slowly()
        return self.out
