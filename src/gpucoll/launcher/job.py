"""What a job's ranks get before they start: compiled kernels, an environment, CPUs of their own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable

from gpucoll import config
from gpucoll.launcher.nodes import Span
from gpucoll.topology import cpu_sets, usable_cpus
from gpucoll.transport.shared.layout import MAX_RANKS

__all__ = [
    "BIND_MODES",
    "compile_kernels",
    "interpreter",
    "obstacle_to",
    "rank_cpus",
    "rank_environments",
]

BIND_MODES = ("auto", "none")

SPARE_DESCRIPTORS = 32
"""For what the launcher opens beside its ranks."""


def obstacle_to(ranks: int, descriptors: int) -> str:
    """Return why so many ranks cannot be started here; empty where nothing speaks against it.

    Parameters
    ----------
    ranks : int
        How many.
    descriptors : int
        How many file descriptors the launcher has open for each.
    """
    if ranks > MAX_RANKS:
        return f"{ranks} ranks: one host has {MAX_RANKS} at most"
    needed, limit = ranks * descriptors + SPARE_DESCRIPTORS, soft_limit(resource.RLIMIT_NOFILE)
    if needed > limit:
        return (
            f"{ranks} ranks need {needed} file descriptors in their launcher, and the limit is "
            f"{limit}: raise it with ulimit -n"
        )
    if os.geteuid() and ranks > (limit := soft_limit(resource.RLIMIT_NPROC)):
        return f"{ranks} ranks: the limit is {limit} processes; raise it with ulimit -u"
    return ""


def soft_limit(number: int) -> float:
    """Return a limit of this process that is in force."""
    limit = resource.getrlimit(number)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def rank_environments(ranks: int, bind: str, span: Span | None = None) -> list[dict[str, str]]:
    """Return each rank's environment: the launcher's, and what tells a rank who it is.

    ``OMP_NUM_THREADS`` and its kin are left alone: a rank that is bound to CPUs already has as many
    threads as CPUs, and one that is not may be the only one that computes.
    """
    from gpucoll.kernels.cpu import cache

    job = os.urandom(16).hex()
    common = {
        # A rank that is killed would otherwise take the last lines that it printed with it.
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **cache.environment(),
        config.WORLD_SIZE: str(span.world_size if span else ranks),
        config.LOCAL_WORLD_SIZE: str(ranks),
        config.JOB: job,
        config.BIND: bind,
        **({config.MEET: span.meet} if span else {}),
    }
    first = span.first if span else 0
    return [
        {**common, config.RANK: str(first + place), config.LOCAL_RANK: str(place)}
        for place in range(ranks)
    ]


def interpreter() -> list[str]:
    """Return this interpreter's command, with the options that it runs under: -O, -W, -X dev, -I.

    Found out as multiprocessing does for the processes that it starts.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if sys.flags.ignore_environment:  # PYTHONUNBUFFERED, too, which `rank_environments` sets
        options.append("-u")
    return [sys.executable, *options]


def rank_cpus(ranks: int, bind: str) -> list[frozenset[int]]:
    """Return the CPUs to bind each rank to; empty sets where the ranks are not to be bound.

    Only CPUs that the launcher may use itself are shared out, so a binding made by a batch system
    or by taskset stays in force.
    """
    sets = cpu_sets(ranks, usable_cpus()) if bind == "auto" else []
    return sets or [frozenset()] * ranks


def compile_kernels(report: Callable[[str], None]) -> None:
    """Compile the CPU kernels if this host has not yet: ranks that do it all at once are slower.

    Parameters
    ----------
    report : callable
        Called with one line before a compilation, and if it fails. A failure is not the launcher's
        to judge: the program may never need the kernels, and if it does, its own error says more.
    """
    from gpucoll.backends.precompile import ensure_compiled

    try:
        ensure_compiled(report)
    except Exception as error:
        report(
            f"gpucoll: could not compile the kernels beforehand ({type(error).__name__}: {error})"
        )
