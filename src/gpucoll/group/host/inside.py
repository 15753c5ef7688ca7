"""A group of one host as its own parts see it: with its segment and its context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpucoll.errors import GpucollError
from gpucoll.group.host.members import Members
from gpucoll.group.protocol import Group


class Inside(Group, Protocol):
    """What diagnosis and recovery work on; `HostGroup` is one.

    Attributes
    ----------
    members : Members
        What the ranks share.
    context : array
        The words of this rank that compiled loops get.
    spans_hosts : bool
        Whether calls are parts of calls of several hosts, none of which a rank ends alone.
    error_elsewhere : callable
        Returns the error that the abort code `ELSEWHERE` stands for.
    lost_elsewhere, standing_elsewhere : callable
        Return the error for a rank of another host that is lost, and where such ranks stand.
    """

    members: Members
    context: npt.NDArray[np.int64]
    spans_hosts: bool
    error_elsewhere: Callable[[], GpucollError]
    lost_elsewhere: Callable[[int], GpucollError]
    standing_elsewhere: Callable[[list[int]], str]

    def go_on(self) -> None:
        """Let calls begin again, unless this was closed, or has failed, meanwhile."""
