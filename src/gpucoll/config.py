"""Every environment variable that gpucoll reads or sets, and the defaults that they change.

Nothing else in the package touches ``os.environ`` by a literal name.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import pwd
import warnings
from pathlib import Path
from typing import Any, Final

from gpucoll.errors import ArgumentError, ArgumentTypeError

# --- between a launcher and its ranks -----------------------------------------------------------
RANK: Final = "GPUCOLL_RANK"
WORLD_SIZE: Final = "GPUCOLL_WORLD_SIZE"
LOCAL_RANK: Final = "GPUCOLL_LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "GPUCOLL_LOCAL_WORLD_SIZE"
JOB: Final = "GPUCOLL_JOB"
"""Random token of the job: the ranks of one host meet at an abstract Unix socket named after it."""
MEET: Final = "GPUCOLL_MEET"
"""Where ranks on several hosts meet: ``tcp://HOST:PORT`` of rank 0's host, or ``file://PATH``."""
LAUNCHER_CACHE: Final = "GPUCOLL_LAUNCHER_CACHE"
"""The launcher's own folder for compiled kernels, where there is no other; gone when it ends."""
TORCHRUN_LOCAL_RANK: Final = "LOCAL_RANK"

# --- of MPIs and Slurm: read, never set (which says what: rendezvous/launchers.py) ----------------
OPEN_MPI_RANK: Final = "OMPI_COMM_WORLD_RANK"
OPEN_MPI_WORLD_SIZE: Final = "OMPI_COMM_WORLD_SIZE"
OPEN_MPI_LOCAL_RANK: Final = "OMPI_COMM_WORLD_LOCAL_RANK"
OPEN_MPI_LOCAL_SIZE: Final = "OMPI_COMM_WORLD_LOCAL_SIZE"
PMIX_RANK: Final = "PMIX_RANK"
PMIX_NAMESPACE: Final = "PMIX_NAMESPACE"
PMIX_SERVER: Final = "PMIX_SERVER_URI2"
PMI_RANK: Final = "PMI_RANK"
PMI_SIZE: Final = "PMI_SIZE"
PMI_ID: Final = "PMI_ID"
HYDRA_LOCAL_RANK: Final = "MPI_LOCALRANKID"
HYDRA_LOCAL_SIZE: Final = "MPI_LOCALNRANKS"
SLURM_RANK: Final = "SLURM_PROCID"
SLURM_LOCAL_RANK: Final = "SLURM_LOCALID"
SLURM_JOB_ID: Final = "SLURM_JOB_ID"
SLURM_STEP_ID: Final = "SLURM_STEP_ID"
SLURM_STEP_TASKS: Final = "SLURM_STEP_NUM_TASKS"
SLURM_STEP_NODES: Final = "SLURM_STEP_NUM_NODES"
SLURM_STEP_NODE_LIST: Final = "SLURM_STEP_NODELIST"
SLURM_JOB_NODE_LIST: Final = "SLURM_JOB_NODELIST"
MPI_AND_SLURM: Final = (
    OPEN_MPI_RANK,
    OPEN_MPI_WORLD_SIZE,
    OPEN_MPI_LOCAL_RANK,
    OPEN_MPI_LOCAL_SIZE,
    PMIX_RANK,
    PMIX_NAMESPACE,
    PMIX_SERVER,
    PMI_RANK,
    PMI_SIZE,
    PMI_ID,
    HYDRA_LOCAL_RANK,
    HYDRA_LOCAL_SIZE,
    SLURM_RANK,
    SLURM_LOCAL_RANK,
    SLURM_JOB_ID,
    SLURM_STEP_ID,
    SLURM_STEP_TASKS,
    SLURM_STEP_NODES,
    SLURM_STEP_NODE_LIST,
    SLURM_JOB_NODE_LIST,
)
LOCAL_RANKS: Final = (
    LOCAL_RANK,
    TORCHRUN_LOCAL_RANK,
    OPEN_MPI_LOCAL_RANK,
    HYDRA_LOCAL_RANK,
    SLURM_LOCAL_RANK,
)
"""Where a process's place among the ranks of its host is looked for, in this order."""

