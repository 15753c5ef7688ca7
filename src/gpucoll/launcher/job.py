"""Preparation of a job's ranks: compiled kernels, an environment, CPUs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping

from gpucoll import config
from gpucoll.launcher.nodes import Span
from gpucoll.topology import cpu_sets, usable_cpus
from gpucoll.transport.shared import MAX_RANKS

__all__ = [
    "BIND_MODES",
    "compile_kernels",
    "interpreter",
    "joining_environment",
    "obstacle_to",
    "rank_cpus",
    "rank_environments",
]

BIND_MODES = ("auto", "none")

SPARE_DESCRIPTORS = 32
"""Descriptors that the launcher needs in addition to those of its ranks."""


def obstacle_to(ranks: int, descriptors: int) -> str:
    """Return why this many ranks cannot be started here; empty if they can.

    Parameters
    ----------
    ranks : int
        The number of ranks.
    descriptors : int
        The number of file descriptors that the launcher has open for each rank.
    """
    if ranks > MAX_RANKS:
        return f"{ranks} ranks: one host supports at most {MAX_RANKS}"
    needed, limit = ranks * descriptors + SPARE_DESCRIPTORS, soft_limit(resource.RLIMIT_NOFILE)
    if needed > limit:
        return (
            f"{ranks} ranks need {needed} file descriptors in their launcher, but the limit is "
            f"{limit}: raise it with ulimit -n"
        )
    if os.geteuid() and ranks > (limit := soft_limit(resource.RLIMIT_NPROC)):
        return f"{ranks} ranks: the limit is {limit} processes; raise it with ulimit -u"
    return ""


def soft_limit(number: int) -> float:
    """Return the soft limit of a resource of this process."""
    limit = resource.getrlimit(number)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def rank_environments(ranks: int, bind: str, span: Span | None = None) -> list[dict[str, str]]:
    """Return each rank's environment: the launcher's, plus the variables that identify the rank.

    ``OMP_NUM_THREADS`` and similar variables are left alone. A bound rank already has as many
    threads as CPUs, and an unbound one may be the only rank that computes.
    """
    from gpucoll.kernels.cpu import cache

    job = os.urandom(16).hex()
    common = {
        # Otherwise a rank that is killed would lose the last lines that it printed.
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **cache.environment(),
        config.WORLD_SIZE: str(span.world_size if span else ranks),
        config.LOCAL_WORLD_SIZE: str(ranks),
        config.JOB: job,
        config.BIND: bind,
        **({config.MEET: span.meet} if span else {}),
    }
    common.pop(config.JOIN, None)  # of a job within which this one is started
    first = span.first if span else 0
    return [
        {**common, config.RANK: str(first + place), config.LOCAL_RANK: str(place)}
        for place in range(ranks)
    ]


def joining_environment(first: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that takes the place of a first one, whose this is.

    It has the same local rank, by which it chooses a GPU, but no rank before it has joined.
    """
    kept = {k: v for k, v in first.items() if k not in (config.RANK, config.WORLD_SIZE)}
    return {**kept, config.JOIN: "1"}


def interpreter() -> list[str]:
    """Return this interpreter's command with its own options: -O, -W, -X dev, -I.

    The options are determined as multiprocessing does for the processes that it starts.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # this disables PYTHONUNBUFFERED, too, which `rank_environments` sets
    if sys.flags.ignore_environment:
        options.append("-u")
    return [sys.executable, *options]


def rank_cpus(ranks: int, bind: str) -> list[frozenset[int]]:
    """Return the CPUs to bind each rank to; empty sets if ranks are not bound.

    Only CPUs that the launcher itself may use are distributed, so a binding made by a batch system
    or by taskset stays in force.
    """
    sets = cpu_sets(ranks, usable_cpus()) if bind == "auto" else []
    return sets or [frozenset()] * ranks


def compile_kernels(report: Callable[[str], None]) -> None:
    """Compile the CPU kernels if they are not cached; many ranks at once would be slower.

    Parameters
    ----------
    report : callable
        Called with one line before a compilation, and if it fails. A failure does not stop the
        launcher: the program may never need the kernels, and if it does, its own error is more
        precise.
    """
    from gpucoll.backends.precompile import ensure_compiled

    try:
        ensure_compiled(report)
    except Exception as error:
        report(
            f"gpucoll: could not compile the kernels beforehand ({type(error).__name__}: {error})"
        )
