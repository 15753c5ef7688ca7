"""Host arrays of several hosts through MPI: the ranks agree on a call over the links, MPI moves it.

What is small goes with the agreement itself, in one exchange of the leaders': by MPI it would come
after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.cpu.world.backend import WorldCpuBackend
from gpucoll.backends.cpu.world.phases import Phases
from gpucoll.backends.cpu.world.sizes import LARGE_BYTES
from gpucoll.backends.mpi.backend import PROMISES, Memory, MpiCall, brought_together, described_mpi
from gpucoll.backends.mpi.blocks import BlockMakers
from gpucoll.backends.mpi.carriers import Carriers
from gpucoll.backends.mpi.ranks import MpiRanks
from gpucoll.backends.protocol import HostBackend, PreparedCall, Request
from gpucoll.group.protocol import StartedCalls
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared.words import Status
from gpucoll.wording import rank_of


class WorldMpiCall:
    """A prepared call: all ranks agree, then it is MPI's."""

    def __init__(self, phases: Phases, call: MpiCall) -> None:
        self._phases = phases
        self._call = call

    def run_once(self) -> int:
        """Return `Status.NOT_RUN`: these calls need Python in their middle."""
        return int(Status.NOT_RUN)

    def run(self, timeout_s: float | None = None) -> None:
        """Do it; raise what went wrong."""
        with self._phases.begun(timeout_s) as run:
            run.agree()
            self._call.run(run.call.left_s)

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Return 0: what is started is run by a thread of Python's, or by who waits for it."""
        return 0


class WorldMpiBackend(WorldCpuBackend):
    """Host buffers of ranks on several hosts.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    ranks : MpiRanks
        The same ranks, as MPI knows them; belongs to this from here on.
    """

    def __init__(self, group: WorldGroup, ranks: MpiRanks) -> None:
        self._memory = Memory(group.host, ranks, rank_of(group.rank, group.world_size))
        super().__init__(group, Carriers(self._memory.words()))
        self._memory.end_messages = self.messages.end
        self._mpi_blocks = BlockMakers(group, self._memory.words)

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective."""
        if request.data.device != HOST_ARRAYS:  # small ones, too: the host does not read them
            return self._in_phases(request)
        return super().prepare(request)

    def _in_phases(self, request: Request) -> PreparedCall:
        block = self._mpi_blocks.of(request)
        call = MpiCall(self._group.host, self._memory, block, request)
        signature = self._signature_of(request)
        return WorldMpiCall(Phases(self._group, self._host, signature, request), call)

    def describe(self) -> dict[str, str]:
        """Return how arrays move, in words."""
        facts = super().describe()
        between = (
            f"up to {LARGE_BYTES} bytes of all ranks together through the first rank of each host, "
            "over TCP, in the exchange in which they agree on the call; more by MPI"
        )
        messages = "on a host through shared memory, between hosts through MPI"
        mpi = {"messages": messages, "MPI": described_mpi()}
        return {**facts, "between hosts": between, **mpi, **PROMISES}


def create(group: Any, over_mpi: Callable[[], MpiRanks] | None) -> HostBackend:
    """Return this backend for the ranks of several hosts."""
    group.over_mpi = brought_together(over_mpi)
    return WorldMpiBackend(group, group.over_mpi)