# --- for users ----------------------------------------------------------------------------------
TIMEOUT_S: Final = "GPUCOLL_TIMEOUT_S"
"""Default deadline of every wait, in seconds (300)."""
BIND: Final = "GPUCOLL_BIND"
"""``none`` keeps gpucoll from ever binding a rank to CPUs."""
GRACE_S: Final = "GPUCOLL_GRACE_S"
"""After a rank failed, how long a launcher lets the others end by themselves, in seconds (5)."""
HOST_ID: Final = "GPUCOLL_HOST_ID"
"""Overrides the host's identity (boot id, network and UTS namespace): ranks with the same one share
memory, others connect by TCP."""
INTERFACES: Final = "GPUCOLL_INTERFACES"
"""Network interfaces, or addresses of this host, that ranks listen at: ``eth0,eth1`` (default: the
one that leads to the meeting point). Large arrays use all of them, all else the first."""
SOCKETS: Final = "GPUCOLL_SOCKETS"
"""How many connections carry large arrays between two hosts over each interface (1)."""
LINK_TIMEOUT_S: Final = "GPUCOLL_LINK_TIMEOUT_S"
"""After how long without an answer a connection to another host counts as cut, in seconds (5)."""
SECRET: Final = "GPUCOLL_SECRET"
"""The secret that all ranks of a job over TCP share, 16 bytes at least."""
SECRET_FILE: Final = "GPUCOLL_SECRET_FILE"
"""A file that holds it instead, of this user's or root's, that nobody else can read."""
TLS_CERT: Final = "GPUCOLL_TLS_CERT"
"""A file with this rank's certificate, PEM, and those between it and the CA's: with it all TCP is
encrypted by TLS 1.3. All three of these are set, on every rank, or none."""
TLS_KEY: Final = "GPUCOLL_TLS_KEY"
"""A file with its private key, of this user's or root's, that nobody else can read."""
TLS_CA: Final = "GPUCOLL_TLS_CA"
"""A file with the certificate of the CA by which the other ranks' certificates are signed."""
CACHE_DIR: Final = "GPUCOLL_CACHE_DIR"
"""Where compiled kernels are kept (``$XDG_CACHE_HOME/gpucoll`` or ``~/.cache/gpucoll``). They are
code: it must be a folder of this user's that nobody else can write to."""
ARENA_BYTES: Final = "GPUCOLL_ARENA_BYTES"
"""Address space of one rank's arena for `Communicator.empty` (default: the machine's memory)."""
CPU_TUNING: Final = "GPUCOLL_CPU_TUNING"
"""Overrides of the CPU backend's table, ``name=value,name=value``; rank 0's values hold for all."""
FULL_TRACEBACKS: Final = "GPUCOLL_FULL_TRACEBACKS"
"""``1`` shows the frames inside gpucoll in the traceback of an error that nobody caught."""
CPU_ONLY: Final = "GPUCOLL_CPU_ONLY"
"""``1`` keeps gpucoll from looking for GPUs and from loading a GPU library; set in tests' ranks."""
NCCL_LIBRARY: Final = "GPUCOLL_NCCL_LIBRARY"
"""Path of the libnccl to use, where the process has not loaded one already."""
RCCL_LIBRARY: Final = "GPUCOLL_RCCL_LIBRARY"
"""Path of the librccl to use, where the process has not loaded one already."""
NVRTC_LIBRARY: Final = "GPUCOLL_NVRTC_LIBRARY"
"""Path of the libnvrtc that compiles kernels for NVIDIA's GPUs."""
HIPRTC_LIBRARY: Final = "GPUCOLL_HIPRTC_LIBRARY"
"""Path of the libhiprtc that compiles kernels for AMD's GPUs."""
GPU_KIND: Final = "GPUCOLL_GPU_KIND"
"""``cuda`` or ``rocm``: which GPUs to use, where device files show none or both vendors'."""
DEVICE: Final = "GPUCOLL_DEVICE"
"""``host``: use Host devices, which play GPUs in host memory. For tests, where there is no GPU."""
MPI_GPU_ARRAYS: Final = "GPUCOLL_MPI_GPU_ARRAYS"
"""What MPI gets of GPU arrays with ``backend="mpi"``: ``auto``, addresses on the GPU where it is
CUDA- or ROCm-aware and a trial has shown it; ``staged``, page-locked host memory; ``trusted``, the
GPU's without asking or trying."""
HOST_DEVICES: Final = "GPUCOLL_HOST_DEVICES"
"""How many Host devices a process sees (default: as many as it asks for, up to 64)."""
HOST_DEVICE_MEMORY: Final = "GPUCOLL_HOST_DEVICE_MEMORY"
"""Bytes of memory that each Host device has in each process (2 GiB)."""

