"""Windows: memory of the ranks of one host, which all of them can access."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpucoll import DeadlineError, GpucollError
from gpucoll.api.host_memory import HostMemory
from gpucoll.integrations.hosts import colour_of_host
from gpucoll.integrations.mpi4py.attributes import Attribute, HasAttributes
from gpucoll.integrations.mpi4py.communicator import refuses
from gpucoll.integrations.mpi4py.constants import (
    BOTTOM,
    LOCK_EXCLUSIVE,
    PROC_NULL,
    WIN_BASE,
    WIN_CREATE_FLAVOR,
    WIN_DISP_UNIT,
    WIN_FLAVOR_ALLOCATE,
    WIN_FLAVOR_CREATE,
    WIN_FLAVOR_SHARED,
    WIN_MODEL,
    WIN_SIZE,
    WIN_UNIFIED,
)
from gpucoll.integrations.mpi4py.errors import argument_error, as_mpis, refused
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.infos import INFO_NULL, Errhandler, Info
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.job import job, waiting_s
from gpucoll.integrations.mpi4py.memory import buffer, memory_of
from gpucoll.integrations.mpi4py.one_sided import OneSided
from gpucoll.integrations.mpi4py.window_memory import MappedPart, Part, PeerPart, shows

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll import Communicator
    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.mpi4py.groups import Group
    from gpucoll.integrations.mpi4py.intracommunicator import Intracomm
    from gpucoll.integrations.mpi4py.typing import Bottom, Buffer

_ALIGNED = 4096
_SLICE_S = 1e-4
_TOKEN_BYTES = 16


class Core:
    """The state of a window: the memory of all ranks, in one shared block or in separate places."""

    def __init__(
        self,
        comm: Intracomm,
        flavor: int,
        units: list[int],
        parts: list[Part],
        file: int,
        memory: Buffer | Bottom,
    ) -> None:
        self.comm, self.flavor, self.units, self.parts = comm, flavor, units, parts
        self.file, self.memory = file, memory
        self.own = cast(MappedPart, parts[comm.rank])
        self.posted_to: list[int] = []
        self.started_on: list[int] = []
        self.tokens: list[Any] = []
        self.attributes: dict[int, Any] = {}
        self.name = ""
        self.info: dict[str, str] = {}
        self.errhandler: Any = comm._core.errhandler
        self._accumulating = threading.Lock()

    def ranks_of(self, group: Group) -> list[int]:
        """Return the ranks in this window of a group's members."""
        members = self.comm._state.ranks
        return [members.index(rank) for rank in group._ranks]

    @contextlib.contextmanager
    def accumulating(self, rank: int) -> Iterator[None]:
        """Exclude accumulations of other ranks and threads from a rank's memory."""
        place = len(self.parts) + rank  # after the places that `Lock` uses
        with self._accumulating:
            _locked(self.file, fcntl.LOCK_EX, place)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place)


