"""The CPU backend between hosts: the data of each host's ranks goes through its leader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.backend import BlockMaker, CpuBackend
from gpucoll.backends.cpu.world.in_order import CallInOrder, is_combined_in_order
from gpucoll.backends.cpu.world.message_wires import Carriers
from gpucoll.backends.cpu.world.messages import WorldMessages
from gpucoll.backends.cpu.world.phases import Phases, Run, Signature
from gpucoll.backends.cpu.world.small import SmallCall, SmallEntries
from gpucoll.backends.protocol import (
    HostBackend,
    HostMessages,
    PreparedCall,
    Request,
    RunByPython,
    row_of,
)
from gpucoll.collectives import Collective
from gpucoll.group.world.group import WorldGroup

_MOST_SIGNATURES = 256
PROMISES = {
    "same bits on every rank": "yes",
    "same bits run after run": "yes, with the same ranks on the same hosts",
    "same bits whatever size, chunks and placement": "no: large arrays are combined host by host",
    "half types": "accumulated in float32; in large arrays a host's part is rounded once more",
}
"""What this backend promises of rounding and reproducibility; `Communicator.describe` shows it."""
IN_ORDER = {
    "same bits whatever size, chunks and placement": "yes: in the order of the ranks, as asked for",
    "half types": "accumulated in float32, rounded once",
}
"""The promises that differ with ``deterministic="order"``."""


@functools.cache
def large_calls() -> Mapping[Collective, Callable[[Run], None]]:
    """Return how large calls run. Schedules are imported when a process makes its first one."""
    from gpucoll.backends.cpu.world.large_movements import LARGE_MOVEMENTS
    from gpucoll.backends.cpu.world.large_reductions import LARGE_REDUCTIONS
    from gpucoll.backends.cpu.world.large_scans import LARGE_SCANS

    return LARGE_REDUCTIONS | LARGE_MOVEMENTS | LARGE_SCANS


class LargeCall(RunByPython):
    """A prepared large call of all hosts, in phases that Python runs.

    Parameters
    ----------
    phases : Phases
        The call.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._steps = row_of(large_calls(), phases.request.collective, "between hosts")

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        with self._phases.begun(timeout_s) as run:
            self._steps(run)


class WorldCpuBackend:
    """Moves host buffers between ranks on several hosts.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    blocks : BlockMaker, optional
        Makes the call blocks, if others than the CPU backend's are needed.
    carriers : Carriers, optional
        Moves messages between hosts in place of connections; this backend owns it.
    """

    def __init__(
        self, group: WorldGroup, blocks: BlockMaker | None = None, carriers: Carriers | None = None
    ) -> None:
        self._group = group
        messages = WorldMessages(group, carriers)
        self._host = CpuBackend(group.host, messages)
        self.last_status = group.host.last_status
        self._blocks = blocks or BlockMaker(group.rank, group.world_size)
        self._entries = SmallEntries(group, self._blocks)
        self.messages: HostMessages = messages
        self._signatures: dict[object, Signature] = {}
        """Signatures of kinds of calls, oldest first; none of them keeps an array alive."""

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective."""
        if request.receive_counts is not None:
            from gpucoll.backends.cpu.world.uneven import UnevenAllToAll

            return UnevenAllToAll(self._phases(request), self.prepare)
        block = self._blocks.of(request)
        if not self._group.exchanges.is_large(block):
            return SmallCall(self._group, block, request)
        if is_combined_in_order(request, self._group):
            part_of = self._signature_of(request).part_of
            return CallInOrder(self._group, self._blocks, request, part_of)
        return LargeCall(self._phases(request))

    def _phases(self, request: Request) -> Phases:
        return Phases(self._group, self._host, self._signature_of(request), request)

    def _signature_of(self, request: Request) -> Signature:
        """Return a call's signature; ArgumentTypeError if the dtype lacks the op."""
        if request.sources or request.destinations or request.parts:
            return self._sign(request)
        op = request.op
        key = (
            request.collective,
            _kind_of(request.source),
            _kind_of(request.destination),
            op,
            op and op.parameter_bits,
            request.root,
            request.counts,
            request.receive_counts,
            request.row_count,
            request.part_of,
            request.keeps,
            request.label,
        )
        signature = self._signatures.get(key)
        if signature is None:
            source = _without_memory(request.source)
            bare = request._replace(source=source, destination=_without_memory(request.destination))
            if len(self._signatures) >= _MOST_SIGNATURES:
                del self._signatures[next(iter(self._signatures))]
            signature = self._signatures[key] = self._sign(bare)
        return signature

    def _sign(self, request: Request) -> Signature:
        n_here = len(self._group.hosts.ranks[self._group.here])
        return Signature(self._blocks.of(request), request, self._host, n_here)

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry of a collective."""
        return self._entries.serve_nothing if of_blocks else self._entries.entry(collective)

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return an entry that starts nothing."""
        return self._entries.serve_nothing

    def learn(
        self,
        collective: Collective,
        kind: ArrayKind,
        op: Any,
        root: Any,
        *,
        of_blocks: bool = False,
    ) -> None:
        """Make the compiled entry serve arrays of this kind with these arguments from now on."""
        if not of_blocks:
            self._entries.learn(collective, kind, op, root)

    def native_table(self, collective: Collective) -> int:
        """Return the address of the entry's table; 0 for lists."""
        return self._entries.native_table(collective)

    def object_entry(self, request: Request) -> None:
        """Return None: no entry serves objects here."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in this rank's arena."""
        return self._host.empty(shape, dtype)

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a context in which every new NumPy array lies in memory like that of `empty`."""
        return self._host.shared_arrays()

    def describe(self) -> dict[str, str]:
        """Return how arrays move between hosts, and inside this one."""
        inside = {
            f"inside this host: {name}": fact
            for name, fact in self._host.describe().items()
            if name not in PROMISES and name != "messages"
        }
        guarded = "encrypted" if self._group.is_encrypted else "plain"
        between = (
            f"through the first rank of each; up to {self._group.exchanges.most_compiled_bytes()} "
            "bytes of all ranks together in compiled calls, more by schedules, over "
            f"{guarded} TCP connections"
        )
        messages = (
            "directly from rank to rank: through shared memory inside a host, between hosts over a "
            f"TCP connection of the pair's own, {guarded}; objects in frames with a MAC"
        )
        promises = PROMISES | (IN_ORDER if self._group.keeps_order else {})
        return {"between hosts": between, "messages": messages, **inside, **promises}


def _kind_of(buffer: Buffer | None) -> tuple[object, ...]:
    """Return the properties that calls of one kind share."""
    return () if buffer is None else (buffer.shape, buffer.dtype, buffer.item_bytes)


def _without_memory(buffer: Buffer | None) -> Buffer | None:
    """Return a buffer with the same properties but no address."""
    if buffer is None:
        return None
    return Buffer(0, buffer.shape, buffer.dtype, buffer.item_bytes, None)


def create(group: WorldGroup) -> HostBackend:
    """Return this backend for a group: `gpucoll.backends.protocol.HostBackends`."""
    return WorldCpuBackend(group)
