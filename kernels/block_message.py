"""The layout of a message of quantised blocks, on the host and on GPUs.

First the scales of its blocks, as float32; then zeros up to a multiple of 16 bytes; then one byte
for each element.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
ALIGNMENT_BYTES = 16
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The formats of an element's byte."""


def scales_bytes(blocks: int) -> int:
    """Return the size of a message's scales in bytes, which is the offset of its codes."""
    return -(-4 * blocks // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def message_bytes(blocks: int) -> int:
    """Return the size of a message in bytes."""
    return scales_bytes(blocks) + BLOCK * blocks
