"""`Comm`: its members, the communicators derived from it, and the data attached to it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from gpucoll import GpucollError
from gpucoll.integrations.hosts import colour_of_host
from gpucoll.integrations.mpi4py.attributes import Attribute, HasAttributes
from gpucoll.integrations.mpi4py.collectives import Collectives
from gpucoll.integrations.mpi4py.constants import (
    APPNUM,
    COMM_TYPE_HW_GUIDED,
    COMM_TYPE_HW_UNGUIDED,
    COMM_TYPE_RESOURCE_GUIDED,
    COMM_TYPE_SHARED,
    CONGRUENT,
    HOST,
    IDENT,
    IO,
    LASTUSEDCODE,
    PROC_NULL,
    SIMILAR,
    TAG_UB,
    TAG_UPPER_BOUND,
    UNDEFINED,
    UNEQUAL,
    UNIVERSE_SIZE,
    WTIME_IS_GLOBAL,
)
from gpucoll.integrations.mpi4py.errors import (
    Exception,
    argument_error,
    as_mpis,
    last_used_code,
    refused,
)
from gpucoll.integrations.mpi4py.groups import Core as GroupCore
from gpucoll.integrations.mpi4py.groups import Group
from gpucoll.integrations.mpi4py.handles import AnyHandle, Handle
from gpucoll.integrations.mpi4py.infos import INFO_NULL, Errhandler, Info
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.job import job
from gpucoll.integrations.mpi4py.messages import Messages
from gpucoll.integrations.mpi4py.object_calls import ObjectCalls
from gpucoll.integrations.mpi4py.requests import Finished, Request
from gpucoll.integrations.mpi4py.state import State

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll import Communicator

kinds: dict[str, type[Comm]] = {}
"""The class of the communicators of each topology ("" for none)."""
_BOUND = {
    "_all_reduce": "all_reduce",
    "_reduce": "reduce",
    "_broadcast": "broadcast",
    "_all_gather": "all_gather",
    "_gather": "gather",
    "_scatter": "scatter",
    "_all_to_all": "all_to_all",
    "_barrier": "barrier",
    "_send": "send",
    "_recv": "recv",
    "_send_recv": "send_recv",
}
"""Methods of gpucoll's communicator that a handle caches at their first call."""


