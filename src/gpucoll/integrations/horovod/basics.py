"""`init` and `shutdown`, who this rank is, and what programs ask about how Horovod was built."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from gpucoll import GpucollError
from gpucoll.integrations.horovod import process_sets as sets
from gpucoll.integrations.horovod.elastic import membership
from gpucoll.integrations.horovod.engine.engine import Engine
from gpucoll.integrations.horovod.engine.request import ReduceOp
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.job import job
from gpucoll.integrations.horovod.process_sets import ProcessSet
from gpucoll.integrations.horovod.timeline import Timeline

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Meet the other ranks; does nothing if that was done. See `gpucoll.init` for how they meet.

    Parameters
    ----------
    comm : list of int, optional
        The ranks of the job that take part; default: all. All ranks call `init`.
    process_sets : list of ProcessSet, or "dynamic"
        Sets that get an engine now. "dynamic": sets may be added later.

    Raises
    ------
    ValueError
        `comm` is no list of ranks of the job; a process set is there twice, or other ranks pass
        other sets.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is a list of sets or "dynamic"; got {process_sets!r}')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    if comm is not None and not isinstance(comm, Sequence):
        raise ValueError(
            f"comm is a list of ranks; got {comm!r}. Horovod over gpucoll was not built with MPI: "
            "communicators of mpi4py are not taken"
        )
    if job.is_initialized:
        return
    try:
        try:
            job.begin(comm or ())
            sets.begin(process_sets or ())
        except (*membership.LOSSES, HorovodInternalError):
            if not membership.goes_on_as_newcomer():
                raise
    except BaseException:
        with contextlib.suppress(GpucollError):
            job.end()  # so that the other ranks do not wait for this one
        raise


def shutdown() -> None:
    """Leave the job; `init` may be called again, by all ranks."""
    job.end()


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    return job.is_initialized


def engine_of(process_set: ProcessSet | int) -> Engine:
    """Return the engine of a process set that this rank belongs to."""
    number = process_set if isinstance(process_set, int) else process_set.process_set_id
    return job.engine_of(number)


def rank() -> int:
    """Return this rank's number."""
    return job.rank


def size() -> int:
    """Return the number of ranks."""
    return job.size


def local_rank() -> int:
    """Return this rank's number on its host."""
    return job.local()[0]


def local_size() -> int:
    """Return the number of ranks on this host."""
    return job.local()[1]


def cross_rank() -> int:
    """Return this host's number among those that have a rank of this local number."""
    return job.cross()[0]


def cross_size() -> int:
    """Return how many hosts have a rank of this local number."""
    return job.cross()[1]


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return job.is_homogeneous()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a timeline, on rank 0; see `gpucoll.integrations.horovod.timeline`."""
    job.check()
    stop_timeline()
    if job.rank == 0:
        job.set_timeline(Timeline(file_path, mark_cycles))


def stop_timeline() -> None:
    """End the timeline, if there is one."""
    job.check()
    job.set_timeline(None)


# --- what programs ask about how Horovod was built ----------------------------------------------


def mpi_threads_supported() -> bool:
    """Raise: there is no MPI.

    Raises
    ------
    ValueError
    """
    raise ValueError("Horovod over gpucoll was not built with MPI; ask gloo_enabled()")


def mpi_enabled() -> bool:
    """Return False."""
    return False


def mpi_built() -> bool:
    """Return False."""
    return False


def gloo_enabled() -> bool:
    """Return True: gpucoll does on CPUs what Gloo does for Horovod."""
    return True


def gloo_built() -> bool:
    """Return True; see `gloo_enabled`."""
    return True


def nccl_built() -> int:
    """Return the version of the NCCL or RCCL that gpucoll uses, such as 22803; 0 without GPUs."""
    if not job.is_initialized:
        return 0
    told: dict[str, Any] = dict(job.world.describe().facts)
    version = str(told.get("NCCL", told.get("RCCL", "")))
    parts = [part for part in version.split(".") if part.isdigit()]
    return int(f"{parts[0]}{int(parts[1]):02}{int(parts[2]):02}") if len(parts) == 3 else 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return whether a GPU of NVIDIA is in use."""
    return nccl_built() > 0 and not rocm_built()


def rocm_built() -> bool:
    """Return whether a GPU of AMD is in use."""
    return job.is_initialized and "RCCL" in dict(job.world.describe().facts)


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    job.check()
    return {number: list(ranks) for number, ranks in sorted(job.sets.items())}
