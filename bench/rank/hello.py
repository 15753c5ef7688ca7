"""A minimal program for a library's own launcher, which reports the resources that it took.

It is run by its path: ``hello.py LIBRARY WHAT FOLDER``. LIBRARY is gpucoll or mpi, WHAT is startup
or memory, and each rank leaves a JSON file in FOLDER. It imports nothing that such a program would
not import, so that only the library's resources are measured.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # the one in typing would be an import that such a program does not have
if TYPE_CHECKING:
    from typing import Any

DUPLICATES = 4


def main(library: str, what: str, folder: str) -> None:
    """Meet the other ranks, make one all-reduce, and leave."""
    begun = time.perf_counter()
    comm = (Own if library == "gpucoll" else Mpi)(is_memory=what == "memory")
    stages = [used()] if what == "memory" else []
    comm.join()
    found = comm.described()
    found["joined_s"] = time.perf_counter() - begun
    if what == "memory":
        stages.append(comm.used_by_all())
        comm.duplicate()
        stages.append(comm.used_by_all())
    comm.leave()
    found |= {"stages": stages, "cpu_s": time.process_time(), "peak_bytes": status("VmHWM")}
    write(found, f"{folder}/{found['rank']}")


class Own:
    """gpucoll."""

    def __init__(self, is_memory: bool) -> None:
        import gpucoll

        self.init = gpucoll.init
        self.duplicates: list[Any] = []

    def join(self) -> None:
        """Meet the other ranks."""
        self.comm = self.init()

    def described(self) -> dict[str, Any]:
        """Return this rank, the world size, and the sum over all ranks."""
        from gpucoll.version import __version__

        comm = self.comm
        return {
            "rank": comm.rank,
            "ranks": comm.world_size,
            "sum": int(comm.all_reduce(comm.rank)),
            "version": f"gpucoll {__version__}",
        }

    def duplicate(self) -> None:
        """Make duplicates of the communicator, and use each."""
        for _ in range(DUPLICATES):
            self.duplicates.append(self.comm.duplicate())
            self.duplicates[-1].all_reduce(1)

    def used_by_all(self) -> dict[str, int]:
        """Return the resources in use when every rank has arrived, before any rank continues."""
        self.comm.barrier()
        found = used()
        self.comm.barrier()
        return found

    def leave(self) -> None:
        """Close everything."""
        for comm in [*self.duplicates, self.comm]:
            comm.close()


class Mpi:
    """MPI through mpi4py."""

    def __init__(self, is_memory: bool) -> None:
        if is_memory:  # the resources of the import do not belong to the communicator
            import mpi4py

            mpi4py.rc.initialize = False
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.duplicates: list[Any] = []

    def join(self) -> None:
        """Meet the other ranks, unless the import has done so."""
        if not self.mpi.Is_initialized():
            self.mpi.Init_thread()
        self.comm = self.mpi.COMM_WORLD

    def described(self) -> dict[str, Any]:
        """Return this rank, the world size, and the sum over all ranks."""
        comm = self.comm
        return {
            "rank": comm.Get_rank(),
            "ranks": comm.Get_size(),
            "sum": comm.allreduce(comm.Get_rank()),
            "version": self.mpi.Get_library_version(),
        }

    def duplicate(self) -> None:
        """Make duplicates of the communicator, and use each."""
        for _ in range(DUPLICATES):
            self.duplicates.append(self.comm.Dup())
            self.duplicates[-1].allreduce(1)

    def used_by_all(self) -> dict[str, int]:
        """Return the resources in use when every rank has arrived, before any rank continues."""
        self.comm.Barrier()
        found = used()
        self.comm.Barrier()
        return found

    def leave(self) -> None:
        """Finalize."""
        self.mpi.Finalize()


def used() -> dict[str, int]:
    """Return the shared memory of the whole machine, and the resources of this process."""
    return {
        "shared_bytes": field("/proc/meminfo", "Shmem"),
        "private_bytes": status("RssAnon"),
        "address_space_bytes": status("VmSize"),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def status(name: str) -> int:
    """Return a memory figure of this process, in bytes."""
    return field("/proc/self/status", name)


def field(path: str, name: str) -> int:
    """Return a figure from a file of the kernel's, in bytes."""
    with open(path) as lines:
        for line in lines:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def write(found: dict[str, Any], path: str) -> None:
    """Write the results completely or not at all."""
    import json  # imported only after the measurement

    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path + ".json")


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files would shadow other modules
    main(*sys.argv[1:])
