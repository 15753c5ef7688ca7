"""How the ranks of each library start: processes, environment, CPUs."""

from __future__ import annotations

import os
import secrets
import site
import sys
from pathlib import Path

import gpucoll
from gpucoll import config
from gpucoll.bench import rank as rank_package
from gpucoll.bench.groups import ProcessGroup
from gpucoll.bench.peers import LocatedPeer, environment_of_peer
from gpucoll.bench.rank_processes import Start
from gpucoll.topology import cpu_sets, usable_cpu_count, usable_cpus

__all__ = ["cpus_of_ranks", "own_environment", "own_group", "peer_environment", "peer_group"]

RANK_PROGRAM = str(Path(rank_package.__file__).parent / "__main__.py")

OWN_LIBRARY = "gpucoll"
"""What `rank.process` joins. A test puts the path of its own library here."""


def cpus_of_ranks(ranks: int) -> list[int]:
    """Return a CPU for each rank, the same for every library; empty if there are too few."""
    if ranks > usable_cpu_count():
        return []
    return [min(cpus) for cpus in cpu_sets(ranks, usable_cpus())]


def own_group(
    ranks: int,
    cpus: list[int],
    timeout_s: float,
    array: str = "numpy",
    name: str = "gpucoll",
    backend: str = "auto",
) -> ProcessGroup:
    """Start gpucoll's ranks, as its launcher would.

    `array` is the kind of their arrays, `backend` the backend for these.
    """
    job = secrets.token_hex(16)
    arguments = [*rank_arguments(OWN_LIBRARY, ranks, cpus, timeout_s), "--array", array]
    arguments += ["--backend", backend]
    starts = []
    for rank in range(ranks):
        environment = own_environment()
        environment[config.RANK] = environment[config.LOCAL_RANK] = str(rank)
        environment[config.WORLD_SIZE] = environment[config.LOCAL_WORLD_SIZE] = str(ranks)
        environment[config.JOB] = job
        command = [sys.executable, *arguments, "--rank", str(rank)]
        starts.append(Start(command, environment, rank))
    return ProcessGroup(name, ranks, starts)


def own_environment() -> dict[str, str]:
    """Return this process's environment with the same gpucoll, wherever it was imported from.

    An installed gpucoll needs no help: its folder must not come before the user's `PYTHONPATH`.
    """
    environment = dict(os.environ)
    place = str(Path(gpucoll.__file__).parent.parent)
    if place in (*site.getsitepackages(), site.getusersitepackages()):
        return environment
    paths = [place, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def peer_environment(located: LocatedPeer, folder: Path) -> dict[str, str]:
    """Return the environment of a peer's ranks; its temporary files go to `folder`."""
    return {
        **environment_of_peer(),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        **located.peer.environment,
    }


def peer_group(
    located: LocatedPeer, ranks: int, cpus: list[int], timeout_s: float, folder: Path
) -> ProcessGroup:
    """Start a peer's ranks; its temporary files go to `folder`."""
    environment = peer_environment(located, folder)
    cpus = cpus if located.peer.pinned else []
    arguments = rank_arguments(located.peer.library, ranks, cpus, timeout_s)
    arguments += ["--store", str(folder / f"{located.name}.store")]
    if located.mpiexec:
        starts = [Start(located.command(ranks, arguments), environment)]
    else:
        starts = [
            Start([located.python, *arguments, "--rank", str(rank)], environment, rank)
            for rank in range(ranks)
        ]
    return ProcessGroup(located.name, ranks, starts)


def rank_arguments(library: str, ranks: int, cpus: list[int], timeout_s: float) -> list[str]:
    """Return the rank program and the arguments that are the same for every rank of a library."""
    return [
        RANK_PROGRAM,
        "--library", library,
        "--connect", "{connect}",
        "--world-size", str(ranks),
        "--cpus", ",".join(map(str, cpus)),
        "--timeout-s", str(timeout_s),
    ]  # fmt: skip
