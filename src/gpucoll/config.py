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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gpucoll.errors import ArgumentError, ArgumentTypeError

# --- between a launcher and its ranks -----------------------------------------------------------
RANK: Final = "GPUCOLL_RANK"
WORLD_SIZE: Final = "GPUCOLL_WORLD_SIZE"
LOCAL_RANK: Final = "GPUCOLL_LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "GPUCOLL_LOCAL_WORLD_SIZE"
JOB: Final = "GPUCOLL_JOB"
"""Random token of the job. The ranks of one host meet at an abstract Unix socket named after it."""
JOIN: Final = "GPUCOLL_JOIN"
"""``1``: an elastic job's launcher has started this process in the place of one that failed. It has
no rank before it joins the others."""
MEET: Final = "GPUCOLL_MEET"
"""Where ranks on several hosts meet: ``tcp://HOST:PORT`` of rank 0's host, or ``file://PATH``."""
LAUNCHER_CACHE: Final = "GPUCOLL_LAUNCHER_CACHE"
"""The launcher's own folder for compiled kernels, if there is no other; removed when it ends."""
TORCHRUN_LOCAL_RANK: Final = "LOCAL_RANK"

# --- MPI and Slurm: read, never set (rendezvous/launchers.py has their meaning) ------------------
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
"""Variables with a process's place among the ranks of its host, in the order of search."""

# --- for users ----------------------------------------------------------------------------------
TIMEOUT_S: Final = "GPUCOLL_TIMEOUT_S"
"""Default deadline of every wait, in seconds (300)."""
BIND: Final = "GPUCOLL_BIND"
"""``none`` keeps gpucoll from ever binding a rank to CPUs."""
GRACE_S: Final = "GPUCOLL_GRACE_S"
"""Time that a launcher lets other ranks end by themselves after one failed, in seconds (5)."""
HOST_ID: Final = "GPUCOLL_HOST_ID"
"""Overrides the host's identity (boot id, network and UTS namespace). Ranks with the same identity
share memory; other ranks connect by TCP."""
INTERFACES: Final = "GPUCOLL_INTERFACES"
"""Network interfaces, or addresses of this host, on which ranks listen: ``eth0,eth1`` (default: the
one that leads to the meeting point). Large arrays use all of them, everything else the first."""
SOCKETS: Final = "GPUCOLL_SOCKETS"
"""Number of connections that carry large arrays between two hosts over each interface (1)."""
LINK_TIMEOUT_S: Final = "GPUCOLL_LINK_TIMEOUT_S"
"""Time without an answer after which a connection to another host counts as cut, in seconds (5)."""
SECRET: Final = "GPUCOLL_SECRET"
"""The secret that all ranks of a job over TCP share, at least 16 bytes."""
SECRET_FILE: Final = "GPUCOLL_SECRET_FILE"
"""A file with the secret, of this user or root, readable by no one else."""
TLS_CERT: Final = "GPUCOLL_TLS_CERT"
"""A PEM file with this rank's certificate, and those between it and the CA's. With it, all TCP is
encrypted by TLS 1.3. All three of these are set, on every rank, or none."""
TLS_KEY: Final = "GPUCOLL_TLS_KEY"
"""A file with its private key, of this user or root, readable by no one else."""
TLS_CA: Final = "GPUCOLL_TLS_CA"
"""A file with the certificate of the CA that has signed the other ranks' certificates."""
CACHE_DIR: Final = "GPUCOLL_CACHE_DIR"
"""Folder of compiled kernels (``$XDG_CACHE_HOME/gpucoll`` or ``~/.cache/gpucoll``). They are code:
the folder must belong to this user, and no one else may write to it."""
ARENA_BYTES: Final = "GPUCOLL_ARENA_BYTES"
"""Address space of one rank's arena for `Communicator.empty` (default: the machine's memory)."""
CPU_TUNING: Final = "GPUCOLL_CPU_TUNING"
"""Overrides in the CPU backend's table, ``name=value,...``; rank 0's apply to all ranks."""
COMPILE: Final = "GPUCOLL_COMPILE"
"""``1``: kernels are compiled for exactly this processor; the package's machine code is left."""
BUILD_FOR: Final = "GPUCOLL_BUILD_FOR"
"""Read when the package is built: the levels of processors to make machine code for."""
PROGRESS: Final = "GPUCOLL_PROGRESS"
"""``0``: long work, such as compiling, does not show its progress on stderr."""
REPORT_DIR: Final = "GPUCOLL_REPORT_DIR"
"""Folder for reports on failures: where each rank was when a communicator broke. Default: none."""
FULL_TRACEBACKS: Final = "GPUCOLL_FULL_TRACEBACKS"
"""``1``: the traceback of an uncaught error shows the frames inside gpucoll."""
CPU_ONLY: Final = "GPUCOLL_CPU_ONLY"
"""``1``: gpucoll looks for no GPUs and loads no GPU library; set in tests' ranks."""
NCCL_LIBRARY: Final = "GPUCOLL_NCCL_LIBRARY"
"""Path of the libnccl to use, if the process has not loaded one already."""
RCCL_LIBRARY: Final = "GPUCOLL_RCCL_LIBRARY"
"""Path of the librccl to use, if the process has not loaded one already."""
ONECCL_LIBRARY: Final = "GPUCOLL_ONECCL_LIBRARY"
"""Path of the libccl.so.2 to use, if the process has not loaded one already."""
NVRTC_LIBRARY: Final = "GPUCOLL_NVRTC_LIBRARY"
"""Path of the libnvrtc that compiles kernels for NVIDIA's GPUs."""
HIPRTC_LIBRARY: Final = "GPUCOLL_HIPRTC_LIBRARY"
"""Path of the libhiprtc that compiles kernels for AMD's GPUs."""
GPU_KIND: Final = "GPUCOLL_GPU_KIND"
"""``cuda``, ``rocm`` or ``sycl``: which GPUs to use, if there are device files of no vendor or of
several."""
DEVICE: Final = "GPUCOLL_DEVICE"
"""``host``: use Host devices, which emulate GPUs in host memory. For tests without a GPU."""
DIRECT_SCHEDULE: Final = "GPUCOLL_DIRECT_SCHEDULE"
"""How GPUs of one host combine arrays through each other's memory: ``shares``, ``ring``, or
``auto``, by what connects them. ``init(direct_schedule=...)`` takes precedence."""
MPI_GPU_ARRAYS: Final = "GPUCOLL_MPI_GPU_ARRAYS"
"""How MPI gets GPU arrays with ``backend="mpi"``: ``auto``, as GPU addresses if MPI is CUDA- or
ROCm-aware and a trial succeeds; ``staged``, in page-locked host memory; ``trusted``, as GPU
addresses without asking or trying."""
HOST_DEVICES: Final = "GPUCOLL_HOST_DEVICES"
"""Number of Host devices that a process sees (default: as many as it asks for, up to 64)."""
HOST_DEVICE_MEMORY: Final = "GPUCOLL_HOST_DEVICE_MEMORY"
"""Bytes of each Host device's memory in each process (2 GiB)."""
JAX: Final = "GPUCOLL_JAX"
"""``1``: the Python programs that gpucoll-run starts let JAX's collectives between processes go
through gpucoll (docs/jax_processes.md)."""

