"""What a compressed all_reduce must return, bit for bit, and the bounds that are promised."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes  # noqa: F401
import numpy as np

from gpucoll.kernels import reference_compression as reference

BLOCK = reference.BLOCK
WIRE = {"int8_block": "int8", "float8_block": "float8_e4m3fn"}


def through(x: np.ndarray, name: str, seed: int | None, sequence: int, block: int) -> np.ndarray:
    """Return what arrives of x, which begins at a block of this number."""
    if name not in WIRE:
        with np.errstate(over="ignore"):
            return x.astype(np.dtype(name)).astype(np.float32)
    blocks = -(-x.size // BLOCK)
    message = reference.quantise(
        x, WIRE[name], blocks, seed=seed, sequence=sequence, first_block=block
    )
    return reference.dequantise(message, WIRE[name], blocks, x.size)


def all_reduce(
    inputs: Sequence[np.ndarray],
    op: str,
    name: str,
    seed: int | None = None,
    residuals: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the result of flat float32 arrays, and every rank's residual afterwards."""
    world_size, count = len(inputs), inputs[0].size
    divisor = np.float32(world_size)
    blocks = -(-count // (BLOCK * world_size))
    fed = [x if residuals is None else x + residuals[rank] for rank, x in enumerate(inputs)]
    result = np.empty(count, np.float32)
    left = [np.empty(count, np.float32) for _ in inputs]
    with np.errstate(all="ignore"):
        for owner in range(world_size):
            part = slice(owner * blocks * BLOCK, (owner + 1) * blocks * BLOCK)
            place = owner * blocks
            known = [through(x[part], name, seed, 2 * rank, place) for rank, x in enumerate(fed)]
            total = known[0]
            for value in known[1:]:
                total = total + value
            total = total / divisor if op == "avg" else total
            result[part] = through(total, name, seed, 2 * owner + 1, place)
            for rank, x in enumerate(fed):
                left[rank][part] = finite(x[part] - known[rank])
            lost = total - result[part]
            lost = lost * divisor if op == "avg" else lost
            left[owner][part] = finite(left[owner][part] + lost)
    return result, left


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, np.float32(0))


def greatest_of_blocks(x: np.ndarray) -> np.ndarray:
    """Return, for each element, the greatest magnitude in its block."""
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK)
    padded[: x.size] = np.abs(x)
    return np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: x.size]


def bound(inputs: Sequence[np.ndarray], op: str, name: str, by_chance: bool) -> np.ndarray:
    """Return how far each element may be from the exact sum: see docs/compression.md."""
    own = np.sum([np.abs(x.astype(np.float64)) for x in inputs], axis=0)
    greatest = np.sum([greatest_of_blocks(x) for x in inputs], axis=0)
    if op == "avg":
        own, greatest = own / len(inputs), greatest / len(inputs)
    subnormals = 2 if op == "avg" else len(inputs) + 1
    return {
        "float16": own / 1000 + subnormals * 2.0**-25,
        "bfloat16": own / 127,
        "int8_block": greatest / (63 if by_chance else 126),
        "float8_block": (0.27 if by_chance else 0.13) * own
        + greatest / (1e5 if by_chance else 2e5),
    }[name]