class Comm(Handle, HasAttributes, Collectives, Messages, ObjectCalls):
    """A communicator. All handles of it share its `_core`, a `State`."""

    def __getattr__(self, name: str) -> Any:  # for a type checker also what `add_forms` adds
        if name in _BOUND:
            try:
                bound = getattr(self._state.comm, _BOUND[name])
            except GpucollError as error:
                raise as_mpis(error) from None
            self.__dict__[name] = bound
            return bound
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _state(self) -> State:
        state: State = self._live("ERR_COMM")
        return state

    @classmethod
    def fromhandle(cls, handle: int) -> AnyHandle:
        """Return the communicator of a handle of this process, as an object of its own class."""
        found = super().fromhandle(handle)._core
        if found is None:
            return cls()
        if found.remote:
            return cls._of_state(found, "inter")
        return cls._of_state(found, "" if found.topology is None else found.topology.kind)

    fromint = f2py = fromhandle

    @classmethod
    def _of_state(cls, state: State | None, kind: str = "") -> Comm:
        return kinds[kind]._of(state) if state is not None else kinds[kind]()

    def _failed(self, error: GpucollError) -> Exception:
        """Call the communicator's error handler; return the error to raise afterwards."""
        made = as_mpis(error)
        handler = self._core.errhandler if self._core is not None else None
        if handler in ("ERRORS_ARE_FATAL", "ERRORS_ABORT"):
            traceback.print_exception(made)
            self.Abort(int(made))
        elif callable(handler):
            handler(self, int(made))
        return made

    # --- its members ------------------------------------------------------------------------------

    def Get_size(self) -> int:
        state = self._core
        if state is None or not state.size:
            return self._opened().size
        return state.size  # type: ignore[no-any-return]

    def Get_rank(self) -> int:
        state = self._core
        if state is None or not state.size:
            return self._opened().rank
        return state.rank  # type: ignore[no-any-return]

    size = property(Get_size)
    rank = property(Get_rank)

    def _opened(self) -> State:
        state = self._state
        try:
            _ = state.comm
        except GpucollError as error:
            raise as_mpis(error) from None
        return state

    def Get_group(self) -> Group:
        return Group._of(GroupCore(self._opened().ranks, job.world.rank))

    group = property(Get_group)

    def Compare(self, comm: Comm) -> int:
        one, other = self._state, comm._state
        if one is other:
            return IDENT
        if one.ranks == other.ranks:
            return CONGRUENT
        return SIMILAR if sorted(one.ranks) == sorted(other.ranks) else UNEQUAL

    def Is_inter(self) -> bool:
        return self._state is None

    def Is_intra(self) -> bool:
        return self._state is not None

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        topology = self._state.topology
        return UNDEFINED if topology is None else int(topology.number)

    topology = property(Get_topology)
    is_topo = property(lambda self: self._state.topology is not None)

    # --- more communicators -----------------------------------------------------------------------

    def _made_of(self, comm: Communicator | None, context: str) -> State | None:
        """Return the state of a communicator of gpucoll's whose members are some of this one's."""
        if comm is None:
            return None
        mine = self._state.ranks[self._state.rank]
        ranks = [int(rank) for rank in comm.all_gather(mine)] if comm.world_size > 1 else [mine]
        made = State(lambda: comm, ranks, comm.rank, context)
        _ = made.comm
        made.errhandler = self._state.errhandler
        return made

    def Dup(self, info: Info | None = None) -> Self:
        state = self._state
        try:
            made = self._made_of(state.comm.duplicate(), state.next_context("dup"))
        except GpucollError as error:
            raise self._failed(error) from None
        assert made is not None
        made.topology = state.topology
        made.info = dict(info.items()) if info else dict(state.info)
        new = type(self)._of(made)
        made.attributes = self._copied_attributes()
        return new

    def Clone(self) -> Self:
        return self.Dup()

    def Dup_with_info(self, info: Info | None) -> Self:
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """Duplicate the communicator; the request is complete when this returns."""
        return self.Dup(info), Request._started(Finished())

    def Idup_with_info(self, info: Info | None) -> tuple[Self, Request]:
        return self.Idup(info)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        state = self._state
        color, key = integer(color), integer(key)
        if color < 0 and color != UNDEFINED:
            raise argument_error(f"color must be 0 or more, or UNDEFINED; got {color}")
        try:
            comm = state.comm.split(None if color == UNDEFINED else color, key)
            return self._of_state(self._made_of(comm, state.next_context(f"split{color}-")))
        except GpucollError as error:
            raise self._failed(error) from None

    def Split_type(self, split_type: int, key: int = 0, info: Info | None = INFO_NULL) -> Comm:
        """Split by host (COMM_TYPE_SHARED), or leave this rank out (UNDEFINED)."""
        if split_type in (COMM_TYPE_HW_GUIDED, COMM_TYPE_HW_UNGUIDED, COMM_TYPE_RESOURCE_GUIDED):
            if not info or info.get("mpi_hw_resource_type") != "mpi_shared_memory":
                return self.Split(UNDEFINED)  # shared memory is the only known resource
        elif split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise argument_error(f"Split_type: {split_type} is not a split type")
        colour = colour_of_host(self._state.comm)
        return self.Split(UNDEFINED if split_type == UNDEFINED else colour, key)

    def Create(self, group: Group) -> Comm:
        """Make a communicator of a group. All members of this communicator call it."""
        members = group._ranks
        state = self._state
        if not set(members) <= set(state.ranks):
            raise argument_error("the group has members that this communicator lacks", "ERR_GROUP")
        mine = state.ranks[state.rank]
        if mine not in members:
            return self.Split(UNDEFINED)
        return self.Split(state.ranks.index(members[0]), members.index(mine))

    def Free(self) -> None:
        state = self._state
        if state.is_predefined:
            raise argument_error(f"{state.name} cannot be freed before Finalize", "ERR_COMM")
        self._delete_attributes()
        try:
            state.comm.barrier()
        except GpucollError:
            pass  # the communicator is broken, so there is nothing to wait for
        state.close()
        self._core = None
        for name in _BOUND:
            self.__dict__.pop(name, None)

    def free(self) -> None:
        """Free it unless it is predefined; may be called repeatedly."""
        if self._core is not None and not self._core.is_predefined:
            self.Free()

    Disconnect = Free

    @classmethod
    def Get_parent(cls) -> Comm:
        """Return the null communicator: no process spawns this one."""
        return intercomm_null()

    # --- data attached to it ----------------------------------------------------------------------

    def Get_attr(self, keyval: int) -> Attribute:
        if self._state is job.world or self._state.is_predefined:
            known = {
                TAG_UB: TAG_UPPER_BOUND,
                HOST: PROC_NULL,
                IO: job.world.rank,
                WTIME_IS_GLOBAL: 0,
                UNIVERSE_SIZE: job.world.size,
                APPNUM: 0,
                LASTUSEDCODE: last_used_code(),
            }
            if keyval in known:
                return known[keyval]
        elif keyval == TAG_UB:
            return TAG_UPPER_BOUND
        return super().Get_attr(keyval)

    def Get_name(self) -> str:
        if self._core is None:
            return "MPI_COMM_NULL"
        return str(self._core.name)

    def Set_name(self, name: str) -> None:
        self._state.name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        return Info.Create(self._state.info)

    def Set_info(self, info: Info) -> None:
        self._state.info = dict(info.items())

    info = property(Get_info, Set_info)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Comm, int], object]) -> Errhandler:
        return Errhandler._of(errhandler_fn)

    def Get_errhandler(self) -> Errhandler:
        return Errhandler._of(self._state.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        self._state.errhandler = errhandler._live("ERR_ERRHANDLER")

    def Call_errhandler(self, errorcode: int) -> None:
        handler = self._state.errhandler
        if callable(handler):
            handler(self, errorcode)
        elif handler != "ERRORS_RETURN":
            self.Abort(errorcode)

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this process and the job: other ranks' calls raise, and a launcher ends them."""
        job.abort(integer(errorcode), self._core)

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("COMM_NULL")
        if self._core.is_predefined:
            return self._reduced("COMM_WORLD" if self._core is job.world else "COMM_SELF")
        raise ValueError("a communicator cannot be pickled")


def intercomm_null() -> Comm:
    """Return the null communicator."""
    return kinds["inter"]()


def refuses(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a feature of MPI that this package lacks."""

    def method(*_: object, **__: object) -> NoReturn:
        refused(name, instead)

    method.__name__ = name.rpartition(".")[2]
    method.__doc__ = f"Refuse: {instead}."
    return method


__all__ = ["Comm", "kinds", "refuses"]
