"""Which ranks of a communicator share a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpucoll.topology.host_identity import host_id

if TYPE_CHECKING:
    from gpucoll import Communicator


def colour_of_host(comm: Communicator) -> int:
    """Return the lowest rank on this rank's host."""
    everyone = comm.all_gather_object(host_id())
    return int(everyone.index(everyone[comm.rank]))
