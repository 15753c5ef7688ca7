"""Find the CPUs that this process may really use, and share them out among ranks.

How long a rank spins before it sleeps depends on whether every rank has a CPU of its own. The
machine's CPU count does not tell: an affinity mask (taskset, a batch system, a cpuset) and a
cgroup's CPU quota (a container's ``--cpus``) both reduce it. All functions that read ``/proc`` and
``/sys`` take the root of the file system as a parameter, so that tests can supply machines of their
own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FILE_SYSTEM = Path("/")


# --- how many -----------------------------------------------------------------------------------


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process's affinity mask allows."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpu_count(root: Path = FILE_SYSTEM) -> int:
    """Return how many ranks can run at the same time, each on a CPU of its own; at least 1.

    It is the smaller of the affinity mask and the cgroup's quota. A fractional quota is rounded
    down: two ranks that spin on a quota of 1.5 CPUs are both throttled.

    Parameters
    ----------
    root : Path
        The file system whose ``/proc`` and ``/sys`` are read.
    """
    count = len(usable_cpus())
    quota = cpu_quota(root)
    if quota is not None:
        count = min(count, math.floor(quota + 1e-6))
    return max(count, 1)


def cpu_quota(root: Path = FILE_SYSTEM) -> float | None:
    """Return the CPU time that this process's cgroups allow, in CPUs; None: there is no limit.

    Parameters
    ----------
    root : Path
        The file system whose ``/proc`` and ``/sys`` are read.

    Returns
    -------
    float or None
        The smallest quota between the process's own cgroup and the top of the mounted hierarchy: a
        cgroup's limit applies to all cgroups below it. Both cgroup versions are read, because a
        hybrid machine mounts both.
    """
    quotas = [
        quota for folder in cgroup_folders("cpu", root) if (quota := _quota_of(folder)) is not None
    ]
    return min(quotas, default=None)


def cgroup_folders(controller: str, root: Path = FILE_SYSTEM) -> Iterator[Path]:
    """Yield the folders that can limit this process: its own cgroups, and all above them.

    Parameters
    ----------
    controller : str
        The limited resource: ``"cpu"`` or ``"memory"``.
    root : Path
        The file system whose ``/proc`` and ``/sys`` are read.
    """
    for mount in _cgroup_mounts(root, controller):
        below = _path_below(_cgroup_path(root, mount.version, controller), mount.shown)
        top = root / mount.point.relative_to("/")
        for folder in [below, *below.parents]:
            yield top / folder


class _Mount(NamedTuple):
    """A mounted cgroup hierarchy."""

    version: int
    shown: PurePosixPath
    """The cgroup that appears at `point`; not the top one if a container sees only its own."""
    point: PurePosixPath


def _cgroup_mounts(root: Path, controller: str) -> Iterator[_Mount]:
    """Yield the hierarchies that can have a limit, from mountinfo (proc(5))."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version = 2
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            version = 1
        else:
            continue
        yield _Mount(version, *(PurePosixPath(_unescaped(text)) for text in fields[3:5]))


def _unescaped(text: str) -> str:
    r"""Undo mountinfo's octal escapes: it writes a space as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _cgroup_path(root: Path, version: int, controller: str) -> PurePosixPath:
    """Return the process's cgroup in that version's hierarchy, as /proc/self/cgroup names it."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version == 2 and number == "0" and not controllers) or (
            version == 1 and controller in controllers.split(",")
        ):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _path_below(path: PurePosixPath, shown: PurePosixPath) -> PurePosixPath:
    """Return `path` relative to the mount, or the mount's top if the mount does not show `path`."""
    if ".." not in path.parts and path.is_relative_to(shown):
        return path.relative_to(shown)
    return PurePosixPath()


def _quota_of(folder: Path) -> float | None:
    """Return one cgroup's own quota in CPUs, or None: no limit, or no such files."""
    words = read_text(folder / "cpu.max").split()
    if not words:
        words = [
            *read_text(folder / "cpu.cfs_quota_us").split(),
            *read_text(folder / "cpu.cfs_period_us").split(),
        ]
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:  # "max", or not two words
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


# --- which ones for each rank -------------------------------------------------------------------


