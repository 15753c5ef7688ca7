"""Who this process is: rank and world size, from arguments or from what started it."""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass

from gpucoll import config
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    RendezvousError,
)
from gpucoll.rendezvous import launchers
from gpucoll.rendezvous.launchers import Started, number

_GPUCOLL, _TORCHRUN = "gpucoll-run's environment", "torchrun's environment"
_OWN_TOKENS = (_GPUCOLL, _TORCHRUN)
_TORCHRUN_MEETS = ("MASTER_ADDR", "MASTER_PORT")
_ALONE, _ARGUMENTS = "no launcher", "arguments"


@dataclass(frozen=True)
class Job:
    """A rank's place, and the token that all ranks of its job share."""

    rank: int
    world_size: int
    token: str
    origin: str
    """What it was read from, for messages."""
    is_launched: bool = False
    """Whether a launcher started this process, and ends the job when it fails."""

    @property
    def is_gpucolls(self) -> bool:
        """Whether that is gpucoll's launcher, and these are all ranks that it started."""
        return self.origin == _GPUCOLL


def find_job(rank: int | None = None, world_size: int | None = None) -> Job:
    """Return this process's job: what the arguments or the launcher say, or one rank alone.

    Where one launcher runs inside of another one's job, the first of these holds: gpucoll-run,
    torchrun, Open MPI, hydra (MPICH, Intel MPI), Slurm.

    Raises
    ------
    ArgumentError
        Only one of the two arguments is there, or they contradict each other.
    RendezvousError
        The environment is incomplete, or has nothing that names the job.
    BackendUnavailableError
        The job spans several hosts, which this version cannot.
    """
    if rank is None and world_size is None:
        started = _find_started()
        if started is None:
            _check_not_half_told()
            launchers.check_no_other()
            return Job(0, 1, "", _ALONE)
        _check_one_host(started)
        token = _token(started, started.rank, started.world_size)
        return _checked(started.rank, started.world_size, token, started.origin)
    if rank is None or world_size is None:
        raise ArgumentError("rank and world_size go together: give both or none")
    _check_arguments(rank, world_size)
    if world_size == 1:
        return Job(0, 1, "", _ARGUMENTS)
    started = _find_started()
    if started is not None and started.world_size == world_size:
        _check_one_host(started)  # with fewer, they may be those of one host alone
    return Job(int(rank), int(world_size), _token(started, rank, world_size), _ARGUMENTS)


def _check_arguments(rank: int, world_size: int) -> None:
    given: tuple[tuple[str, object], ...] = (("rank", rank), ("world_size", world_size))
    for name, value in given:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ArgumentTypeError(f"{name} must be an int; got {value!r}")
    if world_size < 1:
        raise ArgumentError(f"world_size must be at least 1; got {world_size}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank must be in 0..{world_size - 1}; got {rank}")


def _find_started() -> Started | None:
    return _from_gpucoll() or _from_torchrun() or launchers.find()


def _check_one_host(started: Started) -> None:
    if started.elsewhere:
        raise BackendUnavailableError(
            f"{started.origin}: the job has {started.world_size} ranks, {started.elsewhere}: this "
            "version of gpucoll joins the ranks of one host only. Start all ranks on one host, or "
            "join those of each host alone: init(rank=, world_size=) with their numbers there"
        )


def _token(started: Started | None, rank: int, world_size: int) -> str:
    """Return what the ranks meet by: the launcher's name for the job, or the user's."""
    if world_size == 1:
        return ""
    if started is not None and started.origin in _OWN_TOKENS and started.token:
        return started.token
    if token := config.variable(config.JOB) or (started.token if started else ""):
        return token
    word = f"set {config.JOB} to the same word on each rank"
    if started is None:
        raise RendezvousError(
            f"rank {rank} of {world_size} has nothing to meet the others by: start the ranks "
            f"with gpucoll-run, torchrun, mpiexec or srun, or {word}"
        )
    why = f" ({started.why_no_token})" if started.why_no_token else ""
    raise RendezvousError(
        f"rank {rank} of {world_size} has nothing to meet the others by: {started.origin} does "
        f"not name the job{why}. For each job {word}, or start the ranks with gpucoll-run"
    )


def _checked(rank: int, world_size: int, token: str, origin: str) -> Job:
    if not 0 <= rank < world_size:
        raise RendezvousError(f"{origin} says rank {rank} of {world_size}, which cannot be")
    # A task alone is often a shell: what is called there by hand must not be ended with the task.
    is_launched = world_size > 1 or origin in _OWN_TOKENS
    return Job(rank, world_size, token, origin, is_launched)


def _from_gpucoll() -> Started | None:
    if config.RANK not in os.environ:
        return None
    token = os.environ.get(config.JOB, "")
    world_size = number(config.WORLD_SIZE)
    if world_size > 1 and not token:
        raise RendezvousError(f"{config.RANK} is set but {config.JOB} is not")
    return Started(_GPUCOLL, number(config.RANK), world_size, token)


def _check_not_half_told() -> None:
    """Raise where the environment says that there are others, but not how to meet them."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and number("WORLD_SIZE") > 1:
        missing = " and ".join(name for name in _TORCHRUN_MEETS if name not in os.environ)
        raise RendezvousError(
            f"RANK and WORLD_SIZE={os.environ['WORLD_SIZE']} are set but {missing} not: start the "
            "ranks with gpucoll-run or torchrun, or, for one rank alone, say "
            "init(rank=0, world_size=1)"
        )


def _from_torchrun() -> Started | None:
    if not {"RANK", "WORLD_SIZE", *_TORCHRUN_MEETS} <= os.environ.keys():
        return None
    world_size = number("WORLD_SIZE")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    elsewhere = "" if local == world_size else f"{local} of them on this host"
    parts = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    token = "torchrun:" + ":".join(os.environ.get(part, "") for part in parts)
    return Started(_TORCHRUN, number("RANK"), world_size, token, elsewhere)
