"""Who came last to each collective, and how long the others waited for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.spans import SpanKind

__all__ = ["Meetings", "Register"]

Times = npt.NDArray[np.int64]
_HOST_KINDS = (SpanKind.COLLECTIVE, SpanKind.PART)


@dataclass(frozen=True)
class Meetings:
    """Collectives in which all ranks of a host have been; there are n of them, and P ranks.

    Attributes
    ----------
    calls : array of `CALL`, shape (n, P)
        By collective and rank.
    """

    calls: npt.NDArray[np.void]

    @property
    def last(self) -> Times:
        """The rank that came last to each; shape (n,)."""
        last: Times = self.calls["begun_ns"].argmax(axis=1)
        return last

    @property
    def waited_ns(self) -> Times:
        """For how long each rank waited for the last one; shape (n, P).

        A rank that does not need the last one, such as the root of a broadcast, ends before.
        """
        begun, ended = self.calls["begun_ns"], self.calls["ended_ns"]
        waited: Times = np.minimum(begun.max(axis=1, keepdims=True), ended) - begun
        return np.maximum(waited, 0)

    @property
    def held_up_ns(self) -> Times:
        """For how long each rank alone was awaited, 0 for all but the last; shape (n, P).

        That is from when the last but one came, or as long as somebody waited.
        """
        begun, ended = self.calls["begun_ns"], self.calls["ended_ns"]
        held_up: Times = np.zeros_like(begun)
        if begun.size and begun.shape[1] > 1:
            rows, last = np.arange(len(begun)), self.last
            others = np.ones_like(begun, bool)
            others[rows, last] = False
            last_but_one = np.where(others, begun, -1).max(axis=1)
            until = np.minimum(np.where(others, ended, -1).max(axis=1), begun[rows, last])
            held_up[rows, last] = np.maximum(until - last_but_one, 0)
        return held_up


class Register:
    """Puts the calls of a communicator's ranks together, as they become known.

    Parameters
    ----------
    world_size : int
        How many ranks must have been in a call.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: npt.NDArray[np.void] = np.zeros(0, CALL)

    def add(self, calls: Calls) -> Meetings:
        """Return the collectives in which all ranks have been by now.

        Others are kept until their other ranks are known, but not more of them than a rank's spans:
        if ranks have overwritten some, the rest is never complete.
        """
        found = calls.calls[np.isin(calls.calls["kind"], _HOST_KINDS)]
        found = np.concatenate([self._open, found])
        found = found[np.lexsort((found["rank"], found["sequence"]))]
        _, first, counts = np.unique(found["sequence"], return_index=True, return_counts=True)
        complete = first[counts == self._world_size]
        rows = complete[:, None] + np.arange(self._world_size)
        is_open = np.ones(len(found), bool)
        is_open[rows.ravel()] = False
        rest = found[is_open]
        most = layout.SPANS * self._world_size
        newest = np.argsort(rest["ended_ns"])[-most:]
        self._open = rest[newest]
        return Meetings(found[rows])
