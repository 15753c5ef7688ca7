"""The interface for launching kernels on a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.kernels.gpu.source import Kernel

Argument: TypeAlias = npt.NDArray[np.generic] | int
"""A struct in an array of one element, which is passed by value, or a word."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that was compiled to PTX elsewhere; its arguments are 64-bit words."""

    name: str
    ptx: str


class Launcher(Protocol):
    """The operations of a kind of device; `number` is the device's, `stream` an address."""

    def multiprocessors(self, number: int) -> int:
        """Return how many multiprocessors (compute units) a device has."""

    def compute_capability(self, number: int) -> tuple[int, int]:
        """Return a CUDA device's compute capability; ArgumentTypeError on others."""

    def load(self, kernel: Kernel | CompiledKernel, number: int) -> None:
        """Compile a kernel if needed, and load it, so that `launch` only has to launch it.

        Raises BackendUnavailableError if there is no compiler for it.
        """

    def launch(
        self,
        kernel: Kernel | CompiledKernel,
        blocks: int,
        arguments: Sequence[Argument],
        number: int,
        stream: int,
    ) -> None:
        """Enqueue a kernel of `blocks` blocks with these arguments: NumPy structs, integers."""

    def upload(
        self, table: npt.NDArray[np.generic], number: int, stream: int
    ) -> tuple[int, object]:
        """Copy a table to the device; return its address, a multiple of 16, and its owner."""
