"""A trial of MPI on a GPU's memory, in a separate process whose exit status is the result.

There is one trial for each MPI, GPU and setting. Its result is kept next to the compiled kernels.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpucoll import config
from gpucoll.backends.mpi import gpu_trial_program
from gpucoll.devices import Device
from gpucoll.errors import BackendUnavailableError
from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.kernel_files import keep_content, kept_content
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.kernels.cpu.own_folders import own_folder

__all__ = ["PROGRAM", "environment", "refusal_of", "tried"]

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
