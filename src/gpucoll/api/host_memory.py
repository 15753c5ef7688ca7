"""Memory that all ranks of a host share: one block on each host, for as long as one of them has it.

The block belongs to no rank. A rank that ends takes nothing with it, and ranks that join later map
the same block (`HostMemory.kept_for`). What lies in it, and in which order it is read and written,
is the caller's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.errors import SharedMemoryError
from gpucoll.topology.host_identity import host_id
from gpucoll.transport.shared import mapping
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator

__all__ = ["HostMemory"]

AnyArray: TypeAlias = npt.NDArray[Any]


class HostMemory:
    """A block of shared memory on each host of a communicator. Collective.

    Parameters
    ----------
    comm : Communicator
        Whose ranks share the memory.
    size_bytes : int
        Size of the block, the same on all ranks of a host. New memory is zero, and is taken when it
        is touched.
    name : str
        Shown in errors and in ``/proc/PID/maps``.
    before : HostMemory, optional
        Memory of this rank that becomes that of its host; see `kept_for`.

    Attributes
    ----------
    hosts : list of str
        The identity of each rank's host, by rank.
    ranks : list of int
        The ranks on this host.
    is_new : bool
        Whether no rank of this host had the memory before.
    address : int
        Where it is mapped in this process.
    fd : int
        Its file descriptor in this process, until `close`.
    is_in_use : bool
        Set if a thread that does not end may still use it: `close` then leaves it mapped.

    Raises
    ------
    SharedMemoryError
        On every rank, if a rank of any host cannot make or open it.
    """

    def __init__(
        self, comm: Communicator, size_bytes: int, name: str, before: HostMemory | None = None
    ) -> None:
        self.size_bytes, self.name, self.fd = size_bytes, name, -1
        self._mapping: mapping.Mapping | None = None
        self.is_in_use = False
        try:
            self._open(comm, before)
        except BaseException:
            self.close()
            raise

    def _open(self, comm: Communicator, before: HostMemory | None) -> None:
        """Make or open the memory, and map it. Collective."""
        size_bytes, name = self.size_bytes, self.name
        found = comm.all_gather_object((host_id(), before is not None))
        self.hosts = [host for host, _ in found]
        self.ranks = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[comm.rank]]
        owners = [rank for rank in self.ranks if found[rank][1]]
        self.is_new = not owners
        owner = (owners or self.ranks)[0]
        if owner == comm.rank and before is None:
            trouble = self._tried(lambda: mapping.create(f"gpucoll-{name}", size_bytes))
        elif before is not None:
            trouble = self._tried(lambda: os.dup(before.fd))
        else:
            trouble = ""
        places = comm.all_gather_object(f"/proc/{os.getpid()}/fd/{self.fd}")
        if self.fd < 0 and not trouble:
            trouble = self._tried(lambda: os.open(places[owner], os.O_RDWR | os.O_CLOEXEC))
        if self.fd >= 0:
            trouble = self._tried_to_map()
        for rank, text in enumerate(comm.all_gather_object(trouble)):
            if text:
                raise SharedMemoryError(
                    f"{rank_of(rank, comm.world_size)} has no memory for {self.name}: {text}"
                )

    def _tried(self, make: Callable[[], int]) -> str:
        """Set the descriptor; return why there is none, or an empty string."""
        try:
            self.fd = make()
        except (OSError, OverflowError, SharedMemoryError) as error:
            return str(error)
        return ""

    def _tried_to_map(self) -> str:
        """Map the memory; return why it cannot be, or an empty string."""
        try:
            self._mapping = mapping.Mapping(self.fd, self.size_bytes, self.name)
            self.address = self._mapping.address
        except SharedMemoryError as error:
            return str(error)
        return ""

    def kept_for(self, comm: Communicator) -> HostMemory:
        """Return this memory for the ranks of another communicator. Collective over them.

        Ranks that have none, since they joined, make ``HostMemory(comm, ...)`` at the same time.
        """
        return HostMemory(comm, self.size_bytes, self.name, self)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """Return a view from a byte offset on. It must not be used after `close`."""
        view = array_at(self.address + offset, shape, np.dtype(dtype))
        assert 0 <= offset <= offset + view.nbytes <= self.size_bytes
        return view

    def close(self) -> None:
        """Release this rank's part in it. Closing twice does nothing."""
        if self._mapping is not None and not self.is_in_use:
            self._mapping.unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