def cpu_sets(ranks: int, cpus: Collection[int], root: Path = FILE_SYSTEM) -> list[frozenset[int]]:
    """Share CPUs out among ranks: disjoint sets, each as close together as the machine allows.

    Ranks get whole packages, NUMA nodes, level-3 caches or cores as long as there are enough of
    them. Otherwise only the smallest possible unit is divided: on two cores with two threads each,
    two ranks get one core each, and only a third rank makes two of them share a core. Neighbouring
    ranks are neighbours on the machine. Closeness takes precedence over equal sizes: three ranks on
    two NUMA nodes get half a node, half a node and a node. If sysfs does not describe a unit, it is
    treated as one large unit of independent cores.

    Parameters
    ----------
    ranks : int
        Number of ranks, at least 1.
    cpus : collection of int
        The CPUs to share out, as `usable_cpus` returns them. Every CPU is given to a rank.
    root : Path
        The file system whose ``/sys`` is read.

    Returns
    -------
    list of frozenset of int
        One set for each rank. Empty if there are fewer CPUs than ranks; then no rank should be
        bound.
    """
    if len(cpus) < ranks:
        return []
    nodes = _numa_nodes(root)
    places = {cpu: _place(cpu, nodes, root) for cpu in cpus}
    return _spread(ranks, sorted(cpus, key=places.__getitem__), places, level=0)


class _Place(NamedTuple):
    """The position of a CPU: the number of each unit around it, from the largest to itself."""

    package: int
    numa_node: int
    cache: int
    core: int
    cpu: int


CORE_LEVEL = _Place._fields.index("core")


def _place(cpu: int, nodes: dict[int, int], root: Path) -> _Place:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    package = read_text(folder / "topology/physical_package_id").strip()
    return _Place(
        package=int(package) if package.isdecimal() else 0,
        numa_node=nodes.get(cpu, -1),
        # A unit that several CPUs share is numbered by the lowest of them, because core_id and
        # cache ids are unique only within a package, and are missing on some machines.
        cache=min(parse_cpu_list(read_text(folder / "cache/index3/shared_cpu_list")), default=-1),
        core=min(parse_cpu_list(read_text(folder / "topology/thread_siblings_list")), default=cpu),
        cpu=cpu,
    )


def _numa_nodes(root: Path) -> dict[int, int]:
    """Return CPU -> NUMA node."""
    return {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        for cpu in parse_cpu_list(read_text(folder / "cpulist"))
    }


def _spread(
    ranks: int, cpus: Sequence[int], places: dict[int, _Place], level: int
) -> list[frozenset[int]]:
    """Share `cpus`, sorted by place and inside one unit of the level above, out among `ranks`."""
    if ranks == 1:
        return [frozenset(cpus)]
    units = _units(cpus, places, level)
    if ranks <= len(units):
        cuts = [len(units) * rank // ranks for rank in range(ranks + 1)]
        return [
            frozenset(cpu for unit in units[start:stop] for cpu in unit)
            for start, stop in pairwise(cuts)
        ]
    cores = [len(_units(unit, places, CORE_LEVEL)) for unit in units]
    sizes = cores if ranks <= sum(cores) else [len(unit) for unit in units]
    return [
        cpu_set
        for unit, share in zip(units, _shares(ranks, sizes), strict=True)
        for cpu_set in _spread(share, unit, places, level + 1)
    ]


def _units(cpus: Sequence[int], places: dict[int, _Place], level: int) -> list[list[int]]:
    """Divide CPUs that are sorted by place into the units of one level."""
    return [list(unit) for _, unit in groupby(cpus, key=lambda cpu: places[cpu][: level + 1])]


def _shares(ranks: int, sizes: Sequence[int]) -> list[int]:
    """Divide `ranks` among units in proportion to their sizes: from 1 to its size for each unit.

    Each further rank goes to the unit with the most room per rank (D'Hondt's method). As long as
    the ranks are no more than the sum of the sizes, a full unit never wins against one that is not
    full.
    """
    shares = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        room = [size / (share + 1) for size, share in zip(sizes, shares, strict=True)]
        shares[room.index(max(room))] += 1
    return shares


def parse_cpu_list(text: str) -> list[int]:
    """Return the CPUs of a list in the kernel's notation, such as ``0-3,8``; it may be empty."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def read_text(path: Path) -> str:
    """Return a small file's text; empty: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
