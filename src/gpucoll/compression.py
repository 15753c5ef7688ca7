"""`Compression`: the format in which ``all_reduce(compression=...)`` sends float32 values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import COMPRESSIONS

_HALVES = ("float16", "bfloat16")
_WIRE_FORMATS = {"int8_block": "int8", "float8_block": "float8_e4m3fn"}
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Compression:
    """The compression of `Communicator.all_reduce`, if its name alone does not describe it.

    Parameters
    ----------
    name : str
        "float16", "bfloat16", "int8_block" or "float8_block".
    seed : int, optional
        For the block formats: round stochastically, so that the errors of many calls average out.
        The same seed gives the same bits; use another seed for each call, such as the step's
        number. 0 to 2**64 - 1; ranks may have different seeds. Default: round to nearest even.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such compression, or the seed is invalid.

    Examples
    --------
    >>> comm.all_reduce(gradient, compression=gpucoll.Compression("int8_block", seed=step))
    """

    name: str
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.name not in COMPRESSIONS:
            raise ArgumentError(
                f"compression must be one of {', '.join(COMPRESSIONS)}; got {self.name!r}"
            )
        if self.seed is None:
            return
        if self.name in _HALVES:
            raise ArgumentError(f"compression {self.name} rounds to nearest: it takes no seed")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer):
            raise ArgumentTypeError(f"a compression's seed must be an int; got {self.seed!r}")
        if not 0 <= self.seed < _SEEDS:
            raise ArgumentError(f"a compression's seed must be in 0..2**64-1; got {self.seed}")

    @staticmethod
    def parse(compression: object) -> Compression:
        """Return a user's argument, a name or a `Compression`, as a `Compression`."""
        if isinstance(compression, Compression):
            return compression
        if not isinstance(compression, str):
            raise ArgumentTypeError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, or a Compression; "
                f"got {compression!r}"
            )
        return Compression(compression)

    @property
    def wire_format(self) -> str:
        """The kernels' name of the messages' format."""
        return _WIRE_FORMATS.get(self.name, self.name)

    def check_dtype(self, dtype: str) -> None:
        """Raise ArgumentTypeError if this compression does not support a dtype."""
        allowed = ("float32",) if self.name in _HALVES else ("float32", *_HALVES)
        if dtype not in allowed:
            better = "; convert it to float32 first" if dtype == "float64" else ""
            raise ArgumentTypeError(
                f"all_reduce with compression={self.name} takes {', '.join(allowed)}; "
                f"got {dtype}{better}"
            )
