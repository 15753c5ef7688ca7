"""How floats become integers whose sum is exact, and how a sum becomes floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError
from gpucoll.federated.secure_sum.masks import Vector

_CHUNK = 1 << 16  # values that are converted at once


@dataclass(frozen=True)
class Rounding:
    """Floats in -clip..clip as integers in -levels..levels, which words hold as two's complement.

    The words have a dtype of unsigned integers. With a generator, values are rounded up or down at
    random, such that the expected value is exact.
    """

    clip: float
    levels: int
    dtype: np.dtype[Any]
    generator: np.random.Generator | None = None

    def words(self, given: npt.NDArray[Any]) -> Vector:
        """Return floats, clipped and rounded, as a flat array of words."""
        flat = given.reshape(-1)
        words = np.empty(len(flat), self.dtype)
        signed = words.view(f"i{self.dtype.itemsize}")
        for begin in range(0, len(flat), _CHUNK):
            part = flat[begin : begin + _CHUNK].astype(np.float64)
            np.clip(part, -self.clip, self.clip, out=part)
            if np.isnan(part).any():
                raise ArgumentError("an array of floats has a NaN, which no integer stands for")
            part *= self.levels / self.clip
            if self.generator is not None:
                part += self.generator.random(len(part))
                np.floor(part, out=part)
            else:
                np.rint(part, out=part)
            signed[begin : begin + len(part)] = np.clip(part, -self.levels, self.levels)
        return words

    def values(self, words: Vector, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return what a sum of words stands for."""
        values = np.empty(len(words), dtype)
        signed = words.view(f"i{self.dtype.itemsize}")
        for begin in range(0, len(words), _CHUNK):
            part = signed[begin : begin + _CHUNK].astype(np.float64)
            with np.errstate(over="ignore"):  # sums beyond the dtype are infinite
                values[begin : begin + len(part)] = part * (self.clip / self.levels)
        return values
