"""All kernels, and the groups in which they are compiled ahead."""

from __future__ import annotations

import functools

from gpucoll.kernels.gpu import pack, quantise, reduce
from gpucoll.kernels.gpu.source import Kernel

GROUP = 16
"""Kernels of one file per group: what they share is read once, and several processes have work."""


@functools.cache
def all_kernels() -> tuple[Kernel, ...]:
    """Return every kernel."""
    return (*reduce.kernels(), *pack.kernels(), *quantise.kernels())


@functools.cache
def groups() -> tuple[tuple[Kernel, ...], ...]:
    """Return the kernels in groups, each from a single file."""
    by_file: dict[str, list[Kernel]] = {}
    for kernel in all_kernels():
        by_file.setdefault(kernel.file, []).append(kernel)
    return tuple(
        tuple(kernels[start : start + GROUP])
        for kernels in by_file.values()
        for start in range(0, len(kernels), GROUP)
    )


@functools.cache
def group_of(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the group of a kernel, or the kernel alone if it is in none."""
    return next((group for group in groups() if kernel in group), (kernel,))
