"""`Compression`: the format in which float32 values travel.

``all_reduce(compression=...)`` takes the formats of `COMPRESSIONS`, `gpucoll.training` also "topk".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import COMPRESSIONS

_HALVES = ("float16", "bfloat16")
_WIRE_FORMATS = {"int8_block": "int8", "float8_block": "float8_e4m3fn"}
_SEEDS = 1 << 64
TOPK = "topk"
_DENSITY, _BITS, _CHUNK, _DECAY = 1 / 64, 2, 4096, 0.95
_OF_TOPK = {"density": _DENSITY, "bits": _BITS, "chunk": _CHUNK, "decay": _DECAY}


@dataclass(frozen=True)
class Compression:
    """A compression, if its name alone does not describe it.

    Parameters
    ----------
    name : str
        "float16", "bfloat16", "int8_block" or "float8_block" for `Communicator.all_reduce`;
        these and "topk" for `gpucoll.training.DiLoCo`.
    seed : int, optional
        For the block formats: round stochastically, so that the errors of many calls average out.
        The same seed gives the same bits; use another seed for each call, such as the step's
        number. 0 to 2**64 - 1; ranks may have different seeds. Default: round to nearest even.
    density : float
        For "topk": the share of each chunk's values that travels, above 0 and at most 1.
    bits : int
        For "topk": the bits of a value that travels, 1 to 8: its sign, and which magnitude.
    chunk : int
        For "topk": the number of consecutive values of which the greatest are kept, 2 to 65536.
    decay : float
        For "topk": the share of the residual that is added to the next input, 0 to 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such compression, or an argument is invalid or belongs to another compression.

    Examples
    --------
    >>> comm.all_reduce(gradient, compression=gpucoll.Compression("int8_block", seed=step))
    """

    name: str
    seed: int | None = None
    density: float = _DENSITY
    bits: int = _BITS
    chunk: int = _CHUNK
    decay: float = _DECAY

    def __post_init__(self) -> None:
        if self.name == TOPK:
            self._check_topk()
            return
        if self.name not in COMPRESSIONS:
            raise ArgumentError(
                f"compression must be one of {', '.join(COMPRESSIONS)}; got {self.name!r}"
            )
        for name, usual in _OF_TOPK.items():
            if getattr(self, name) != usual:
                raise ArgumentError(f"compression {self.name} takes no {name}: only topk does")
        if self.seed is None:
            return
        if self.name in _HALVES:
            raise ArgumentError(f"compression {self.name} rounds to nearest: it takes no seed")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer):
            raise ArgumentTypeError(f"a compression's seed must be an int; got {self.seed!r}")
        if not 0 <= self.seed < _SEEDS:
            raise ArgumentError(f"a compression's seed must be in 0..2**64-1; got {self.seed}")

    def _check_topk(self) -> None:
        if self.seed is not None:
            raise ArgumentError("compression topk rounds to nearest: it takes no seed")
        for name, least, most in (("bits", 1, 8), ("chunk", 2, 65536)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ArgumentTypeError(f"topk's {name} must be an int; got {value!r}")
            if not least <= value <= most:
                raise ArgumentError(f"topk's {name} must be in {least}..{most}; got {value}")
        for name in ("density", "decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int | np.floating):
                raise ArgumentTypeError(f"topk's {name} must be a number; got {value!r}")
            if not 0 <= value <= 1:
                raise ArgumentError(f"topk's {name} must be in 0..1; got {value}")
        if self.kept < 1:
            raise ArgumentError(
                f"topk's density {self.density} keeps none of a chunk of {self.chunk}: "
                f"{1 / self.chunk} keeps one"
            )

    @property
    def kept(self) -> int:
        """For "topk": the number of values of a chunk that travel."""
        return round(self.density * self.chunk)

    @staticmethod
    def parse(compression: object) -> Compression:
        """Return all_reduce's argument, a name or a `Compression`, as a `Compression`."""
        if not isinstance(compression, Compression | str):
            raise ArgumentTypeError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, or a Compression; "
                f"got {compression!r}"
            )
        parsed = Compression(compression) if isinstance(compression, str) else compression
        if parsed.name == TOPK:
            raise ArgumentError(
                "all_reduce has no compression topk, which leaves most values to later calls: it "
                "is for gpucoll.training.DiLoCo"
            )
        return parsed

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
