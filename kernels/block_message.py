"""How a message of quantised blocks lies in memory: on the host and on GPUs.

Its blocks' scales, float32, then zeros up to a multiple of 16 bytes, then a byte for each element.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
ALIGNMENT_BYTES = 16
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""What an element's byte is."""


def scales_bytes(blocks: int) -> int:
    """Return the bytes of a message's scales: where its codes begin."""
    return -(-4 * blocks // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def message_bytes(blocks: int) -> int:
    """Return the bytes of a message."""
    return scales_bytes(blocks) + BLOCK * blocks
