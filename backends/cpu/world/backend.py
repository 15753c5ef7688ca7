"""The CPU backend between hosts: the data of each host's ranks goes through its leader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.backend import BlockMaker, CpuBackend
from gpucoll.backends.cpu.world.large_movements import LARGE_MOVEMENTS
from gpucoll.backends.cpu.world.large_reductions import LARGE_REDUCTIONS
from gpucoll.backends.cpu.world.large_scans import LARGE_SCANS
from gpucoll.backends.cpu.world.message_wires import Carriers
from gpucoll.backends.cpu.world.messages import WorldMessages
from gpucoll.backends.cpu.world.movements import MOVEMENTS
from gpucoll.backends.cpu.world.phases import Phases, Signature
from gpucoll.backends.cpu.world.reductions import REDUCTIONS
from gpucoll.backends.cpu.world.sizes import LARGE_BYTES, is_large
from gpucoll.backends.cpu.world.small import SmallCall, SmallEntries, may_be_small
from gpucoll.backends.protocol import HostBackend, HostMessages, PreparedCall, Request, row_of
from gpucoll.collectives import Collective
from gpucoll.group.protocol import StartedCalls
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared.words import Status

_MOST_SIGNATURES = 256
PROMISES = {
    "same bits on every rank": "yes",
    "same bits run after run": "yes, with the same ranks on the same hosts",
    "same bits whatever size, chunks and placement": "no: larger arrays are combined host by host",
    "half types": "accumulated in float32; in larger arrays a host's part is rounded once more",
}
"""What this backend promises of rounding and reproducibility; `Communicator.describe` shows it."""
IN_ORDER = {
    "same bits whatever size, chunks and placement": "yes: in the order of the ranks, as asked for",
    "half types": "accumulated in float32, rounded once",
}
"""The promises that differ with ``deterministic="order"``."""


class SmallFirst:
    """A prepared call that takes the path of small calls unless it turns out to be large."""

    def __init__(self, small: SmallCall, prepare: Callable[[], PreparedCall]) -> None:
        self._small = small
        self._prepare = prepare
        self._large: PreparedCall | None = None
        self.run_once = small.run_once

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        if self._large is None:
            if self._small.run(timeout_s):
                return
            self._large = self._prepare()
        self._large.run(timeout_s)

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Return 0: a Python thread runs started calls."""
        return 0


class WorldCpuCall:
    """A prepared call of all hosts, in phases that Python runs."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        request, group = phases.request, phases.group
        op, dtype = request.op, request.data.dtype
        steps = row_of(REDUCTIONS | MOVEMENTS, request.collective, "between hosts")
        keeps_order = group.keeps_order and op is not None and op.depends_on_order(dtype)
        if is_large(request, group.hosts, group.is_encrypted) and not keeps_order:
            larger = LARGE_REDUCTIONS | LARGE_MOVEMENTS | LARGE_SCANS
            steps = larger.get(request.collective, steps)
        self._steps = steps

    def run_once(self) -> int:
        """Return `Status.NOT_RUN`: Python has a part in the middle of these calls."""
        return _not_run()

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        with self._phases.begun(timeout_s) as run:
            self._steps(run)

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Return 0: a Python thread runs started calls."""
        return 0


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
        self.last_status: Callable[[], int] = _not_run
        self._entries: SmallEntries | None = None
        self._blocks = blocks or BlockMaker(group.rank, group.world_size)
        self.messages: HostMessages = messages
        self._signatures: dict[object, Signature] = {}
        """Signatures of kinds of calls, oldest first; none of them keeps an array alive."""
        if group.exchanges is not None:
            self._entries = SmallEntries(group, group.exchanges, self._blocks)
            self.last_status = group.host.last_status

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective."""
        exchanges = self._group.exchanges
        if exchanges is None or not may_be_small(request):
            return self._in_phases(request)
        small = SmallCall(self._group, exchanges, self._blocks.of(request), request)
        return SmallFirst(small, lambda: self._in_phases(request))

    def _in_phases(self, request: Request) -> PreparedCall:
        signature = self._signature_of(request)
        return WorldCpuCall(Phases(self._group, self._host, signature, request))

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
        )
        signature = self._signatures.get(key)
        if signature is None:
            source = _without_memory(request.source)
            bare = replace(request, source=source, destination=_without_memory(request.destination))
            if len(self._signatures) >= _MOST_SIGNATURES:
                del self._signatures[next(iter(self._signatures))]
            signature = self._signatures[key] = self._sign(bare)
        return signature

    def _sign(self, request: Request) -> Signature:
        n_here = len(self._group.hosts.ranks[self._group.here])
        return Signature(self._blocks.of(request), request, self._host, n_here)

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry of a collective."""
        if self._entries is None:
            return _serve_nothing
        return self._entries.serve_nothing if of_blocks else self._entries.entry(collective)

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return an entry that starts nothing."""
        return _serve_nothing if self._entries is None else self._entries.serve_nothing

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
        if self._entries is not None and not of_blocks:
            self._entries.learn(collective, kind, op, root)

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
            f"through the first rank of each; up to {LARGE_BYTES} bytes of all ranks together in "
            f"one exchange, more by schedules, over {guarded} TCP connections"
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


def _not_run() -> int:
    return int(Status.NOT_RUN)


def _serve_nothing(*_: object) -> None:
    return None


def create(group: WorldGroup) -> HostBackend:
    """Return this backend for a group: `gpucoll.backends.protocol.HostBackends`."""
    return WorldCpuBackend(group)
