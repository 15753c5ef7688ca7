"""The view of a host's group that its own parts have: with its segment and its context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpucoll.errors import GpucollError
from gpucoll.group.host.members import Members
from gpucoll.group.protocol import Group


class Inside(Group, Protocol):
    """The group that diagnosis and recovery work on; `HostGroup` is one.

    Attributes
    ----------
    members : Members
        What the ranks share.
    context : array
        The words of this rank that every compiled loop gets.
    spans_hosts : bool
        Whether calls are parts of calls that span hosts, which no rank can end alone.
    error_elsewhere : callable
        Returns the error for the abort code `ELSEWHERE`.
    lost_elsewhere, standing_elsewhere : callable
        Return the error for a lost rank of another host, and where ranks of other hosts stand.
    """

    members: Members
    context: npt.NDArray[np.int64]
    spans_hosts: bool
    error_elsewhere: Callable[[], GpucollError]
    lost_elsewhere: Callable[[int], GpucollError]
    standing_elsewhere: Callable[[list[int]], str]

    def go_on(self) -> None:
        """Let calls begin again, unless the group has been closed or has failed in the meantime."""
