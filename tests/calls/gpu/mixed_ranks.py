"""Ranks of several kinds in one communicator: ``init(mixed=True)``.

A word says who they are, a letter for each rank: ``n`` has a double of an NVIDIA GPU and passes its
arrays, ``a`` one of an AMD GPU, ``d`` a Host device; ``h`` has no GPU, and passes NumPy arrays;
``N`` has an NVIDIA GPU and passes NumPy arrays nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.calls.gpu import host_devices
from tests.calls.gpu.conftest import Rank, in_rank

from gpucoll import config
from gpucoll.config import environment

WITHOUT_GPU = "h"


class _Stream:
    """What host arrays know of streams."""

    def synchronize(self) -> None:
        """Do nothing."""


class HostKit:
    """NumPy's arrays, as tests of GPU arrays make them."""

    name = "numpy"

    def use(self, number: int) -> None:
        """Do nothing: there is one host."""

    def knows(self, dtype: str) -> bool:
        return True

    def bytes_of(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def seen_as(self, memory: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return memory.view(np.dtype(dtype)).reshape(shape)

    def read(self, x: Any) -> np.ndarray:
        return np.array(x)

    def write(self, x: np.ndarray, values: np.ndarray) -> None:
        x[...] = values

    def stream(self) -> _Stream:
        return _Stream()


@dataclass
class MixedRank(Rank):
    """What a test's function gets in a rank."""

    kind: str = WITHOUT_GPU
    """Its letter."""

    @property
    def has_gpu(self) -> bool:
        return self.kind != WITHOUT_GPU

    def init(self, **options: Any) -> Any:
        """Join the others; on several hosts a rank's GPU is not that of its place."""
        device = self.rank if self.has_gpu else None
        return self.seat.init(**{"mixed": True, "device": device, **options})

    def array(self, values: Any, dtype: Any = "float32") -> Any:
        """Return an array of this rank's kind."""
        whole = np.asarray(values, dtype, order="C")
        memory = self.kit.bytes_of(whole.reshape(-1).view(np.uint8))
        return self.kit.seen_as(memory, whole.shape, whole.dtype)

    def read(self, x: Any) -> Any:
        return self.kit.read(x)


def as_kind(seat: Any, kinds: str, doubles: Any, function: Any, args: Any) -> Any:
    """Set a rank up as its letter says, and call the test's function."""
    kind = kinds[seat.rank]

    def enter(rank: Rank) -> Any:
        kit = HostKit() if kind == "N" else rank.kit
        return function(MixedRank(rank.seat, kit, rank.control, kind), *args)

    if kind == WITHOUT_GPU:
        with environment({config.CPU_ONLY: "1"}):
            return enter(Rank(seat, HostKit(), None))
    if kind == "d":
        devices = host_devices.HostDevices()
        with environment(devices.variables):
            return host_devices.in_rank(seat, devices, enter, ())
    double = doubles["a" if kind == "a" else "n"]
    with environment({config.GPU_KIND: double.kind}):
        return in_rank(seat, double, enter, ())


@dataclass
class Mixed:
    """Where tests of ranks of several kinds run."""

    pools: Any
    doubles: Any
    """By letter."""

    def call(self, kinds: str, function: Any, *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on each `MixedRank`; return the results."""
        arguments = (kinds, self.doubles, function, args)
        options = {"gives": "seat", "environment": self.variables}
        results: list[Any] = self.pools.call(len(kinds), as_kind, *arguments, **options)
        return results

    def replies(self, kinds: str, function: Any, *args: Any) -> list[Any]:
        """The same, but return how it went on each rank."""
        arguments = (kinds, self.doubles, function, args)
        options = {"gives": "seat", "environment": self.variables}
        replies: list[Any] = self.pools.replies(len(kinds), as_kind, *arguments, **options)
        return replies

    @property
    def variables(self) -> dict[str, str]:
        made: dict[str, str] = {}
        for double in self.doubles.values():
            made |= double.variables
        return made
