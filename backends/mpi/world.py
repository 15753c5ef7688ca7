"""Host arrays of several hosts through MPI, which both compares and moves.

Leaders exchange the calls of their hosts' ranks by MPI messages. Small data is sent with them, as
between leaders over TCP (`gpucoll.transport.tcp.small_calls`). Large data is moved afterwards by
all ranks, in the loop for one host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.cpu.world.backend import WorldCpuBackend
from gpucoll.backends.cpu.world.phases import Phases
from gpucoll.backends.cpu.world.small import SmallCall
from gpucoll.backends.mpi.backend import (
    PROMISES,
    BlockMakers,
    Memory,
    MpiCall,
    brought_together,
    described_mpi,
)
from gpucoll.backends.mpi.carriers import Carriers
from gpucoll.backends.mpi.collectives import mpi_call
from gpucoll.backends.mpi.exchange import go_on_by_mpi
from gpucoll.backends.mpi.ranks import MpiRanks
from gpucoll.backends.protocol import HostBackend, NotStarted, PreparedCall, Request, RunByPython
from gpucoll.collectives import Collective
from gpucoll.group.world.exchanges import MOST_BYTES_BY_MPI
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared.words import Status
from gpucoll.wording import rank_of

_OVER_MPI = (
    "the first rank of each host compares calls with the others by MPI; up to "
    f"{MOST_BYTES_BY_MPI} bytes of all ranks together are sent with that, more by MPI after it"
)
_MESSAGES = "on a host through shared memory, between hosts through MPI"


class WorldMpiCall(NotStarted):
    """A prepared call, completely compiled.

    Parameters
    ----------
    call : SmallCall
        The call on the path of small calls, on which large ones begin; this object owns it.
    memory : Memory
        The communicator's memory.
    """

    def __init__(self, call: SmallCall, memory: Memory) -> None:
        self._call = call
        self._memory = memory

    def run_once(self) -> int:
        """Run the call if nothing prevents it; return 0, or a status that Python must handle."""
        status = None
        try:
            status = self._call.run_once()
        finally:  # after a Ctrl-C, too
            if status != Status.OK:
                self._memory.keep_given_up(self._call)
        return status

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        try:
            self._call.run(timeout_s)
        except BaseException:
            self._memory.keep_given_up(self._call)
            raise


class WorldMpiCallInPhases(RunByPython):
    """A prepared call on GPU arrays: the leaders agree, then MPI does the rest."""

    def __init__(self, phases: Phases, call: MpiCall) -> None:
        self._phases = phases
        self._call = call

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        with self._phases.begun(timeout_s) as run:
            run.agree()
            self._call.run(run.call.left_s)


class WorldMpiBackend(WorldCpuBackend):
    """Moves host buffers between ranks on several hosts.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    ranks : MpiRanks
        The same ranks, as an MPI communicator; this object owns it from here on.
    """

    def __init__(self, group: WorldGroup, ranks: MpiRanks) -> None:
        who, exchanges = rank_of(group.rank, group.world_size), group.exchanges
        self._memory = Memory(group.host, ranks, who, exchanges)
        self._mpi_blocks = BlockMakers(group, self._memory.words)
        words = self._memory.words()
        super().__init__(group, self._mpi_blocks.host, Carriers(words))
        self._memory.end_messages = self.messages.end
        carrier = words.words.ctypes.data
        leaders = [group.hosts.leader_of(host) for host in range(group.hosts.count)]
        exchanges.carry_by(go_on_by_mpi.address, carrier, leaders, mpi_call.address)

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective."""
        block = self._mpi_blocks.of(request)
        if request.data.device == HOST_ARRAYS:
            return WorldMpiCall(SmallCall(self._group, block, request), self._memory)
        call = MpiCall(self._group.host, self._memory, block, request)
        return WorldMpiCallInPhases(self._phases(request), call)

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry of a collective."""
        call = super().entry(collective, of_blocks=of_blocks)
        return self._memory.kept_where_given_up(call)

    def describe(self) -> dict[str, str]:
        """Return facts about how arrays move, for the user: name -> sentence."""
        facts = super().describe()
        mpi = {"messages": _MESSAGES, "MPI": described_mpi()}
        return {**facts, "between hosts": _OVER_MPI, **mpi, **PROMISES}


def create(group: Any, over_mpi: Callable[[], MpiRanks] | None) -> HostBackend:
    """Return this backend for the ranks of several hosts."""
    group.over_mpi = brought_together(over_mpi)
    return WorldMpiBackend(group, group.over_mpi)