MPI4PY_RC: Final = "MPI4PY_RC_"
"""What the variables begin with that set mpi4py's options (``MPI4PY_RC_INITIALIZE=no``); the names
of mpi4py read them, too."""

# --- of vendors' libraries: read, to say what they lead to; two are set where the user has not ---
CUDA_DEVICE_MAX_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many work queues the streams of a GPU share; set where the user has not."""
NCCL_COMM_BLOCKING: Final = "NCCL_COMM_BLOCKING"
NCCL_MULTI_RANK_GPU_ENABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
HSA_NO_SCRATCH_RECLAIM: Final = "HSA_NO_SCRATCH_RECLAIM"
CUDA_PATH: Final = "CUDA_PATH"
CUDA_HOME: Final = "CUDA_HOME"
ROCM_PATH: Final = "ROCM_PATH"
"""Where the vendor's toolkit is: its compiler is looked for there."""
CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES: Final = "HIP_VISIBLE_DEVICES"
ROCR_VISIBLE_DEVICES: Final = "ROCR_VISIBLE_DEVICES"
_NUMBA_CODE: Final = (
    "GPUCOLL_TEST_MACHINE",
    "NUMBA_BOUNDSCHECK",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DEBUGINFO",
    "NUMBA_ENABLE_AVX",
    "NUMBA_LOOP_VECTORIZE",
    "NUMBA_OPT",
    "NUMBA_SLP_VECTORIZE",
)
"""What other machine code is made for (the first one in tests only)."""
NCCL_TOPO_FILE: Final = "NCCL_TOPO_FILE"
"""A topology in NCCL's XML, which the vendor's library reads instead of sysfs."""
NCCL_SOCKET_IFNAME: Final = "NCCL_SOCKET_IFNAME"
"""The interface by which NCCL and RCCL go to other hosts; set where the user has not."""
NCCL_IB_HCA: Final = "NCCL_IB_HCA"
"""The RDMA devices that they use."""
NCCL_CONF_FILE: Final = "NCCL_CONF_FILE"
"""A file in which they look for variables that are not set."""

_PREFIX: Final = "GPUCOLL_"
_OF_TESTS: Final = "GPUCOLL_TEST_"
"""What the variables begin with that only gpucoll's own tests read."""

_NAMES_LIBRARY: Final = (NCCL_LIBRARY, RCCL_LIBRARY, NVRTC_LIBRARY, HIPRTC_LIBRARY)
_NAMES_CODE: Final = (*_NAMES_LIBRARY, CUDA_PATH, CUDA_HOME, ROCM_PATH)
"""Where code lies that this process is to run."""
_AT_SECURE: Final = 23
"""What getauxval(3) knows it by: whether the dynamic loader believes the environment."""

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_GRACE_S: Final = 5.0
DEFAULT_LINK_TIMEOUT_S: Final = 5.0
MOST_SOCKETS: Final = 16
LONGEST_TIMEOUT_S: Final = 1e6
"""Eleven days: every wait has a deadline that somebody may live to see."""


def _number(name: str, default: float) -> float:
    """Return a variable's value, a number above zero; ArgumentError names it where it is not."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ArgumentError(f"{name} must be a number above 0, but is {text!r}")
    return value


def timeout_s() -> float:
    """Return the default deadline of a communicator's waits, in seconds."""
    limit = _number(TIMEOUT_S, DEFAULT_TIMEOUT_S)
    if limit > LONGEST_TIMEOUT_S:
        raise ArgumentError(f"{TIMEOUT_S} {_TOO_LONG}; got {os.environ[TIMEOUT_S]!r}")
    return limit


