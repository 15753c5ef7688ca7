"""The CPU backend: call blocks for host buffers, and the compiled entries of small calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.numpy_arrays import check_dtype, dtype_of
from gpucoll.backends.cpu.host.blocks import BlockMaker
from gpucoll.backends.cpu.host.entry_tables import BlockEntryTable, EntryTable, ListEntryTable
from gpucoll.backends.cpu.host.message_table import MessageTable
from gpucoll.backends.protocol import HostBackend, Request
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.protocol import StartedCalls
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Path
from gpucoll.types import ReduceOp

PROMISES = {
    "same bits on every rank": "yes: ranks are combined in order 0..P-1",
    "same bits run after run": "yes",
    "same bits whatever size, chunks and placement": "yes",
    "half types": "accumulated in float32, rounded once",
}
"""What this backend promises of rounding and reproducibility; `Communicator.describe` shows it."""


class CpuCall:
    """A prepared call of this backend: one built-in over one call block."""

    def __init__(self, group: HostGroup, block: CallBlock, request: Request) -> None:
        self._group = group
        self._block = block
        self._request = request
        self.run_once = group.prepare(block)
        """Runs the call unless asynchronous calls are queued; returns its `Status`."""
        self._run_queued: Callable[[], int] | None = None

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        if self._run_queued is None:
            self._run_queued = self._group.prepare(self._block, queued=True)
        self._group.run_prepared(self._run_queued, timeout_s)

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Start the call in the group's queue; return its number, or 0 if there is no room."""
        request = self._request
        reads: list[Buffer | None] = [*request.sources, *(source for source, _ in request.parts)]
        writes: list[Buffer | None] = [*request.destinations, *(out for _, out in request.parts)]
        self._block.set_extents(
            _areas(reads or [request.source]), _areas(writes or [request.destination])
        )
        return started.start(self._block, self._group.timeout_s if timeout_s is None else timeout_s)


def _areas(buffers: Sequence[Buffer | None]) -> list[tuple[int, int]]:
    """Return address and size of each buffer."""
    return [(buffer.address, buffer.size_bytes) for buffer in buffers if buffer is not None]


class CpuBackend:
    """Moves host buffers between the ranks of one host.

    Parameters
    ----------
    group : HostGroup
        The ranks, around their segment.
    messages : MessageTable, optional
        Moves messages, if they go beyond these ranks.
    """

    def __init__(self, group: HostGroup, messages: MessageTable | None = None) -> None:
        self._group = group
        self.last_status = group.last_status
        self._blocks = BlockMaker(group.rank, group.world_size)
        self._entries: dict[tuple[Collective, bool], EntryTable] = {}
        self.messages = messages or MessageTable(group)

    def prepare(self, request: Request) -> CpuCall:
        """Prepare a collective."""
        return CpuCall(self._group, self._blocks.of(request), request)

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry of a collective."""
        kind = ListEntryTable if collective.is_list else EntryTable
        key = collective, of_blocks
        if key not in self._entries:
            self._entries[key] = (BlockEntryTable if of_blocks else kind)(self._group)
        return self._entries[key].call

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return the entry that starts a collective."""
        return self._entries[collective, False].starter()

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

        def make() -> CallBlock:
            parsed = None if op is None else ReduceOp.parse(op)
            place = NO_ROOT if root is None else root
            return self._blocks.plain(collective, kind.dtype, kind.item_bytes, parsed, place)

        self._entries[collective, of_blocks].learn(
            kind.native, op, root, make, key=kind.key, tensor_table=kind.tensor_table
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in this rank's arena."""
        kind = dtype_of(dtype)
        check_dtype(kind, "empty")
        try:
            return self._group.members.arena.array(shape, kind)
        except ValueError as error:  # more dimensions than NumPy allows, or too many bytes
            raise ArgumentError(f"empty: shape {shape} is not possible: {error}") from None

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a context in which every new NumPy array lies in memory like that of `empty`."""
        return self._group.members.arena.shared_arrays()

    def last_path(self) -> Path:
        """Return the path that this rank's last call took."""
        return Path(int(self._group.path))

    def describe(self) -> dict[str, str]:
        """Return the agreed thresholds as sentences."""
        tuning = self._group.members.tuning
        from_root = tuning.root_copy_min_bytes
        return {
            "small private arrays": f"one-shot, up to {tuning.one_shot_bytes} bytes",
            "larger private arrays": f"staged, in chunks of {tuning.chunk_bytes} bytes",
            "large private movements": f"single copy where the kernel allows it, from "
            f"{tuning.single_copy_min_bytes} bytes"
            + (f", from a root {from_root}" if from_root else ""),
            "slots and stages are filled by": "the string instruction"
            if tuning.string_copies
            else "vector instructions",
            "messages": f"eager up to {self._group.members.layout.eager_bytes} bytes, while no "
            f"more than {tuning.eager_room_bytes} bytes are queued at a receiver",
            "arrays of comm.empty": f"symmetric, from {tuning.symmetric_min_bytes} bytes",
            "prefetch": f"{tuning.prefetch_bytes} bytes ahead",
            "last call on this rank": self.last_path().spelled,
            **PROMISES,
        }


def create(group: HostGroup) -> HostBackend:
    """Return this backend for a group: `gpucoll.backends.protocol.HostBackends`."""
    return CpuBackend(group)