MPI4PY_RC: Final = "MPI4PY_RC_"
"""Prefix of the variables that set mpi4py's options (``MPI4PY_RC_INITIALIZE=no``). gpucoll's names
of mpi4py read them, too."""
HOROVOD: Final = "HOROVOD_"
"""Prefix of Horovod's variables, which gpucoll's names of Horovod read and set, too:
integrations/horovod/settings.py."""

# --- vendors' libraries: read, to report their effects; two are set if the user has not ----------
CUDA_DEVICE_MAX_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Number of work queues that the streams of a GPU share; set if the user has not."""
NCCL_COMM_BLOCKING: Final = "NCCL_COMM_BLOCKING"
NCCL_MULTI_RANK_GPU_ENABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
HSA_NO_SCRATCH_RECLAIM: Final = "HSA_NO_SCRATCH_RECLAIM"
CUDA_PATH: Final = "CUDA_PATH"
CUDA_HOME: Final = "CUDA_HOME"
ROCM_PATH: Final = "ROCM_PATH"
"""The folder of the vendor's toolkit, in which its compiler is searched."""
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
"""Settings that change the machine code (the first only in tests)."""
NCCL_TOPO_FILE: Final = "NCCL_TOPO_FILE"
"""A topology in NCCL's XML, which the vendor's library reads instead of sysfs."""
NCCL_SOCKET_IFNAME: Final = "NCCL_SOCKET_IFNAME"
"""The interface by which NCCL and RCCL reach other hosts; set if the user has not."""
NCCL_IB_HCA: Final = "NCCL_IB_HCA"
"""The RDMA devices that NCCL and RCCL use."""
NCCL_CONF_FILE: Final = "NCCL_CONF_FILE"
"""A file in which NCCL and RCCL look for variables that are not set."""