def link_timeout_s() -> float:
    """Return after how long without an answer a connection to another host counts as cut."""
    return min(_number(LINK_TIMEOUT_S, DEFAULT_LINK_TIMEOUT_S), LONGEST_TIMEOUT_S)


def sockets() -> int:
    """Return how many connections carry large arrays between two hosts over each interface."""
    text = os.environ.get(SOCKETS, "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SOCKETS:
        raise ArgumentError(f"{SOCKETS} must be a whole number, 1 to {MOST_SOCKETS}; got {text!r}")
    return int(text)


_TOO_LONG: Final = (
    f"must be {LONGEST_TIMEOUT_S:.0f} s at most (eleven days), since every wait has a deadline"
)


def check_timeout_s(given: object, where: str = "", *, may_be_endless: bool = False) -> None:
    """Raise unless `given`, what a user passed as ``timeout_s``, is a number above zero or None.

    Parameters
    ----------
    where : str
        What the message begins with.
    may_be_endless : bool
        It limits something that ends otherwise, too: any number will do, infinity as well.
    """
    if given is None:
        return
    if not isinstance(given, numbers.Real):
        raise ArgumentTypeError(f"{where}timeout_s must be a number of seconds; got {given!r}")
    number: Any = given  # not every whole number is a float
    if not number > 0:
        raise ArgumentError(f"{where}timeout_s must be positive; got {_short(given)}")
    if number > LONGEST_TIMEOUT_S and not may_be_endless:
        raise ArgumentError(f"{where}timeout_s {_TOO_LONG}; got {_short(given)}")


def _short(given: object) -> str:
    try:
        text = str(given)
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) < 40 else f"{text[:20]}..."


def grace_s() -> float:
    """Return how long a launcher waits at each step of ending a job, in seconds."""
    text = os.environ.get(GRACE_S, str(DEFAULT_GRACE_S))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_TIMEOUT_S:
        raise ArgumentError(
            f"{GRACE_S} must be a number of seconds, {LONGEST_TIMEOUT_S:.0f} at most; got {text!r}"
        )
    return value


def cpu_only() -> bool:
    """Return whether this process must keep to the CPU."""
    return _is_on(CPU_ONLY)


def full_tracebacks() -> bool:
    """Return whether tracebacks show the frames inside gpucoll."""
    return _is_on(FULL_TRACEBACKS)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0")


def uses_host_devices() -> bool:
    """Return whether this process is to use Host devices; ArgumentError for any other word."""
    value = os.environ.get(DEVICE, "")
    if value not in ("", "host"):
        raise ArgumentError(
            f"{DEVICE} must be host, or not set, but is {value!r}; {GPU_KIND} chooses among GPUs"
        )
    return value == "host"


def mpi_gpu_arrays() -> str:
    """Return what MPI gets of GPU arrays: auto, staged or trusted."""
    value = os.environ.get(MPI_GPU_ARRAYS) or "auto"
    if value not in ("auto", "staged", "trusted"):
        raise ArgumentError(f"{MPI_GPU_ARRAYS} must be auto, staged or trusted; got {value!r}")
    return value


def host_devices(most: int) -> int:
    """Return how many Host devices there are."""
    count = int(_number(HOST_DEVICES, most))
    if not 1 <= count <= most:
        raise ArgumentError(f"{HOST_DEVICES} must be 1 to {most}, but is {count}")
    return count


def host_device_memory() -> int:
    """Return the memory of a Host device, in bytes."""
    size_bytes = int(_number(HOST_DEVICE_MEMORY, 2 << 30))
    if size_bytes < 1:
        raise ArgumentError(f"{HOST_DEVICE_MEMORY} must be at least 1, but is {size_bytes}")
    return size_bytes


def visible_devices() -> dict[str, str]:
    """Return the variables that hide GPUs from this process, those that are set."""
    names = (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES)
    return {name: os.environ[name] for name in names if name in os.environ}


