"""The kernels compiled as host code: a launcher for NumPy arrays, the grid run as loops."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.kernels.gpu.catalogue import all_kernels
from gpucoll.kernels.gpu.source import Kernel, source_of

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared")


def build(kernels: Sequence[Kernel], folder: Path) -> ctypes.CDLL:
    """Compile kernels of one file, unless the folder has them from the same source."""
    source = source_of(kernels)
    digest = hashlib.sha256(f"{COMPILER} {OPTIONS} {source}".encode()).hexdigest()[:16]
    library = folder / f"{kernels[0].file}-{digest}.so"
    with open(folder / f"{kernels[0].file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for old in folder.glob(f"{kernels[0].file}-*"):
                old.unlink()
            made = library.with_suffix(".new")
            command = [str(COMPILER), *OPTIONS, "-DGPUCOLL_HOST", "-x", "c++", "-", "-o", str(made)]
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-4000:]
            os.replace(made, library)
        return ctypes.CDLL(str(library))


class HostLauncher:
    """Runs kernels at once; addresses are those of NumPy arrays."""

    def __init__(self, folder: Path) -> None:
        groups: dict[str, list[Kernel]] = {}
        for kernel in all_kernels():
            groups.setdefault(kernel.file, []).append(kernel)
        with ThreadPoolExecutor() as pool:
            libraries = pool.map(functools.partial(build, folder=folder), groups.values())
            self._libraries = dict(zip(groups, libraries, strict=True))

    def multiprocessors(self, number: int) -> int:
        return 1

    def compute_capability(self, number: int) -> tuple[int, int]:
        raise NotImplementedError

    def load(self, kernel: Any, number: int) -> None:
        """Do nothing: all are loaded already."""

    def launch(self, kernel: Any, blocks: int, arguments: Sequence[Any], number: int, stream: int):
        (argument,) = arguments
        entry = getattr(self._libraries[kernel.file], kernel.name)
        entry(ctypes.c_void_p(argument.ctypes.data), ctypes.c_uint(blocks))

    def upload(self, table: np.ndarray, number: int, stream: int) -> tuple[int, Any]:
        held = np.empty(table.nbytes + 16, np.uint8)
        aligned = held[-held.ctypes.data % 16 :][: table.nbytes]
        aligned[...] = table.view(np.uint8)
        return aligned.ctypes.data, held
