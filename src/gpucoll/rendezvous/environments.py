"""Which rank of which job a process is, by the environment with which a launcher has started it.

`job.find_job` reads this process's environment, completely and with errors. An observer reads those
of other processes, and needs only to know which of them belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpucoll import config
from gpucoll.hashing import blake2b

__all__ = ["Launched", "launched_as"]


class Launched(NamedTuple):
    """A process that a launcher has started as a rank.

    Attributes
    ----------
    job : str
        A digest of what names the job: the same on all of its ranks; no secret can be read from it.
    rank, world_size : int
        As the launcher numbers and counts them.
    is_gpucolls : bool
        Whether gpucoll's own launcher has started it, or somebody by the same variables.
    """

    job: str
    rank: int
    world_size: int
    is_gpucolls: bool


class _Variables(NamedTuple):
    rank: str
    world_size: str
    job: tuple[str, ...]


_TABLE = (  # in the order of `job.find_job`
    _Variables(config.RANK, config.WORLD_SIZE, (config.JOB, config.MEET)),
    _Variables("RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    _Variables(
        config.OPEN_MPI_RANK,
        config.OPEN_MPI_WORLD_SIZE,
        (config.PMIX_NAMESPACE, config.PMIX_SERVER),
    ),
    _Variables(config.PMI_RANK, config.PMI_SIZE, ()),  # the launcher's process names the job
    _Variables(
        config.SLURM_RANK, config.SLURM_STEP_TASKS, (config.SLURM_JOB_ID, config.SLURM_STEP_ID)
    ),
)


def launched_as(environment: Mapping[str, str], launcher: Callable[[], int]) -> Launched | None:
    """Return as which rank a process was started; None: no launcher has started it.

    Parameters
    ----------
    environment : mapping
        The environment with which the process was started.
    launcher : callable
        Returns the process that has started it, for launchers that name the job by nothing else.
    """
    for names in _TABLE:
        if not {names.rank, names.world_size} <= environment.keys():
            continue
        rank, world_size = environment[names.rank], environment[names.world_size]
        if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
            return None
        parts = [environment.get(name, "") for name in names.job]
        if not any(parts):
            parts = [str(launcher())]
        text = "\0".join([names.rank, *parts])
        job = blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
        return Launched(job, int(rank), int(world_size), names.rank == config.RANK)
    return None