CCL_ATL_TRANSPORT: Final = "CCL_ATL_TRANSPORT"
"""How oneCCL's processes talk, ``mpi`` or ``ofi``; set to ``ofi`` if the user has not."""
CCL_YIELD: Final = "CCL_YIELD"
"""How oneCCL's threads wait; set to ``sleep`` for host memory if the user has not."""
CCL_KVS_IFACE: Final = "CCL_KVS_IFACE"
FI_TCP_IFACE: Final = "FI_TCP_IFACE"
"""The interfaces by which oneCCL reaches other hosts; set if the user has not."""
ZE_AFFINITY_MASK: Final = "ZE_AFFINITY_MASK"
ONEAPI_DEVICE_SELECTOR: Final = "ONEAPI_DEVICE_SELECTOR"
"""Which of Intel's GPUs a process sees."""

_PREFIX: Final = "GPUCOLL_"
_OF_TESTS: Final = "GPUCOLL_TEST_"
"""Prefix of the variables that only gpucoll's own tests read."""

_NAMES_LIBRARY: Final = (NCCL_LIBRARY, RCCL_LIBRARY, ONECCL_LIBRARY, NVRTC_LIBRARY, HIPRTC_LIBRARY)
_NAMES_CODE: Final = (*_NAMES_LIBRARY, CUDA_PATH, CUDA_HOME, ROCM_PATH)
"""Variables that name code for this process to run."""
_AT_SECURE: Final = 23
"""The key in getauxval(3) that tells whether the dynamic loader trusts the environment."""

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_GRACE_S: Final = 5.0
DEFAULT_LINK_TIMEOUT_S: Final = 5.0
MOST_SOCKETS: Final = 16
LONGEST_TIMEOUT_S: Final = 1e6
"""Eleven days: every wait has a deadline that can pass in practice."""


def _number(name: str, default: float) -> float:
    """Return a variable's value, which must be a number above zero; ArgumentError names it."""
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
    """Return the time without an answer after which a connection counts as cut, in seconds."""
    return min(_number(LINK_TIMEOUT_S, DEFAULT_LINK_TIMEOUT_S), LONGEST_TIMEOUT_S)


