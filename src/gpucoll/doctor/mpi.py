"""The probe of mpi4py and its MPI, which it initialises. Runs only in a separate process.

MPI is initialised without other ranks, whatever launcher has started the doctor. What it reports
about GPUs is not tested; a communicator tests it when its GPUs connect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

from gpucoll.backends.mpi.gpu_aware import asked, environment
from gpucoll.backends.mpi.library import Library, import_mpi
from gpucoll.devices.foreign_library import loaded_copies
from gpucoll.doctor.facts import Gpus, MpiFound, MpiGpuMemory
from gpucoll.errors import BackendUnavailableError

__all__ = ["described", "mpi"]

_FILES = r"libmpi\.so[.0-9]*"
_KINDS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs"}
_LEVELS = ("single", "funneled", "serialized", "multiple")


def mpi() -> MpiFound | None:
    """Return facts about mpi4py's MPI; None without mpi4py."""
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        return None
    alone = environment(os.environ)
    for name in set(os.environ) - set(alone):
        del os.environ[name]
    os.environ.update(alone)
    found = MpiFound(
        mpi4py=version,
        library=None,
        path=None,
        thread_level=None,
        large_counts=None,
        gpu_memory=[],
        problem=None,
    )
    try:
        module = import_mpi()
    except BackendUnavailableError as error:
        found["problem"] = str(error)
        return found
    library = Library(module)
    return MpiFound(
        mpi4py=version,
        library=library.name,
        path=next(iter(loaded_copies(_FILES)), None),
        thread_level=_level(module),
        large_counts=library.has_large_counts,
        gpu_memory=[_gpu_memory(module, kind) for kind in _KINDS],
        problem=None,
    )


def _level(module: ModuleType) -> str:
    levels = {getattr(module, f"THREAD_{name.upper()}"): name for name in _LEVELS}
    level = module.Query_thread()
    return levels.get(level, str(level))


def _gpu_memory(module: ModuleType, kind: str) -> MpiGpuMemory:
    answer = asked(module, kind)
    return MpiGpuMemory(kind=kind, may_serve=answer.may_serve, reason=answer.why)


def described(found: MpiFound | None, gpus: Gpus | None) -> Iterator[tuple[bool, str, str]]:
    """Yield whether each finding is good, its label, and its text.

    Parameters
    ----------
    found : MpiFound or None
        The result of the probe.
    gpus : Gpus or None
        This machine's GPUs; without any, the facts for both vendors are shown.
    """
    if found is None:
        return
    kind = gpus["kind"] if gpus is not None else ""
    if found["problem"] is not None:
        yield False, "mpi4py", f"{found['mpi4py']}: {found['problem']}"
        return
    level = found["thread_level"]
    counts = "counts beyond 31 bits" if found["large_counts"] else "counts of 31 bits"
    told = f"{found['mpi4py']} over {found['library']}, thread level {level}, {counts}"
    is_enough = level == "multiple"
    few = "" if is_enough else "; backend='mpi' needs thread level multiple"
    yield is_enough, "mpi4py", f"{told} ({found['path']}){few}"
    for memory in found["gpu_memory"]:
        if kind not in _KINDS or kind == memory["kind"]:
            text = _KINDS[memory["kind"]]
            if memory["may_serve"]:
                text += (
                    f": MPI reports that it accepts their addresses ({memory['reason']}); this is "
                    "tested on first use"
                )
            else:
                text += f": staged through page-locked host memory ({memory['reason']})"
            yield True, "MPI and GPUs", text
