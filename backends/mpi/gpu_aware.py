"""Whether the MPI of this process can read and write GPU memory: its answers, and a trial.

An MPI that is not CUDA- or ROCm-aware uses a GPU's address as one of host memory, and the process
crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.backends.choice import HOST_DEVICE
from gpucoll.backends.mpi import gpu_trial_program
from gpucoll.devices import Device
from gpucoll.errors import BackendUnavailableError
from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.kernel_files import keep_content, kept_content
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.kernels.cpu.own_folders import own_folder

# --- what MPI says, by answers and settings; nothing is tried -------------------------------------

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


# --- a trial --------------------------------------------------------------------------------------


TRIAL_S = 30.0
"""Time limit of a trial, which initialises MPI and makes a GPU's context."""
END_S = 2.0
"""Time limit for a killed process to end."""
PROGRAM = (sys.executable, "-m", gpu_trial_program.__name__)
_FOLDER = "mpi-gpu-trials"
_OF_LAUNCHERS = (
    "PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "SLURM_", "PALS_",
    "ALPS_", "I_MPI_HYDRA", "I_MPI_INFO_", "I_MPI_PIN", "I_MPI_INTERNAL_", "I_MPI_JOB_",
    "OMPI_", "OPAL_USER_PARAMS_GIVEN",
)  # fmt: skip
"""Variables by which a process finds its job: in the trial MPI must be alone."""
_OF_MCA_LAUNCHERS = ("orte_", "ess_", "pmix", "prte", "cpu_type", "initial_wdir", "num_procs")
_KEPT_OF_LAUNCHERS = ("PMIX_PREFIX", "PMIX_MCA_", "PRTE_PREFIX")
"""Variables by which it finds its files."""
_OF_MPI = ("OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "I_MPI_", "MV2_", "MVP_", "UCX_", "FI_", "PSM")
"""Variables that configure MPIs: another setting needs another trial."""


def tried(mpi: Any, device: Device, timeout_s: float) -> str:
    """Return why MPI does not take addresses of this GPU; empty if it does.

    Parameters
    ----------
    mpi : module
        mpi4py's ``MPI``, of this process.
    device : Device
        This process's GPU.
    timeout_s : float
        Time limit, including a trial that another process makes first.
    """
    due_s = time.monotonic() + timeout_s
    path = _path(mpi, device)
    if path is None:
        return _try(device, min(timeout_s, TRIAL_S))[0]
    if (known := _known(path)) is not None:
        return known
    with FolderLock(path) as lock:
        lock.take(alone=True, limit_s=timeout_s / 2)
        if (known := _known(path)) is not None:  # another process has made the trial meanwhile
            return known
        problem, is_sure = _try(device, min(due_s - time.monotonic(), TRIAL_S))
        if is_sure:
            with contextlib.suppress(OSError):
                keep_content(path, json.dumps({"problem": problem}).encode())
    return f"{problem}; kept in {path}: remove it to try again" if problem else ""


def _known(path: Path) -> str | None:
    content = kept_content(path)
    if content is None:
        return None
    problem = str(json.loads(content)["problem"])
    return f"{problem}; kept in {path}: remove it to try again" if problem else ""


def _path(mpi: Any, device: Device) -> Path | None:
    """Return the path of the kept result; None if there is no folder for it."""
    identity = device.identity
    driver_version = getattr(device, "driver_version", None)
    settings = sorted(
        item for item in environment(os.environ).items() if item[0].startswith(_OF_MPI)
    )
    what = [
        mpi.Get_library_version(),
        mpi.__file__,
        device.kind,
        identity.name,
        identity.uuid,
        driver_version() if driver_version is not None else "",
        Path(gpu_trial_program.__file__).read_text("utf-8"),
        settings,
    ]
    digest = blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()
    try:
        return own_folder(cache.cache_folder().parent / _FOLDER) / digest
    except (BackendUnavailableError, OSError):
        return None


def environment(given: Any) -> dict[str, str]:
    """Return an environment in which an MPI is alone, whatever started this process."""

    def tells_of_job(name: str) -> bool:
        if name.startswith(_KEPT_OF_LAUNCHERS):
            return False
        if name.startswith("OMPI_MCA_"):
            return name.removeprefix("OMPI_MCA_").startswith(_OF_MCA_LAUNCHERS)
        return name.startswith(_OF_LAUNCHERS) or name in config.MPI_AND_SLURM

    kept = {name: value for name, value in given.items() if not tells_of_job(name)}
    return kept | {"OMPI_MCA_ess_singleton_isolated": "1"}  # else Open MPI 4 starts a daemon


def _try(device: Device, limit_s: float) -> tuple[str, bool]:
    """Return why the trial failed, or an empty text; and whether the trial itself showed it."""
    path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, installed or not
    try:
        process = subprocess.Popen(
            [*PROGRAM, device.kind, str(device.number)],
            env={**environment(os.environ), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all processes of the trial are ended together
        )
    except OSError as error:
        return f"no process can be started to try it: {error.strerror}", False
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"a trial of it did not end within {limit_s:.2g} s", limit_s >= TRIAL_S
    except BaseException:
        _end(process)
        raise
    return refusal_of(process.returncode, output, errors), True


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END_S)


def refusal_of(code: int, output: str, errors: str) -> str:
    """Return what a trial's exit shows against MPI; empty if the trial passed."""
    if code == 0 and gpu_trial_program.PASSED in output:
        return ""
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no word")
    if code < 0:
        known = -code in {int(name) for name in signal.Signals}
        name = signal.Signals(-code).name if known else str(-code)
        return f"a trial of it was killed by {name} ({last[:200]})"
    return f"a trial of it ended with code {code}: {last[:200]}"
