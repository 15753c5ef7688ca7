"""MPI's environment: initialisation and finalisation, clocks, names and versions."""

from __future__ import annotations

import os
import threading
import time

import gpucoll
from gpucoll.integrations.mpi4py.constants import (
    MAX_PROCESSOR_NAME,
    SUBVERSION,
    THREAD_MULTIPLE,
    VERSION,
)
from gpucoll.integrations.mpi4py.errors import as_mpis
from gpucoll.integrations.mpi4py.infos import Info
from gpucoll.integrations.mpi4py.job import job
from gpucoll.integrations.mpi4py.state import open_states


def Init() -> None:
    """Join the other processes of the job. Importing MPI calls this."""
    job.begin()


def Init_thread(required: int = THREAD_MULTIPLE) -> int:
    """Join the other processes of the job; return the level of thread support."""
    job.begin()
    return job.thread_level


def Finalize() -> None:
    """Wait for the other processes, and leave the job. The end of the process calls this."""
    job.end()


def Is_initialized() -> bool:
    """Return whether Init was called."""
    return job.is_initialized


def Is_finalized() -> bool:
    """Return whether Finalize was called."""
    return job.is_finalized


def Query_thread() -> int:
    """Return the level of thread support."""
    return job.thread_level


def Is_thread_main() -> bool:
    """Return whether this is the thread that has called Init."""
    return threading.get_ident() == job.main_thread


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard that the names follow."""
    return VERSION, SUBVERSION


def Get_library_version() -> str:
    """Return the name and version of this library."""
    return f"gpucoll {gpucoll.__version__} (names of mpi4py)"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and version of the library."""
    numbers = [int(part) for part in gpucoll.__version__.split(".")[:3] if part.isdigit()]
    return "gpucoll", tuple([*numbers, 0, 0, 0][:3])  # type: ignore[return-value]


def Get_abi_version() -> tuple[int, int]:
    """Return a version that stands for no binary interface."""
    return -1, -1


def Get_processor_name() -> str:
    """Return the host's name."""
    return os.uname().nodename[:MAX_PROCESSOR_NAME]


def Get_hw_resource_info() -> Info:
    """Return an empty Info."""
    return Info.Create()


def Wtime() -> float:
    """Return the time of a monotonic clock, in seconds."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the clock's resolution in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: there is no profiler."""


def Attach_buffer(buf: object) -> None:
    """Keep a buffer until it is detached. Buffered sends do not use it: they make copies."""
    job.attached = buf


def Detach_buffer() -> object:
    """Wait until all buffered sends are done; return the attached buffer."""
    Flush_buffer()
    found, job.attached = job.attached, None
    return found


def Flush_buffer() -> None:
    """Wait until all buffered sends are done."""
    try:
        for state in open_states():
            state.flush()
    except gpucoll.GpucollError as error:
        raise as_mpis(error) from None
