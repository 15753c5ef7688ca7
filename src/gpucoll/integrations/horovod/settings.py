"""Horovod's environment variables: what they set here, and which ones mean nothing here."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpucoll import ArgumentError, config

__all__ = [
    "LOG_LEVELS",
    "OF_ALL",
    "Place",
    "Settings",
    "settings_of",
    "variable_of",
    "warn_of_ignored",
]

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_MEBI = 1 << 20


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _milliseconds(text: str) -> float:
    return _number(text) / 1e3


def _flag(text: str) -> bool:
    return _whole(text) > 0


def _no_flag(text: str) -> bool:
    return not _flag(text)


def _level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise ValueError
    return text.upper()


@dataclass(frozen=True)
class Settings:
    """What Horovod's environment variables set; each field names its variable in `_VARIABLES`."""

    cycle_time_s: float = 1e-3
    """How long pending tensors wait for somebody to wait for them; then a thread drives them."""
    fusion_threshold_bytes: int = 128 * _MEBI
    """The most bytes that one call reduces together. 0: each tensor has a call of its own."""
    timeline: str = ""
    """The file of the timeline; empty: none. "DYNAMIC": none until `start_timeline`."""
    timeline_mark_cycles: bool = False
    stall_check: bool = True
    """Whether a warning names the tensors that not all ranks have submitted."""
    stall_check_s: float = 60.0
    """The time after which it does."""
    stall_shutdown_s: float = 0.0
    """The time after which such tensors fail. 0: never."""
    dynamic_process_sets: bool = False
    elastic: bool = False
    """Whether a launcher says that the job is elastic."""
    elastic_timeout_s: float = 600.0
    """How long an elastic job waits for enough ranks."""
    start_timeout_s: float = 0.0
    """The deadline for ranks to meet and for calls that have begun. 0: gpucoll's own."""
    log_level: str = ""
    """Of the logger ``gpucoll.horovod``; empty: as the program has set it."""


_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "cycle_time_s": ("CYCLE_TIME", _milliseconds, "a number of milliseconds"),
    "fusion_threshold_bytes": ("FUSION_THRESHOLD", _whole, "a whole number of bytes"),
    "timeline": ("TIMELINE", str, "a path"),
    "timeline_mark_cycles": ("TIMELINE_MARK_CYCLES", _flag, "0 or 1"),
    "stall_check": ("STALL_CHECK_DISABLE", _no_flag, "0 or 1"),
    "stall_check_s": ("STALL_CHECK_TIME_SECONDS", _number, "a number of seconds"),
    "stall_shutdown_s": ("STALL_SHUTDOWN_TIME_SECONDS", _number, "a number of seconds"),
    "dynamic_process_sets": ("DYNAMIC_PROCESS_SETS", _flag, "0 or 1"),
    "elastic": ("ELASTIC", _flag, "0 or 1"),
    "elastic_timeout_s": ("ELASTIC_TIMEOUT", _number, "a number of seconds"),
    "start_timeout_s": ("START_TIMEOUT", _number, "a number of seconds"),
    "log_level": ("LOG_LEVEL", _level, f"one of {', '.join(LOG_LEVELS)}"),
}
"""Field of `Settings` -> its variable, how its text is read, and what it must be."""

OF_ALL = ("fusion_threshold_bytes", "stall_check", "stall_check_s", "stall_shutdown_s")
"""Fields in which rank 0 decides: ranks that differ would not make the same calls."""

_IGNORED = {
    "ADASUM_MPI_CHUNK_SIZE": "Adasum has no chunks",
    **dict.fromkeys(
        (
            "AUTOTUNE",
            "AUTOTUNE_LOG",
            "AUTOTUNE_WARMUP_SAMPLES",
            "AUTOTUNE_STEPS_PER_SAMPLE",
            "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ),
        "there is nothing to tune",
    ),
    "BATCH_D2D_MEMCOPIES": "there is no fusion buffer",
    "CACHE_CAPACITY": "names are not cached: a digest of each one travels",
    "CONTROLLER": "there is one controller, gpucoll",
    "CPU_OPERATIONS": "gpucoll's backend is chosen by gpucoll",
    "DISABLE_GROUP_FUSION": "groups are fused with what is ready at the same time",
    "ENABLE_ASYNC_COMPLETION": "results of GPUs are always asynchronous",
    "ENABLE_XLA_OPS": "XLA has no operations here",
    "GLOO_TIMEOUT_SECONDS": "GPUCOLL_TIMEOUT_S is the deadline",
    "HIERARCHICAL_ALLGATHER": "gpucoll chooses its algorithms",
    "HIERARCHICAL_ALLREDUCE": "gpucoll chooses its algorithms",
    "LOG_HIDE_TIME": "log lines have no time",
    "MPI_THREADS_DISABLE": "there is no MPI",
    "NUM_NCCL_STREAMS": "a communicator has one stream",
    "THREAD_AFFINITY": "there is no background thread that never sleeps",
    "TORUS_ALLREDUCE": "gpucoll chooses its algorithms",
}
"""Variables that do nothing here, and why."""

_PLAIN = ("", "0", "gloo")
"""Values that ask for nothing else than what is here."""


def variable_of(name: str) -> str:
    """Return the full name of one of Horovod's variables."""
    return f"{config.HOROVOD}{name}"


def settings_of(environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of an environment, by default this process's.

    Raises
    ------
    ArgumentError
        A variable's value is not what it must be.
    """
    environment = os.environ if environment is None else environment
    given = {}
    for field in fields(Settings):
        name, read, form = _VARIABLES[field.name]
        text = environment.get(variable_of(name), "").strip()
        if not text:
            continue
        try:
            given[field.name] = read(text)
        except ValueError:
            raise ArgumentError(f"{variable_of(name)} must be {form}; got {text!r}") from None
    return Settings(**given)


_has_warned = False


def warn_of_ignored(rank: int) -> None:
    """Say once, on rank 0, which of the variables that are set do nothing here."""
    global _has_warned
    found = [
        f"{variable_of(name)} ({why})"
        for name, why in _IGNORED.items()
        if os.environ.get(variable_of(name), "").lower() not in _PLAIN
    ]
    if found and rank == 0 and not _has_warned:
        _has_warned = True
        warnings.warn(f"set, but without effect here: {', '.join(found)}", RuntimeWarning, 5)


@dataclass(frozen=True)
class Place:
    """Where a rank is in its job, as programs find it in the environment."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell it."""
        return {
            variable_of(field.name.upper()): str(getattr(self, field.name))
            for field in fields(self)
        }

    @staticmethod
    def from_launcher() -> Place | None:
        """Return the place that gpucoll's launcher has given this process; None without one.

        It is exact if each host has as many ranks; `init` corrects it.
        """
        names = (config.RANK, config.WORLD_SIZE, config.LOCAL_RANK, config.LOCAL_WORLD_SIZE)
        texts = [config.variable(name) for name in names]
        if not all(text and text.isdecimal() for text in texts):
            return None
        rank, size, local_rank, local_size = (int(text or 0) for text in texts)
        hosts = -(-size // local_size)
        name = Place.hostname_here()
        return Place(rank, size, local_rank, local_size, rank // local_size, hosts, name)

    @staticmethod
    def hostname_here() -> str:
        """Return this host's name: the one by which its launcher knows it, or its own."""
        return os.environ.get(variable_of("HOSTNAME")) or os.uname().nodename
