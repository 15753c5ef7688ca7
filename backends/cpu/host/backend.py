"""The CPU backend: call blocks for host buffers, and the compiled entries of small calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.numpy_arrays import check_dtype, dtype_of
from gpucoll.backends.cpu.host.entry_tables import (
    BlockEntryTable,
    EntryTable,
    ListEntryTable,
    ObjectEntry,
)
from gpucoll.backends.cpu.host.message_table import MessageTable
from gpucoll.backends.cpu.host.movements import movement_finish, movement_loop, movement_post
from gpucoll.backends.cpu.host.reductions import reduction_finish, reduction_loop, reduction_post
from gpucoll.backends.protocol import HostBackend, Request
from gpucoll.backends.protocol import ObjectEntry as ObjectCall
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.protocol import StartedCalls
from gpucoll.kernels.cpu.addresses import (
    changes_inputs,
    keeping_kernel,
    parameter_for,
    parts_per_element,
    reduce_kernel,
    scan_kernel,
)
from gpucoll.kernels.cpu.identities import exact_identity, identity_of
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import UNKNOWN_BYTES
from gpucoll.transport.shared.words import Call, Path
from gpucoll.types import ReduceOp, mix_digest

INT8_MAX = 127
_MOVEMENT = movement_loop, movement_post, movement_finish
_REDUCTION = reduction_loop, reduction_post, reduction_finish
PROMISES = {
    "same bits on every rank": "yes: ranks are combined in order 0..P-1",
    "same bits run after run": "yes",
    "same bits whatever size, chunks and placement": "yes",
    "half types": "accumulated in float32, rounded once",
}
"""What this backend promises of rounding and reproducibility; `Communicator.describe` shows it."""

_NONTEMPORAL = (
    "",
    ", or by non-temporal stores while those are faster",
    ", or non-temporal stores",
)
"""What `Tuning.nontemporal_fills` means."""


def _moves_blocks(collective: Collective) -> bool:
    """Return whether the loop of movements serves it; it also combines blocks."""
    return collective.has_blocks or not collective.reduces


class BlockMaker:
    """Makes the call blocks of one rank.

    Parameters
    ----------
    rank, world_size : int
        The rank, and the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    def plain(
        self,
        collective: Collective,
        dtype: str,
        item_bytes: int,
        op: ReduceOp | None = None,
        root: int = NO_ROOT,
        *,
        keeps: bool = False,
    ) -> CallBlock:
        """Return the block of a call whose arrays are not known yet. For `keeps` see `Request`."""
        loop, *parts = _MOVEMENT if _moves_blocks(collective) else _REDUCTION
        block = CallBlock(
            collective, loop.address, dtype=dtype, item_bytes=item_bytes, op=op, root=root
        )
        block.words[Call.post], block.words[Call.finish] = (part.address for part in parts)
        block.words[Call.flow], block.words[Call.operands] = collective.flow, collective.operands
        if op is not None:
            self._set_kernel(block, collective, dtype, op, keeps)
        if _moves_blocks(collective):
            self._set_movement(block, collective, root)
        return block

    def _set_kernel(
        self, block: CallBlock, collective: Collective, dtype: str, op: ReduceOp, keeps: bool
    ) -> None:
        op.check_dtype(dtype)
        if op.function is not None:
            self._set_custom_kernel(block, collective, dtype, op)
            return
        self._check_divisor(block, dtype, op)
        scans, words = collective.is_scan, block.words
        if op.name == "avg":
            divisors = range(1, self._world_size + 1) if scans else [self._world_size]
            parameter = parameter_for(dtype, divisors)
            words[Call.parameter_stride] = parameter.itemsize if scans else 0
        else:
            parameter = parameter_for(dtype, [op.factor or 0])
        words[Call.parameter] = parameter.ctypes.data
        words[Call.kernel] = keeping_kernel(op.name) if keeps else reduce_kernel(dtype, op.name)
        words[Call.prepares] = changes_inputs(op.name)
        words[Call.part_bytes] //= parts_per_element(dtype)
        block.keep += (parameter,)
        if scans:
            exclusive = collective.excludes_own
            words[Call.scan_kernel] = scan_kernel(dtype, op.name, exclusive)
            if exclusive:
                identity = identity_of(dtype, op.name)
                words[Call.identity] = identity.ctypes.data
                block.keep += (identity,)

    def _set_custom_kernel(
        self, block: CallBlock, collective: Collective, dtype: str, op: ReduceOp
    ) -> None:
        words = block.words
        if collective.excludes_own:
            identity = exact_identity(op.identity, dtype, str(op))
            words[Call.identity] = identity.ctypes.data
            block.keep += (identity,)
        from gpucoll.kernels.cpu.custom import custom_kernel  # imports Numba

        kernel = custom_kernel(op, dtype)
        words[Call.kernel] = kernel.address
        block.keep += (kernel,)
        if collective.is_scan:
            scan = custom_kernel(op, dtype, collective.spelled)
            words[Call.scan_kernel] = scan.address
            block.keep += (scan,)

    def _check_divisor(self, block: CallBlock, dtype: str, op: ReduceOp) -> None:
        if op.name == "avg" and block.words[Call.item_bytes] == 1 and self._world_size > INT8_MAX:
            raise ArgumentTypeError(
                f"avg of {dtype} over {self._world_size} ranks: the number of ranks does not "
                "fit into the dtype; convert to a wider one first"
            )

    def _set_movement(self, block: CallBlock, collective: Collective, root: int) -> None:
        words = block.words
        words[Call.spreads] = collective.spreads
        words[Call.gathers] = collective.gathers
        words[Call.signs_count] = collective.knows_one_block
        everyone = self._world_size
        words[Call.largest_parts] = everyone if collective.spreads else 1
        if collective.has_root and self._rank != root:
            return  # its only array, a gather's input or a scatter's output, is one block
        words[Call.source_parts] = everyone if collective.spreads else 1
        words[Call.destination_parts] = everyone if collective.gathers else 1
        words[Call.in_place_block] = self._rank * (collective.gathers - collective.spreads)

    def of(self, request: Request) -> CallBlock:
        """Return the block of a request."""
        data = request.data
        block = self.plain(
            request.collective,
            data.dtype,
            data.item_bytes,
            request.op,
            request.root,
            keeps=request.keeps,
        )
        source, destination = request.source, request.destination
        block.set_arrays(
            data.shape,
            source.address if source else 0,
            destination.address if destination else 0,
            (source and source.owner, destination and destination.owner),
        )
        if _moves_blocks(request.collective):
            self._set_blocks(block, request)
        if request.sources:
            self._set_addresses(block, Call.inputs, request.sources)
        if request.destinations:
            self._set_addresses(block, Call.landings, request.destinations)
            block.words[Call.destination] = 0
        if request.parts:
            self._set_parts(block, request)
        if (whole := request.part_of) is not None:
            block.set_call(whole.collective, whole.dtype, whole.op, request.root, whole.detail)
            if whole.root is not None:
                block.words[Call.shown_root] = whole.root
                block.words[Call.n_counts] = len(whole.counts)
                block.set_table(Call.counts, whole.counts)
            block.sign(*whole.numbers)
            block.show_shape(whole.shape)
        if request.label:
            block.words[Call.digest] = mix_digest(int(block.words[Call.digest]), request.label)
        return block

    def _set_addresses(self, block: CallBlock, field: int, buffers: tuple[Buffer, ...]) -> None:
        """Set the addresses of an input or output of one array per rank."""
        block.set_table(field, [buffer.address for buffer in buffers])
        block.keep += tuple(buffer.owner for buffer in buffers)

    def _set_parts(self, block: CallBlock, request: Request) -> None:
        """Describe a list of arrays, as `entries.lists` does."""
        rows, end = [], 0
        for source, destination in request.parts:
            rows += [end + source.size_bytes, source.address - end, destination.address - end]
            end += source.size_bytes
            block.keep += (source.owner, destination.owner)
        words = block.words
        block.sign_list([source.shape for source, _ in request.parts])
        words[Call.size_bytes] = end
        words[Call.count] = end // request.data.item_bytes
        words[Call.n_segments] = len(request.parts)
        block.set_table(Call.segments, rows)

    def _set_blocks(self, block: CallBlock, request: Request) -> None:
        collective, words, source = request.collective, block.words, request.source
        words[Call.size_bytes] = source.size_bytes if source else 0
        if request.counts is not None:
            self._set_counts(block, request)
            return
        whole = collective.spreads and source is not None
        block_bytes = request.data.size_bytes // (self._world_size if whole else 1)
        words[Call.block_bytes] = block_bytes
        words[Call.largest_bytes] = block_bytes * int(words[Call.largest_parts])
        if collective.knows_one_block:
            count = block_bytes // max(request.data.item_bytes, 1)  # "V0" has no bytes
            block.sign_block(count)

    def _set_counts(self, block: CallBlock, request: Request) -> None:
        words, counts = block.words, request.counts
        assert counts is not None
        row_bytes = request.row_count * request.data.item_bytes
        words[Call.n_counts] = len(counts)
        block.set_table(Call.counts, counts)
        offsets = [0, *accumulate(row_bytes * count for count in counts)]
        block.set_table(Call.offsets, offsets)
        largest = offsets[-1] if request.collective.spreads else max(counts) * row_bytes
        words[Call.largest_bytes] = largest
        if request.receive_counts is None:
            block.sign(request.row_count, *counts)
            return
        words[Call.largest_bytes] = UNKNOWN_BYTES
        block.sign(request.row_count)
        received = [row_bytes * count for count in request.receive_counts]
        block.set_table(Call.landings, [0, *accumulate(received)])
        block.set_table(Call.pieces, [row_bytes * count for count in counts] + received)


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
        self._object_entries: list[ObjectEntry] = []
        """Kept, because the built-ins do not keep them alive."""
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

    def native_table(self, collective: Collective) -> int:
        """Return the address of the entry's table."""
        self.entry(collective)
        return self._entries[collective, False].address

    def object_entry(self, request: Request) -> ObjectCall:
        """Return the compiled entry of an object collective's first round with these rows."""
        entry = ObjectEntry(self._group, self._blocks.of(request), request.root)
        self._object_entries.append(entry)
        return entry.call

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
            "slots and stages are filled by": (
                "the string instruction" if tuning.string_copies else "vector instructions"
            )
            + _NONTEMPORAL[tuning.nontemporal_fills],
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
