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

_GPUCOLL, _TORCHRUN = "gpucoll-run's environment", "torchrun's environment"
_TORCHRUN_MEETS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """A rank's place, and the token that all ranks of its job share."""

    rank: int
    world_size: int
    token: str
    origin: str
    """What it was read from, for messages."""

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, and ends the job when it fails."""
        return self.origin in (_GPUCOLL, _TORCHRUN)

    @property
    def is_gpucolls(self) -> bool:
        """Whether that is gpucoll's launcher, and these are all ranks that it started."""
        return self.origin == _GPUCOLL


def find_job(rank: int | None = None, world_size: int | None = None) -> Job:
    """Return this process's job: what the launcher said, or one rank alone.

    Raises
    ------
    ArgumentError
        Only one of the two arguments is there, or they contradict each other.
    RendezvousError
        The environment is incomplete, or contradicts the arguments.
    BackendUnavailableError
        The job spans several hosts, which this version cannot.
    """
    job = _from_gpucoll() or _from_torchrun()
    if rank is None and world_size is None:
        if job is None:
            _check_not_half_told()
        return job or Job(0, 1, "", "no launcher")
    if rank is None or world_size is None:
        raise ArgumentError("rank and world_size go together: give both or none")
    given: tuple[tuple[str, object], ...] = (("rank", rank), ("world_size", world_size))
    for name, number in given:
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise ArgumentTypeError(f"{name} must be an int; got {number!r}")
    if world_size < 1:
        raise ArgumentError(f"world_size must be at least 1; got {world_size}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank must be in 0..{world_size - 1}; got {rank}")
    if world_size > 1:
        token = job.token if job else os.environ.get(config.JOB, "")
        if not token:
            raise RendezvousError(
                f"rank {rank} of {world_size} has nothing to meet the others by: start the ranks "
                f"with gpucoll-run or torchrun, or set {config.JOB} to the same word on each"
            )
        return Job(int(rank), int(world_size), token, "arguments")
    return Job(0, 1, "", "arguments")


def _number(name: str) -> int:
    text = os.environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        state = "is not set" if text is None else f"is {text!r}"
        raise RendezvousError(f"{name} must be a number, but {state}") from None


def _checked(rank: int, world_size: int, token: str, origin: str) -> Job:
    if not 0 <= rank < world_size:
        raise RendezvousError(f"{origin} says rank {rank} of {world_size}, which cannot be")
    return Job(rank, world_size, token, origin)


def _from_gpucoll() -> Job | None:
    if config.RANK not in os.environ:
        return None
    token = os.environ.get(config.JOB, "")
    world_size = _number(config.WORLD_SIZE)
    if world_size > 1 and not token:
        raise RendezvousError(f"{config.RANK} is set but {config.JOB} is not")
    return _checked(_number(config.RANK), world_size, token, _GPUCOLL)


def _check_not_half_told() -> None:
    """Raise where the environment says that there are others, but not how to meet them."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and _number("WORLD_SIZE") > 1:
        missing = " and ".join(name for name in _TORCHRUN_MEETS if name not in os.environ)
        raise RendezvousError(
            f"RANK and WORLD_SIZE={os.environ['WORLD_SIZE']} are set but {missing} not: start the "
            "ranks with gpucoll-run or torchrun, or, for one rank alone, say "
            "init(rank=0, world_size=1)"
        )


def _from_torchrun() -> Job | None:
    if not {"RANK", "WORLD_SIZE", *_TORCHRUN_MEETS} <= os.environ.keys():
        return None
    world_size = _number("WORLD_SIZE")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local != world_size:
        raise BackendUnavailableError(
            f"torchrun's job has {world_size} ranks, {local} of them on this host: this version of "
            "gpucoll joins the ranks of one host only"
        )
    parts = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    token = "torchrun:" + ":".join(os.environ.get(part, "") for part in parts)
    return _checked(_number("RANK"), world_size, token, _TORCHRUN)
