"""Masks: streams of ChaCha20, which are added to a vector of unsigned integers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.federated.secure_sum import keys

Vector: TypeAlias = npt.NDArray[Any]

# A part of a vector takes all masks before the next part does. With a part of a stream it stays in
# a core's L2 cache: 256 KiB ran at 1.9 GB/s on an AMD EPYC, 64 KiB at 1.6, 16 KiB at 0.4.
_CHUNK_BYTES = 1 << 18
_ZEROS = memoryview(bytes(_CHUNK_BYTES))


def add_masks(vector: Vector, masks: Iterable[tuple[bytes, bool]]) -> None:
    """Add the streams of keys to a vector of unsigned integers, or subtract them, in place.

    Each mask is a key, and whether its stream is added. Integers wrap. Memory: a chunk of 256 KiB,
    and a cipher's state for each key.
    """
    streams = [(is_added, keys.key_stream(key)) for key, is_added in masks]
    stream = np.empty(_CHUNK_BYTES, np.uint8)
    words = stream.view(vector.dtype)
    for begin in range(0, len(vector), len(words)):
        part = vector[begin : begin + len(words)]
        for is_added, source in streams:
            source.update_into(_ZEROS[: part.nbytes], stream.data)
            combine = np.add if is_added else np.subtract
            combine(part, words[: len(part)], out=part)