def sockets() -> int:
    """Return the number of connections for large arrays to another host over each interface."""
    text = os.environ.get(SOCKETS, "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SOCKETS:
        raise ArgumentError(f"{SOCKETS} must be a whole number, 1 to {MOST_SOCKETS}; got {text!r}")
    return int(text)


_TOO_LONG: Final = (
    f"must be {LONGEST_TIMEOUT_S:.0f} s at most (eleven days), because every wait has a deadline"
)


def check_timeout_s(given: object, where: str = "", *, may_be_endless: bool = False) -> None:
    """Raise unless `given`, what a user passed as ``timeout_s``, is a number above zero or None.

    Parameters
    ----------
    where : str
        The beginning of the message.
    may_be_endless : bool
        The timeout limits something that also ends otherwise, so any number is allowed, even
        infinity.
    """
    if given is None:
        return
    if not isinstance(given, numbers.Real):
        raise ArgumentTypeError(f"{where}timeout_s must be a number of seconds; got {given!r}")
    number: Any = given  # not every int can be a float
    if not number > 0:
        raise ArgumentError(f"{where}timeout_s must be positive; got {_short(given)}")
    if number > LONGEST_TIMEOUT_S and not may_be_endless:
        raise ArgumentError(f"{where}timeout_s {_TOO_LONG}; got {_short(given)}")


def _short(given: object) -> str:
    try:
        text = str(given)
    except ValueError:  # more digits than Python converts
        return "a number of thousands of digits"
    return text if len(text) < 40 else f"{text[:20]}..."


def grace_s() -> float:
    """Return the time that a launcher waits at each step of ending a job, in seconds."""
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
    """Return whether this process must stay on the CPU."""
    return _is_on(CPU_ONLY)


def shows_progress() -> bool:
    """Return whether long work shows its progress on stderr."""
    return os.environ.get(PROGRESS) != "0"


def compiles() -> bool:
    """Return whether kernels are compiled although the package may have them."""
    return _is_on(COMPILE)


def build_for() -> str:
    """Return the levels of processors that the builder of the package asks for; empty: none."""
    return os.environ.get(BUILD_FOR, "").strip()


def is_for_jax() -> bool:
    """Return whether gpucoll-run prepares its programs for JAX."""
    return _is_on(JAX)


def full_tracebacks() -> bool:
    """Return whether tracebacks show the frames inside gpucoll."""
    return _is_on(FULL_TRACEBACKS)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0")


def uses_host_devices() -> bool:
    """Return whether this process must use Host devices; ArgumentError for any other word."""
    value = os.environ.get(DEVICE, "")
    if value not in ("", "host"):
        raise ArgumentError(
            f"{DEVICE} must be host, or not set, but is {value!r}; {GPU_KIND} chooses among GPUs"
        )
    return value == "host"


def direct_schedule() -> str:
    """Return the schedule of the direct backend: auto, shares or ring."""
    value = os.environ.get(DIRECT_SCHEDULE) or "auto"
    check_direct_schedule(value, DIRECT_SCHEDULE)
    return value


def check_direct_schedule(given: object, name: str) -> None:
    """Raise ArgumentError unless `given`, the value of what `name` names, is a schedule."""
    if given not in ("auto", "shares", "ring"):
        raise ArgumentError(f"{name} must be auto, shares or ring; got {given!r}")


def mpi_gpu_arrays() -> str:
    """Return how MPI gets GPU arrays: auto, staged or trusted."""
    value = os.environ.get(MPI_GPU_ARRAYS) or "auto"
    if value not in ("auto", "staged", "trusted"):
        raise ArgumentError(f"{MPI_GPU_ARRAYS} must be auto, staged or trusted; got {value!r}")
    return value


def host_devices(most: int) -> int:
    """Return the number of Host devices."""
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
    """Return the variables that hide GPUs from this process, if they are set."""
    names = (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES)
    return {name: os.environ[name] for name in names if name in os.environ}


def variable(name: str) -> str:
    """Return the value of one of the variables above; empty if it is not set.

    Raises
    ------
    ArgumentError
        The variable names a library, and this process must not trust its environment.
    """
    value = os.environ.get(name, "")
    if value and name in _NAMES_CODE and _has_more_rights_than_caller():
        if name not in _NAMES_LIBRARY:
            return ""  # only one of several places to look in
        raise ArgumentError(
            f"{name} is set, but this process has more rights than the user who started it (its "
            "program is set-uid, set-gid or has capabilities), so it loads no code that the "
            "environment names: unset it"
        )
    return value


def _has_more_rights_than_caller() -> bool:
    """Return whether the program gave this process rights that its caller lacks."""
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return True
    import ctypes  # only needed if one of these variables is set

    return bool(ctypes.CDLL(None).getauxval(_AT_SECURE))


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warn, once in a process, of variables with gpucoll's prefix that gpucoll does not have."""
    for name in unknown_variables():
        import difflib  # rarely needed

        close = difflib.get_close_matches(name, known_variables(), n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else "docs/api.md lists all variables"
        warnings.warn(
            f"gpucoll knows no environment variable {name}, so it changes nothing: {hint}",
            RuntimeWarning,
            stacklevel=3,
        )


def unknown_variables() -> list[str]:
    """Return the variables with gpucoll's prefix that gpucoll does not have."""
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
    """Return this process's place among the ranks of its host, from its launcher."""
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
    """Return the user's home. An empty HOME counts as none; expanduser would make "/" of it."""
    try:
        return os.environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def usual_cache_dirs() -> list[Path]:
    """Return the folders for compiled kernels if the user names none, the best first.

    They need not exist. If there is no home, or it is not writable, the folder is the one that the
    system makes for a logged-in user; it lasts until the user logs out.
    """
    found = []
    home = _home()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # by its specification, other values are ignored
        found.append(Path(xdg))
    elif os.path.isabs(home) and os.path.isdir(home):
        found.append(Path(home) / ".cache")
    running = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isabs(running) and os.path.isdir(running):
        found.append(Path(running))
    return [folder / "gpucoll" for folder in found]


def launcher_cache() -> Path | None:
    """Return the launcher's own folder for compiled kernels, if this process has one."""
    given = os.environ.get(LAUNCHER_CACHE, "")
    return Path(given) if os.path.isabs(given) and os.path.isdir(given) else None


def code_settings() -> str:
    """Return those of Numba's settings that are set and change its machine code."""
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


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables within a block; then they are what they were."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
