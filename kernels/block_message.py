"""The layout of a message of quantised or cast blocks, on the host and on GPUs.

First the scales of its blocks, as float32; then zeros up to a multiple of 16 bytes; then one byte
for each element. A message of float16 or bfloat16 consists of the cast elements alone.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
ALIGNMENT_BYTES = 16
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The formats of an element's byte."""
HALVES = ("float16", "bfloat16")


def scales_bytes(blocks: int, wire_format: str = "int8") -> int:
    """Return the size of a message's scales in bytes, which is the offset of its codes."""
    if wire_format in HALVES:
        return 0
    return -(-4 * blocks // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def codes_bytes(blocks: int, wire_format: str = "int8") -> int:
    """Return the size of the codes of `blocks` blocks."""
    return BLOCK * blocks * (2 if wire_format in HALVES else 1)


def message_bytes(blocks: int, wire_format: str = "int8") -> int:
    """Return the size of a message in bytes."""
    return scales_bytes(blocks, wire_format) + codes_bytes(blocks, wire_format)
