"""The plan of a compressed all_reduce: the shares that ranks add up, and the messages between them.

Its steps: quantise each rank's share of x, all_to_all, add up the own share in rank order and
quantise the sum, all_gather, dequantise. There are two quantisations, whatever the number of ranks.
`gpucoll.calls.compressed_exchange` executes the plan on the host, `gpucoll.backends.gpu.compressed`
on GPUs; both make the same bits. `docs/compression.md` has the formats and the error bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from gpucoll.algorithms.shares import equal_edges
from gpucoll.backends.protocol import Request
from gpucoll.kernels.block_message import BLOCK, message_bytes

FLOAT_BYTES = 4
_BLOCK_BYTES = FLOAT_BYTES * BLOCK


class Quantising(TypedDict):
    """What a quantisation depends on beside its values: see `gpucoll.kernels.cpu.quantise`."""

    blocks: int
    seed: int | None
    sequence: int
    first_block: int


@dataclass(frozen=True)
class CompressedPlan:
    """The layout of one call, seen from one rank.

    Arrays are fused into one of float32, each beginning with a block, so that no two share a scale.

    Attributes
    ----------
    rank, world_size : int
        This rank, and the number of ranks.
    offsets : list of int
        Offset of each array in the fused one, and last the end of all, in bytes.
    is_fused : bool
        Whether x has to be fused: it is more than one array, or not of float32.
    wire_format : str
        The kernels' name of the messages' format.
    seed : int or None
        Seed of stochastic rounding; None: round to nearest.
    divisor : int or None
        What sums are divided by, if by anything.
    """

    rank: int
    world_size: int
    offsets: list[int]
    is_fused: bool
    wire_format: str
    seed: int | None
    divisor: int | None

    @cached_property
    def count(self) -> int:
        """Number of elements of the fused array."""
        return self.offsets[-1] // FLOAT_BYTES

    @cached_property
    def blocks(self) -> int:
        """Number of blocks in a message, which carries one share; the last ones may be empty."""
        return -(-self.count // (BLOCK * self.world_size))

    @cached_property
    def message_bytes(self) -> int:
        """Size of a message."""
        return message_bytes(self.blocks, self.wire_format)

    @cached_property
    def edges(self) -> list[int]:
        """Edges of the ranks' shares of the fused array, in elements."""
        return equal_edges(self.count, self.world_size, BLOCK)

    def quantising(self, share: int, turn: int) -> Quantising:
        """Return how this rank quantises a share: in turn 0 its input, in turn 1 the sum."""
        return {
            "blocks": self.blocks,
            "seed": self.seed,
            "sequence": 2 * self.rank + turn,
            "first_block": share * self.blocks,
        }


def plan_of(request: Request, rank: int, world_size: int) -> CompressedPlan:
    """Return the plan for a request with `compression`; its arrays are its `parts`."""
    assert request.compression is not None
    assert request.op is not None
    starts, end = [], 0
    for x, _ in request.parts:
        starts.append(-(-end // _BLOCK_BYTES) * _BLOCK_BYTES)
        end = starts[-1] + FLOAT_BYTES * x.count
    return CompressedPlan(
        rank,
        world_size,
        offsets=[*starts, end],
        is_fused=[x.dtype for x, _ in request.parts] != ["float32"],
        wire_format=request.compression.wire_format,
        seed=request.compression.seed,
        divisor=world_size if request.op.name == "avg" else None,
    )
