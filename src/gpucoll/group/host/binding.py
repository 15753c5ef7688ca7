"""Find the CPUs that each rank can have for itself, and bind ranks to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpucoll import config
from gpucoll.topology.cpus import FILE_SYSTEM, cpu_sets


def own_cpus(
    allowed: Sequence[frozenset[int]], rank: int, root: Path = FILE_SYSTEM
) -> frozenset[int] | None:
    """Return a rank's own part of the CPUs that it shares with others; None: there are no parts.

    Parameters
    ----------
    allowed : sequence of frozenset of int
        By rank, the CPUs that it may use. Ranks that share any CPU must share all of theirs.
    rank : int
        Whose part to return.
    root : Path
        The file system whose ``/sys`` is read.
    """
    mine = allowed[rank]
    sharing = _sharing(allowed, rank)
    if any(allowed[other] != mine for other in sharing):
        return None
    parts = cpu_sets(len(sharing), mine, root)
    return parts[sharing.index(rank)] if parts else None


def bind(allowed: Sequence[frozenset[int]], rank: int) -> str:
    """Bind this process to CPUs of its own among those that the ranks share; describe the result.

    It binds the threads that may run on all CPUs of the process. A thread that the program has
    bound itself stays bound as it is.
    """
    mine = allowed[rank]
    if len(_sharing(allowed, rank)) == 1:
        return describe(allowed, rank)
    part = own_cpus(allowed, rank) if config.binding_allowed() else None
    if part is None:
        why = (
            f"not bound, because {config.BIND} is none"
            if not config.binding_allowed()
            else "not bound, because they cannot be divided among these ranks"
        )
        return f"{_shared(allowed, rank)}; {why}"
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                if os.sched_getaffinity(int(thread)) == mine:
                    os.sched_setaffinity(int(thread), part)
    except OSError as error:
        return f"{_shared(allowed, rank)}; not bound: {error.strerror}"
    return f"{_cpus(part)}, bound by init, for this rank alone"


def describe(allowed: Sequence[frozenset[int]], rank: int) -> str:
    """Describe which CPUs a rank may use, and with how many ranks it shares them."""
    if len(_sharing(allowed, rank)) == 1:
        return f"{_cpus(allowed[rank])}, for this rank alone"
    sharing, mine = _sharing(allowed, rank), allowed[rank]
    if len(mine) < len(sharing) or any(allowed[other] != mine for other in sharing):
        return _shared(allowed, rank)
    return f"{_shared(allowed, rank)}; gpucoll.init(bind=True) gives each its own"


def _sharing(allowed: Sequence[frozenset[int]], rank: int) -> list[int]:
    """Return the ranks that may use any CPU that `rank` may use, `rank` among them."""
    return [other for other, cpus in enumerate(allowed) if other == rank or cpus & allowed[rank]]


def _shared(allowed: Sequence[frozenset[int]], rank: int) -> str:
    return f"{_cpus(allowed[rank])}, shared by {len(_sharing(allowed, rank))} ranks"


def _cpus(cpus: frozenset[int]) -> str:
    """Return CPUs as the kernel writes them: 0-3,8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
