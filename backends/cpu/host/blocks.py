"""Call blocks of this backend's collectives: the loop, the kernel, and the blocks to each rank."""

from __future__ import annotations

from itertools import accumulate

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.movements import movement_finish, movement_loop, movement_post
from gpucoll.backends.cpu.host.reductions import reduction_finish, reduction_loop, reduction_post
from gpucoll.backends.protocol import Request
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentTypeError
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
from gpucoll.transport.shared.words import Call
from gpucoll.types import ReduceOp

INT8_MAX = 127
_MOVEMENT = movement_loop, movement_post, movement_finish
_REDUCTION = reduction_loop, reduction_post, reduction_finish


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
