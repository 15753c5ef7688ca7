"""Windows: memory that the ranks of one host share (`Win.Allocate_shared`)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpucoll import DeadlineError, GpucollError
from gpucoll.integrations.mpi4py.attributes import HasAttributes
from gpucoll.integrations.mpi4py.communicator import refuses
from gpucoll.integrations.mpi4py.constants import (
    LOCK_EXCLUSIVE,
    PROC_NULL,
    WIN_BASE,
    WIN_CREATE_FLAVOR,
    WIN_DISP_UNIT,
    WIN_FLAVOR_SHARED,
    WIN_MODEL,
    WIN_SIZE,
    WIN_UNIFIED,
)
from gpucoll.integrations.mpi4py.errors import argument_error, as_mpis
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.hosts import colour_of_host
from gpucoll.integrations.mpi4py.infos import INFO_NULL, Errhandler, Info
from gpucoll.integrations.mpi4py.job import waiting_s
from gpucoll.integrations.mpi4py.memory import buffer

_ALIGNED = 4096
_SLICE_S = 1e-4


class Core:
    """A window: one piece of memory without a name, of which each rank has a part."""

    def __init__(self, comm: Any, sizes: list[int], units: list[int], memory: mmap.mmap,
                 file: int) -> None:  # fmt: skip
        self.comm, self.sizes, self.units = comm, sizes, units
        self.memory, self.file = memory, file
        self.begins = [0]
        for size in sizes:
            self.begins.append(self.begins[-1] + -(-size // _ALIGNED) * _ALIGNED)
        self.attributes: dict[int, Any] = {}
        self.name = ""
        self.info: dict[str, str] = {}
        self.errhandler: Any = comm._core.errhandler

    def part(self, rank: int) -> buffer:
        """Return a rank's bytes."""
        if not self.sizes[rank]:
            return buffer()
        whole = np.frombuffer(self.memory, np.uint8)
        begin = self.begins[rank]
        return whole[begin : begin + self.sizes[rank]].view(buffer)