class Win(Handle, HasAttributes, OneSided):
    """A window: memory of the ranks of one host, which all of them can access."""

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm | None = None
    ) -> Self:
        """Make memory that all ranks of a communicator share; all must be on one host."""
        return cls._allocated(WIN_FLAVOR_SHARED, size, disp_unit, info, comm)

    @classmethod
    def Allocate(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm | None = None
    ) -> Self:
        """Make memory for one-sided calls; all ranks must be on one host."""
        return cls._allocated(WIN_FLAVOR_ALLOCATE, size, disp_unit, info, comm)

    @classmethod
    def Create(
        cls,
        memory: Buffer | Bottom,
        disp_unit: int = 1,
        info: Info = INFO_NULL,
        comm: Intracomm | None = None,
    ) -> Self:
        """Expose this rank's memory to the other ranks; all must be on one host."""
        memory = None if memory is BOTTOM else memory  # BOTTOM has no memory either
        own, data = _duplicate(comm), memory_of(memory, memory is not None).data
        if data is None:
            refused("Win.Create of an array on a GPU", "copy it to the host")
        token = np.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), np.uint8)
        mine = (os.getpid(), data.ctypes.data, len(data), token.ctypes.data, token.tobytes())
        try:
            units, all_of = _gathered(own, disp_unit, mine)
            trouble = [rank for rank, (pid, _, _, *token_of) in enumerate(all_of)
                       if rank != own.rank and not shows(pid, *token_of)]  # fmt: skip
            if any(own._state.comm.all_gather_object(trouble)):
                raise argument_error(
                    f"rank {own.rank} of {own.size}: some ranks cannot access each other's "
                    f"memory{f', this one not that of ranks {trouble}' if trouble else ''}; make "
                    "the window with Win.Allocate",
                    "ERR_RMA_SHARED",
                )
            kept = _shared_file(own._state.comm, _ALIGNED)
        except GpucollError as error:
            raise as_mpis(error) from None
        parts: list[Part] = [PeerPart(pid, place, size) for pid, place, size, *_ in all_of]
        parts[own.rank] = MappedPart(data)
        return cls._made(Core(own, WIN_FLAVOR_CREATE, units, parts, kept, memory), info)

    @classmethod
    def _allocated(
        cls, flavor: int, size: int, disp_unit: int, info: Info, comm: Intracomm | None
    ) -> Self:
        size = integer(size)
        if size < 0:
            raise argument_error(f"size must be 0 or more; got {size}", "ERR_SIZE")
        own = _duplicate(comm)
        try:
            units, sizes = _gathered(own, disp_unit, size)
            begins = [0]
            for one in sizes:
                begins.append(begins[-1] + -(-one // _ALIGNED) * _ALIGNED)
            kept = _shared_file(own._state.comm, begins[-1] or _ALIGNED)
            memory = mmap.mmap(kept, begins[-1] or _ALIGNED)
        except GpucollError as error:
            raise as_mpis(error) from None
        whole = np.frombuffer(memory, np.uint8)
        parts: list[Part] = [
            MappedPart(whole[begin : begin + one])
            for begin, one in zip(begins, sizes, strict=False)
        ]
        return cls._made(Core(own, flavor, units, parts, kept, memory), info)

    @classmethod
    def _made(cls, core: Core, info: Info) -> Self:
        core.info = dict(info.items()) if info else {}
        return cls._of(core)

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return a rank's memory and its displacement unit; empty memory if it is not shared."""
        core, rank = self._live("ERR_WIN"), integer(rank)
        if rank == PROC_NULL:
            rank = next((n for n, part in enumerate(core.parts) if part.size), 0)
        if not 0 <= rank < len(core.parts):
            raise argument_error(f"rank must be 0 to {len(core.parts) - 1}; got {rank}", "ERR_RANK")
        part = core.parts[rank]
        if not isinstance(part, MappedPart):
            return buffer(), 0
        data: Any = part.data
        return data.view(buffer), core.units[rank]

    def tomemory(self) -> buffer:
        """Return this rank's memory."""
        data: Any = self._live("ERR_WIN").own.data
        return data.view(buffer)  # type: ignore[no-any-return]

    def __buffer__(self, flags: int) -> memoryview:
        return self.tomemory().cast("B")  # Python 3.12 and later call this

    def Free(self) -> None:
        """Free the window when all ranks have called this."""
        core = self._live("ERR_WIN")
        self._delete_attributes()
        core.comm.Free()
        os.close(core.file)
        own_memory = core.flavor != WIN_FLAVOR_CREATE
        core.parts = core.own = None
        if own_memory:
            # a view is left, and the last one releases the memory
            with contextlib.suppress(BufferError):
                core.memory.close()
        self._core = None

    def free(self) -> None:
        """Free it unless it is null."""
        if self._core is not None:
            self.Free()

    # --- synchronisation --------------------------------------------------------------------------

    def Fence(self, assertion: int = 0) -> None:
        """Wait until all ranks have called it; their earlier writes are then visible."""
        self._live("ERR_WIN").comm.Barrier()

    def Sync(self) -> None:
        """Do nothing: on one host, writes are visible anyway."""
        self._live("ERR_WIN")

    Lock_all = Sync

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Lock a rank's memory against other ranks until `Unlock`."""
        core = self._live("ERR_WIN")
        if rank == PROC_NULL:
            return
        kind = fcntl.LOCK_EX if lock_type == LOCK_EXCLUSIVE else fcntl.LOCK_SH
        _locked(core.file, kind, rank)

    def Unlock(self, rank: int) -> None:
        """Release what `Lock` has locked."""
        core = self._live("ERR_WIN")
        if rank != PROC_NULL:
            fcntl.lockf(core.file, fcntl.LOCK_UN, 1, rank)

    def Unlock_all(self) -> None:
        """Do nothing: no operation is pending."""
        self._live("ERR_WIN")

    Flush_all = Flush_local_all = Unlock_all

    def Flush(self, rank: int) -> None:
        """Do nothing: no operation is pending."""
        self._live("ERR_WIN")

    Flush_local = Flush

    # --- what it is -------------------------------------------------------------------------------

    def Get_attr(self, keyval: int) -> Attribute:
        core = self._live("ERR_WIN")
        known = {
            WIN_BASE: core.own.data.ctypes.data if core.own.size else 0,
            WIN_SIZE: core.own.size,
            WIN_DISP_UNIT: core.units[core.comm.rank],
            WIN_CREATE_FLAVOR: core.flavor,
            WIN_MODEL: WIN_UNIFIED,
        }
        return known[keyval] if keyval in known else super().Get_attr(keyval)

    attrs = property(lambda self: tuple(self.Get_attr(key) for key in
                                        (WIN_BASE, WIN_SIZE, WIN_DISP_UNIT)))  # fmt: skip
    flavor = property(lambda self: self.Get_attr(WIN_CREATE_FLAVOR))
    model = property(lambda self: self.Get_attr(WIN_MODEL))

    def Get_group(self) -> Group:
        group: Group = self._live("ERR_WIN").comm.Get_group()
        return group

    group = property(Get_group)
    group_size = property(lambda self: self._live("ERR_WIN").comm.size)
    group_rank = property(lambda self: self._live("ERR_WIN").comm.rank)

    def Get_name(self) -> str:
        return self._live("ERR_WIN").name if self._core else "MPI_WIN_NULL"

    def Set_name(self, name: str) -> None:
        self._live("ERR_WIN").name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        return Info.Create(self._live("ERR_WIN").info)

    def Set_info(self, info: Info) -> None:
        self._live("ERR_WIN").info = dict(info.items())

    info = property(Get_info, Set_info)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Win, int], object]) -> Errhandler:
        return Errhandler._of(errhandler_fn)

    def Call_errhandler(self, errorcode: int) -> None:
        core = self._live("ERR_WIN")
        if callable(core.errhandler):
            core.errhandler(self, errorcode)
        elif core.errhandler != "ERRORS_RETURN":
            job.abort(errorcode, core.comm._core)

    def Get_errhandler(self) -> Errhandler:
        return Errhandler._of(self._live("ERR_WIN").errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        self._live("ERR_WIN").errhandler = errhandler._core

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("WIN_NULL")
        raise ValueError("a window cannot be pickled")


for _name in ("Create_dynamic", "Attach", "Detach"):
    setattr(Win, _name, refuses(f"Win.{_name}", "make a window of each memory by Win.Create"))
WIN_NULL = Win()


def _duplicate(comm: Intracomm | None) -> Intracomm:
    """Return a duplicate for the window."""
    if comm is None or not comm:
        raise argument_error("a window needs a communicator", "ERR_COMM")
    return comm.Dup()


def _gathered(
    own: Intracomm, disp_unit: int, value: AnyObject
) -> tuple[list[int], list[AnyObject]]:
    """Return the units and values of all ranks; raise if they are on several hosts."""
    ours = own._state.comm
    host = colour_of_host(ours)
    hosts, units, values = zip(*ours.all_gather_object((host, disp_unit, value)), strict=True)
    if len(set(hosts)) > 1:
        raise argument_error(
            "a window needs ranks of one host: use Split_type(COMM_TYPE_SHARED) first",
            "ERR_RMA_SHARED",
        )
    return list(units), list(values)


def _shared_file(comm: Communicator, size: int) -> int:
    """Return a descriptor of memory that all ranks share."""
    memory = HostMemory(comm, size, "window")
    try:
        return os.dup(memory.fd)
    finally:
        memory.close()


def _locked(file: int, kind: int, rank: int) -> None:
    """Take a lock between processes, within the deadline."""
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
