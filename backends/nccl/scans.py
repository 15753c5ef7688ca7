"""Scans as a reduce_scatter of blocks: block s is this rank's x if it counts for rank s.

Otherwise the block is the op's identity. The blocks lie in scratch memory; a large input is
processed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpucoll.algorithms.shares import pieces
from gpucoll.backends.gpu.steps import Copy, Fill, Place
from gpucoll.backends.nccl.elements import Reduction
from gpucoll.backends.nccl.launch import Launch, Phase
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.protocol import Request
from gpucoll.kernels.cpu.identities import identity_of

SCRATCH_BYTES = 64 << 20
"""How much memory the blocks of one piece may take."""


def scan(request: Request, place: Place, library: Library, reduced: Reduction | None) -> Launch:
    """Return the launch of a scan or an exclusive scan."""
    x, out = request.both
    assert reduced is not None
    assert request.op is not None
    is_exclusive = request.collective.excludes_own
    identity = identity_of(x.dtype, request.op.name).tobytes()
    type_, operation = reduced.arguments
    row_bytes = x.item_bytes * place.world_size
    piece = max(min(x.count, SCRATCH_BYTES // row_bytes), 1)

    def phases(scratch: int, _: int) -> Iterator[Phase]:
        for start, count in pieces(x.count, piece):
            at, size_bytes = start * x.item_bytes, count * x.item_bytes
            first = place.rank + is_exclusive  # the first rank that this one's x counts for
            blocks: list[Copy | Fill] = [
                Copy(scratch + rank * size_bytes, x.address + at, size_bytes)
                for rank in range(first, place.world_size)
            ]
            if first:
                blocks.append(Fill(scratch, identity, first * count))
            arguments = (scratch, out.address + at, count * reduced.parts, type_, operation)
            yield Phase((("ncclReduceScatter", arguments),), tuple(blocks))

    return Launch(phases, piece * row_bytes if x.count else 0)