class Win(Handle, HasAttributes):
    """A window of shared memory."""

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Any = INFO_NULL, comm: Any = None
    ) -> Any:
        """Make memory that all ranks of a communicator read and write; all are on one host."""
        if comm is None or not comm:
            raise argument_error("Allocate_shared needs a communicator", "ERR_COMM")
        if size < 0:
            raise argument_error(f"size must be 0 or more; got {size}", "ERR_SIZE")
        own = comm.Dup()
        ours = own._state.comm
        try:
            host = colour_of_host(ours)
            hosts, sizes, units = zip(*ours.all_gather_object((host, size, disp_unit)), strict=True)
            if len(set(hosts)) > 1:
                raise argument_error(
                    "Allocate_shared needs ranks of one host; Split_type(COMM_TYPE_SHARED) first",
                    "ERR_RMA_SHARED",
                )
            total = sum(-(-n // _ALIGNED) * _ALIGNED for n in sizes) or _ALIGNED
            with _shared_file(ours, total) as file:
                memory = mmap.mmap(file, total)
                kept = os.dup(file)
        except GpucollError as error:
            raise as_mpis(error) from None
        made = cls._of(Core(own, list(sizes), list(units), memory, kept))
        made._core.info = dict(info.items()) if info else {}
        return made

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return a rank's memory, and its unit of displacements."""
        core = self._live("ERR_WIN")
        if rank == PROC_NULL:
            rank = next((n for n, size in enumerate(core.sizes) if size), 0)
        if not 0 <= rank < len(core.sizes):
            raise argument_error(f"rank must be 0 to {len(core.sizes) - 1}; got {rank}", "ERR_RANK")
        return core.part(rank), core.units[rank]

    def tomemory(self) -> buffer:
        """Return this rank's memory."""
        core = self._live("ERR_WIN")
        part: buffer = core.part(core.comm.rank)
        return part

    def Free(self) -> None:
        """Let go of it, when all ranks have."""
        core = self._live("ERR_WIN")
        self._delete_attributes()
        core.comm.Free()
        os.close(core.file)
        with contextlib.suppress(BufferError):  # views are left: the last one lets go
            core.memory.close()
        self._core = None

    def free(self) -> None:
        """Free it, if there is something."""
        if self._core is not None:
            self.Free()

    # --- order ------------------------------------------------------------------------------------

    def Fence(self, assertion: int = 0) -> None:
        """Return when all ranks have called it: what they have written before is seen."""
        self._live("ERR_WIN").comm.Barrier()

    def Sync(self) -> None:
        """See what others have written: on one host it is seen anyhow."""
        self._live("ERR_WIN")

    Lock_all = Sync

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Keep other ranks from locking a rank's memory, until `Unlock`."""
        core = self._live("ERR_WIN")
        kind = fcntl.LOCK_EX if lock_type == LOCK_EXCLUSIVE else fcntl.LOCK_SH
        _locked(core.file, kind, rank)

    def Unlock(self, rank: int) -> None:
        """End what `Lock` began."""
        fcntl.lockf(self._live("ERR_WIN").file, fcntl.LOCK_UN, 1, rank)

    def Unlock_all(self) -> None:
        """Be done: nothing is pending."""
        self._live("ERR_WIN")

    Flush_all = Flush_local_all = Unlock_all

    def Flush(self, rank: int) -> None:
        """Be done: nothing is pending."""
        self._live("ERR_WIN")

    Flush_local = Flush

    # --- what it is -------------------------------------------------------------------------------

    def Get_attr(self, keyval: int) -> Any:
        core = self._live("ERR_WIN")
        rank = core.comm.rank
        known = {
            WIN_BASE: core.part(rank).address,
            WIN_SIZE: core.sizes[rank],
            WIN_DISP_UNIT: core.units[rank],
            WIN_CREATE_FLAVOR: WIN_FLAVOR_SHARED,
            WIN_MODEL: WIN_UNIFIED,
        }
        return known[keyval] if keyval in known else super().Get_attr(keyval)

    attrs = property(lambda self: tuple(self.Get_attr(key) for key in
                                        (WIN_BASE, WIN_SIZE, WIN_DISP_UNIT)))  # fmt: skip
    flavor = property(lambda self: self.Get_attr(WIN_CREATE_FLAVOR))
    model = property(lambda self: self.Get_attr(WIN_MODEL))

    def Get_group(self) -> Any:
        return self._live("ERR_WIN").comm.Get_group()

    group = property(Get_group)
    group_size = property(lambda self: self._live("ERR_WIN").comm.size)
    group_rank = property(lambda self: self._live("ERR_WIN").comm.rank)

    def Get_name(self) -> str:
        return self._live("ERR_WIN").name if self._core else "MPI_WIN_NULL"

    def Set_name(self, name: str) -> None:
        self._live("ERR_WIN").name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        return Info.Create(self._live("ERR_WIN").info)  # type: ignore[no-any-return]

    def Set_info(self, info: Any) -> None:
        self._live("ERR_WIN").info = dict(info.items())

    info = property(Get_info, Set_info)

    def Get_errhandler(self) -> Errhandler:
        return Errhandler._of(self._live("ERR_WIN").errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        self._live("ERR_WIN").errhandler = errhandler._core

    def __reduce__(self) -> Any:
        if self._core is None:
            return self._reduced("WIN_NULL")
        raise ValueError("a window cannot be pickled")


_INSTEAD = "send messages, or use Allocate_shared among the ranks of a host"
for _name in (
    *("Create", "Allocate", "Create_dynamic", "Attach", "Detach", "Put", "Get", "Accumulate"),
    *("Get_accumulate", "Fetch_and_op", "Compare_and_swap", "Rput", "Rget", "Raccumulate"),
    *("Rget_accumulate", "Start", "Complete", "Post", "Wait", "Test"),
):
    setattr(Win, _name, refuses(f"Win.{_name}", _INSTEAD))
WIN_NULL = Win()


@contextlib.contextmanager
def _shared_file(comm: Any, size: int) -> Iterator[int]:
    """Give memory without a name that all ranks have opened: rank 0 makes it."""
    file = -1
    if comm.rank == 0:
        file = os.memfd_create("gpucoll-window", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
    try:
        path = comm.broadcast_object(f"/proc/{os.getpid()}/fd/{file}")
        trouble = ""
        try:
            if file < 0:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            trouble = f"rank {comm.rank}: {error}"
        troubles = [text for text in comm.all_gather_object(trouble) if text]
        if troubles:
            raise argument_error(
                f"the memory of rank 0 cannot be opened: {'; '.join(troubles)}", "ERR_RMA_SHARED"
            )
        yield file
    finally:
        if file >= 0:
            os.close(file)


def _locked(file: int, kind: int, rank: int) -> None:
    """Take a lock that other processes see, within the deadline."""
    import time

    until_s = time.monotonic() + waiting_s()
    while True:
        try:
            fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, rank)
        except OSError:
            if time.monotonic() > until_s:
                raise as_mpis(
                    DeadlineError(f"Win.Lock: rank {rank}'s memory stayed locked")
                ) from None
            time.sleep(_SLICE_S)
        else:
            return
