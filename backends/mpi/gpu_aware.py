"""Whether the MPI of this process can read and write GPU memory, by its answers and settings.

Nothing is tried here (see `gpucoll.backends.mpi.gpu_trial`): an MPI that is not CUDA- or ROCm-aware
uses a GPU's address as one of host memory, and the process crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.backends.choice import HOST_DEVICE

__all__ = ["FUNCTIONS", "Answer", "answer_of", "asked"]

FUNCTIONS = {
    "cuda": ("MPIX_Query_cuda_support",),
    "rocm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
"""Kind of GPU -> functions that return 1 if MPI supports its memory: Open MPI's, MPICH's."""
_MEMORY_KINDS = {"cuda": ("cuda",), "rocm": ("rocm", "hip")}
_MEMORY_KINDS_KEY = "mpi_memory_alloc_kinds"
"""Info key of MPI 4.1: the kinds of memory that MPI takes, ``mpi,system,cuda:device``."""
_OFF = ("0", "no", "off", "false", "n", "disable", "disabled")
_SWITCHES = {
    "cuda": ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "I_MPI_OFFLOAD",
             "MV2_USE_CUDA", "MVP_USE_CUDA",
             "OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support"),
    "rocm": ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_ROCM", "MVP_USE_ROCM"),
}  # fmt: skip
"""Variables that switch the support off, if their value is one of `_OFF`."""
_COMPONENTS = ("OMPI_MCA_accelerator", "OMPI_MCA_opal_accelerator")
"""Open MPI's lists of components, one of which is for this kind; ``^`` excludes the names after
it."""
_ON_REQUEST = {
    ("Intel", "cuda"): "I_MPI_OFFLOAD",
    ("CRAY MPICH", "cuda"): "MPICH_GPU_SUPPORT_ENABLED",
    ("CRAY MPICH", "rocm"): "MPICH_GPU_SUPPORT_ENABLED",
    ("MVAPICH2", "cuda"): "MV2_USE_CUDA",
    ("MVAPICH2", "rocm"): "MV2_USE_ROCM",
}
"""(Part of the library's name, kind of GPU) -> the variable that must be set for the support."""
_NAMES = {"cuda": "CUDA", "rocm": "ROCm"}


class Answer(NamedTuple):
    """An MPI's answer about a kind of GPU."""

    may_serve: bool
    """Whether it reports that it takes addresses of such GPUs, so that a trial makes sense."""
    why: str
    """The reason, as a part of a sentence."""


def asked(mpi: Any, kind: str) -> Answer:
    """Query the MPI of this process, which is initialised.

    Parameters
    ----------
    mpi : module
        mpi4py's ``MPI``.
    kind : str
        The kind of GPU: ``"cuda"``, ``"rocm"`` or ``"host"``.
    """
    wish = config.mpi_gpu_arrays()
    if wish == "staged":
        return Answer(False, f"{config.MPI_GPU_ARRAYS}=staged")
    if kind == HOST_DEVICE:
        return Answer(True, "memory of Host devices is host memory")
    if wish == "trusted":
        return Answer(True, f"{config.MPI_GPU_ARRAYS}=trusted")
    name = mpi.Get_library_version()
    library = ctypes.CDLL(mpi.__file__)  # symbols of its dependencies are found, too
    return answer_of(kind, name, said_by(library, kind), memory_kinds(mpi), os.environ)


def said_by(library: ctypes.CDLL, kind: str) -> tuple[str, bool] | None:
    """Return a function of the library and its answer; None if the library has none."""
    for name in FUNCTIONS[kind]:
        with contextlib.suppress(AttributeError):
            function: Any = library[name]
            function.argtypes, function.restype = (), ctypes.c_int
            return name, function() == 1
    return None


def memory_kinds(mpi: Any) -> tuple[str, ...]:
    """Return the kinds of memory that MPI reports (MPI 4.1); empty if it reports none."""
    found: list[str] = []
    with contextlib.suppress(Exception):  # an old MPI, or one without COMM_WORLD
        info = mpi.COMM_WORLD.Get_info()
        try:
            text = info.Get(_MEMORY_KINDS_KEY) or ""
        finally:
            info.Free()
        found = [part.partition(":")[0].strip().lower() for part in text.split(",")]
    return tuple(filter(None, found))


def answer_of(
    kind: str,
    name: str,
    said: tuple[str, bool] | None,
    memory: tuple[str, ...],
    environment: Mapping[str, str],
) -> Answer:
    """Combine the answers of an MPI and its environment: a pure function.

    Parameters
    ----------
    kind : str
        The kind of GPU.
    name : str
        The library's name, with its version.
    said : (str, bool), optional
        A function of the library, and its answer.
    memory : tuple of str
        The kinds of memory that it reports by MPI 4.1.
    environment : mapping
    """
    if switch := _switched_off(kind, environment):
        return Answer(False, f"{switch} switches it off")
    if said is not None and not said[1]:
        return Answer(False, f"{said[0]}() says no")
    knows = bool({*memory} & {*_MEMORY_KINDS[kind]})
    if said is None and memory and not knows:
        return Answer(False, f"{_MEMORY_KINDS_KEY} names {', '.join(memory)} alone")
    variable = _variable_for(kind, name)
    is_set = bool(variable) and variable in environment
    if variable and not is_set:
        return Answer(False, f"{variable} is not set, without which it is off")
    if said is not None:
        return Answer(True, f"{said[0]}() says yes")
    if knows:
        return Answer(True, f"{_MEMORY_KINDS_KEY} names {', '.join(memory)}")
    if is_set:
        return Answer(True, f"{variable}={environment[variable]}")
    return Answer(False, f"it does not say whether it is {_NAMES[kind]}-aware")


def _switched_off(kind: str, environment: Mapping[str, str]) -> str:
    for variable in _SWITCHES[kind]:
        if environment.get(variable, "").strip().lower() in _OFF:
            return f"{variable}={environment[variable]}"
    for variable in _COMPONENTS:
        text = environment.get(variable, "").strip().lower()
        names = {part.strip() for part in text.removeprefix("^").split(",")}
        if text and (kind in names) == text.startswith("^"):
            return f"{variable}={environment[variable]}"
    return ""


def _variable_for(kind: str, name: str) -> str:
    for (part, of_kind), variable in _ON_REQUEST.items():
        if part in name and of_kind == kind:
            return variable
    return ""