def variable(name: str) -> str:
    """Return the value of one of the variables above; empty where it is not set.

    Raises
    ------
    ArgumentError
        It names a library, and the environment is one that this process must not believe.
    """
    value = os.environ.get(name, "")
    if value and name in _NAMES_CODE and _has_more_rights_than_caller():
        if name not in _NAMES_LIBRARY:
            return ""  # one of several places to look at
        raise ArgumentError(
            f"{name} is set, but this process has more rights than who started it (its program is "
            "set-uid, set-gid or has capabilities), so it loads no code that the environment "
            "names: unset it"
        )
    return value


def _has_more_rights_than_caller() -> bool:
    """Return whether the program gave this process rights that its caller lacks."""
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return True
    import ctypes  # where such a variable is set only

    return bool(ctypes.CDLL(None).getauxval(_AT_SECURE))


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warn of variables that begin as gpucoll's and are none: once in a process."""
    for name in unknown_variables():
        import difflib  # seldom needed

        close = difflib.get_close_matches(name, known_variables(), n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else "docs/api.md lists those that there are"
        warnings.warn(
            f"gpucoll knows no environment variable {name}, so it changes nothing: {hint}",
            RuntimeWarning,
            stacklevel=3,
        )


def unknown_variables() -> list[str]:
    """Return the variables that begin as gpucoll's do and are none."""
    known = known_variables()
    named = (name for name in os.environ if name.startswith(_PREFIX))
    return sorted(name for name in named if name not in known and not name.startswith(_OF_TESTS))


def known_variables() -> set[str]:
    """Return the names of gpucoll's own variables."""
    return {
        value
        for name, value in globals().items()
        if name.isupper() and not name.startswith("_") and str(value).startswith(_PREFIX)
    }


def local_rank(otherwise: int = 0) -> int:
    """Return this process's place among the ranks of its host, as its launcher says."""
    found = (os.environ[name] for name in LOCAL_RANKS if os.environ.get(name))
    text = next(found, "")
    return int(text) if text.isdecimal() else otherwise


def binding_allowed() -> bool:
    """Return whether gpucoll may bind ranks to CPUs."""
    return os.environ.get(BIND, "auto").lower() != "none"


def cache_dir() -> Path | None:
    """Return the folder for compiled kernels that the user named, if any."""
    named = os.environ.get(CACHE_DIR)
    return Path(named).absolute() if named else None


def _home() -> str:
    """Return the user's home; an empty HOME counts as none, where expanduser makes "/" of it."""
    try:
        return os.environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def usual_cache_dirs() -> list[Path]:
    """Return where compiled kernels are kept if the user names no folder, the best one first.

    None of it need be there. Where there is no home, or none that can be written to, what the
    system makes for a user who is logged in: it lasts until the user logs out.
    """
    found = []
    home = _home()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # anything else is to be ignored, by its specification
        found.append(Path(xdg))
    elif os.path.isabs(home) and os.path.isdir(home):
        found.append(Path(home) / ".cache")
    running = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isabs(running) and os.path.isdir(running):
        found.append(Path(running))
    return [folder / "gpucoll" for folder in found]


def launcher_cache() -> Path | None:
    """Return the launcher's own folder for compiled kernels, where this process has one."""
    given = os.environ.get(LAUNCHER_CACHE, "")
    return Path(given) if os.path.isabs(given) and os.path.isdir(given) else None


def code_settings() -> str:
    """Return the settings that Numba makes other machine code for, those that are set."""
    return ",".join(f"{name}={os.environ[name]}" for name in _NUMBA_CODE if name in os.environ)


def arena_bytes() -> int:
    """Return the address space of one rank's arena, in bytes: a whole number of 2 MiB pages."""
    huge_page = 2 << 20
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = _number(ARENA_BYTES, machine)
    if not size < 1 << 62:
        raise ArgumentError(f"{ARENA_BYTES} is more than any machine has: {size:g}")
    return -(-int(size) // huge_page) * huge_page


def cpu_tuning() -> dict[str, int]:
    """Return the overrides of the CPU backend's table that the environment asks for."""
    text = os.environ.get(CPU_TUNING, "")
    pairs = (item.partition("=") for item in text.split(",") if item.strip())
    try:
        return {name.strip(): int(value) for name, _, value in pairs}
    except ValueError:
        raise ArgumentError(f"{CPU_TUNING} must be name=number,..., but is {text!r}") from None
