"""The places where copies of the vendors' compilers are searched for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpucoll import config
from gpucoll.devices.foreign_library import files_of_wheels, loaded_copies

__all__ = ["candidates"]

_WHEELS = {
    "cuda": ("nvidia/cu1[3-9]/lib/libnvrtc.so.1[3-9]", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1[2-9]"),
    "rocm": ("_rocm_sdk_core/lib/libhiprtc.so.*",),
}
_NAMES = {
    "cuda": ("libnvrtc.so.13", "libnvrtc.so.12"),
    "rocm": ("libhiprtc.so.7", "libhiprtc.so.6"),
}
"""For the loader, which searches the system's folders, and those of LD_LIBRARY_PATH."""
_VARIABLES = {
    "cuda": ((config.CUDA_PATH, "lib64"), (config.CUDA_HOME, "lib64")),
    "rocm": ((config.ROCM_PATH, "lib"),),
}
"""The variables with the toolkit's location, and the folder in it."""
_FOLDERS = {"cuda": (f"{sys.prefix}/lib", "/usr/local/cuda/lib64"), "rocm": ("/opt/rocm/lib",)}
"""The folders of a conda environment in which the vendor's own packages put their copies."""


def candidates(kind: str, most_major: int = 0) -> list[str]:
    """Return the paths and names of copies that might exist, the best one first.

    A copy that is already in the process, such as PyTorch's or CuPy's, comes first. AMD's is
    searched for next to the HIP runtime in use, because they belong together.
    """
    found = dict.fromkeys(_all(kind))
    if not most_major:
        return list(found)
    return sorted(found, key=lambda path: _major(path) > most_major)


def _all(kind: str) -> Iterator[str]:
    stem = _NAMES[kind][0].partition(".so")[0]
    yield from loaded_copies(rf"{stem}\.so.*")
    if kind == "rocm":
        for runtime in loaded_copies(r"libamdhip64\.so.*"):
            yield from sorted(map(str, Path(runtime).parent.glob(f"{stem}.so*")))
    yield from files_of_wheels(_WHEELS[kind])
    named = [(config.variable(name), lib) for name, lib in _VARIABLES[kind]]
    for folder in [str(Path(root) / lib) for root, lib in named if root]:
        yield from (str(Path(folder) / name) for name in _NAMES[kind])
    yield from _NAMES[kind]
    for folder in _FOLDERS[kind]:
        yield from (str(Path(folder) / name) for name in _NAMES[kind])


def _major(path: str) -> int:
    found = re.search(r"\.so\.(\d+)", path)
    return int(found[1]) if found else 0
