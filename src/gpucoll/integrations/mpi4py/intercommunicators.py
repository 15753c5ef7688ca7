"""Intercommunicators: two groups, each of which sends to the ranks of the other.

One communicator of gpucoll's contains both groups. Ranks of the other group are translated on the
way in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucoll import GpucollError
from gpucoll.integrations.mpi4py import objects, operations
from gpucoll.integrations.mpi4py.communicator import Comm, kinds, refuses
from gpucoll.integrations.mpi4py.constants import ANY_SOURCE, PROC_NULL, ROOT
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.groups import Core as GroupCore
from gpucoll.integrations.mpi4py.groups import Group
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.intracommunicator import Intracomm, made_by_members
from gpucoll.integrations.mpi4py.job import job
from gpucoll.integrations.mpi4py.object_calls import private_of as private_of_any
from gpucoll.integrations.mpi4py.operations import SUM, ObjectOp, Op, python_function
from gpucoll.integrations.mpi4py.specifications import Simple
from gpucoll.integrations.mpi4py.state import AnyComm, State

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll import Communicator, Message
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import AnyObject, AnyResult, Unchecked
    from gpucoll.integrations.mpi4py.infos import Info
    from gpucoll.integrations.mpi4py.requests import AnyWork
    from gpucoll.integrations.mpi4py.typing import BufSpec


class _Message:
    """A message whose source is given as a rank of the other group."""

    def __init__(self, found: Message, remote: Sequence[int]) -> None:
        self._found = found
        self.source = remote.index(found.source)

    def __getattr__(self, name: str) -> Any:  # of the message
        return getattr(self._found, name)


class _Work:
    """A work whose message is given with a rank of the other group."""

    def __init__(self, work: AnyWork, remote: Sequence[int]) -> None:
        self._work, self._remote = work, remote

    def __getattr__(self, name: str) -> Any:  # of the work
        return getattr(self._work, name)

    @property
    def message(self) -> _Message | None:
        """The received message; None for a send, and before the receive has ended."""
        found = self._work.message
        return None if found is None else _Message(found, self._remote)


class OtherGroup:
    """gpucoll's communicator as messages see it, with ranks of the other group.

    Parameters
    ----------
    whole : Communicator
        The communicator of both groups.
    remote : sequence of int
        The other group's ranks in `whole`.
    """

    def __init__(self, whole: AnyComm, remote: Sequence[int]) -> None:
        self.whole, self._remote = whole, tuple(remote)
        self.world_size = len(self._remote)

    def __getattr__(self, name: str) -> Any:  # of the communicator
        return getattr(self.whole, name)

    def _rank(self, number: int) -> int:
        if number == ANY_SOURCE:
            return number
        if not 0 <= number < self.world_size:
            raise argument_error(
                f"rank must be 0 to {self.world_size - 1}; got {number}", "ERR_RANK"
            )
        return self._remote[number]

    def send(self, x: AnyArray, dest: int, *given: object, **named: object) -> AnyResult:
        """Send to a rank of the other group."""
        return self.whole.send(x, self._rank(dest), *given, **named)

    def recv(
        self, out: AnyArray = None, source: int = ANY_SOURCE, tag: int = -1, **named: object
    ) -> AnyResult:
        """Receive from a rank of the other group."""
        got = self.whole.recv(out, self._rank(source), tag, **named)
        if named.get("async_op"):
            return _Work(got, self._remote)
        return (got[0], _Message(got[1], self._remote)) if named.get("info") else got

    def probe(self, source: int, tag: int, *, wait: bool = True) -> _Message | None:
        """Look for a message from the other group."""
        found = self.whole.probe(self._rank(source), tag, wait=wait)
        return None if found is None else _Message(found, self._remote)

    def of_others(self, value: AnyObject) -> list[AnyObject]:
        """Send an object to all ranks of both groups; return those of the other group."""
        everyone = self.whole.all_gather_object(value)
        return [everyone[rank] for rank in self._remote]


class Intercomm(Comm):
    """A communicator between two groups of ranks, with messages and collectives of objects."""

    @property
    def _others(self) -> OtherGroup:
        found: OtherGroup = self._state.comm
        return found

    def Is_inter(self) -> bool:
        return self._state is not None

    def Is_intra(self) -> bool:
        return self._state is None

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_remote_size(self) -> int:
        return self._others.world_size

    def Get_remote_group(self) -> Group:
        return Group._of(GroupCore(self._state.remote, job.world.rank))

    remote_size = property(Get_remote_size)
    remote_group = property(Get_remote_group)

    def Dup(self, info: Info | None = None) -> Self:
        state, others = self._state, self._others
        try:
            whole = others.whole.duplicate()
        except GpucollError as error:
            raise self._failed(error) from None
        return type(self)._of(
            _between(whole, others._remote, state.ranks, state.remote, state.next_context("dup"))
        )

    def Merge(self, high: bool = False) -> Comm:
        """Merge both groups into one communicator; the group that passes `high` comes second."""
        state, others = self._state, self._others
        theirs = self._exchanged((bool(high), min(state.ranks)))[0]
        is_second = (bool(high), min(state.ranks)) > theirs
        try:
            comm = others.whole.split(0, state.rank + (others.world_size if is_second else 0))
            return self._of_state(self._made_of(comm, state.next_context("merge")))
        except GpucollError as error:
            raise self._failed(error) from None

    # --- objects ----------------------------------------------------------------------------------

    def _exchanged(self, value: AnyObject) -> list[AnyObject]:
        try:
            return self._others.of_others(value)
        except GpucollError as error:
            raise self._failed(error) from None

    def _root(self, root: Unchecked) -> int:
        number = integer(root)
        if number not in (ROOT, PROC_NULL) and not 0 <= number < self._others.world_size:
            raise argument_error(
                f"root must be MPI.ROOT, MPI.PROC_NULL or a rank of the other group, 0 to "
                f"{self._others.world_size - 1}; got {root!r}",
                "ERR_ROOT",
            )
        return number

    def bcast(self, obj: AnyObject, root: int = 0) -> AnyObject:
        """Send the root's object to the other group."""
        number = self._root(root)
        values = self._exchanged(obj if number == ROOT else None)
        return values[number] if number >= 0 else None

    def gather(self, sendobj: AnyObject, root: int = 0) -> list[AnyObject] | None:
        """Send the objects of one group to the root in the other."""
        number = self._root(root)
        values = self._exchanged(sendobj if number >= 0 else None)
        return values if number == ROOT else None

    def scatter(self, sendobj: AnyObject, root: int = 0) -> AnyObject:
        """Send each rank of one group one of the objects of the root in the other."""
        number = self._root(root)
        values = self._exchanged(self._for_each(sendobj) if number == ROOT else None)
        return values[number][self.rank] if number >= 0 else None

    def allgather(self, sendobj: AnyObject) -> list[AnyObject]:
        """Return the objects of the other group."""
        return self._exchanged(sendobj)

    def alltoall(self, sendobj: AnyObject) -> list[AnyObject]:
        """Send one object to each rank of the other group; return those that arrived."""
        return [items[self.rank] for items in self._exchanged(self._for_each(sendobj))]

    def _for_each(self, values: AnyObject) -> list[AnyObject]:
        given = [None] * self.remote_size if values is None else list(values)
        if len(given) != self.remote_size:
            raise ValueError(f"expecting {self.remote_size} items, got {len(given)}")
        return given

    def reduce(self, sendobj: AnyObject, op: ObjectOp = SUM, root: int = 0) -> AnyObject:
        """Reduce the objects of the other group; return the result on the root."""
        function, values = python_function(op), self.gather(sendobj, root)
        return None if values is None else objects.reduce_all(values, function)

    def allreduce(self, sendobj: AnyObject, op: ObjectOp = SUM) -> AnyObject:
        """Reduce the objects of the other group; return the result."""
        return objects.reduce_all(self.allgather(sendobj), python_function(op))

    def Allreduce(self, sendbuf: BufSpec, recvbuf: BufSpec, op: Op = SUM) -> None:
        """Reduce the arrays of the other group into `recvbuf`."""
        received = Simple(recvbuf, True)
        operations.check(op, received.datatype)
        rows = self._exchanged(Simple(sendbuf, False).row())
        out, finish = received.target()
        if any(row.nbytes != out.nbytes for row in rows):
            raise argument_error(
                "the counts of the other group's ranks differ from those here", "ERR_COUNT"
            )
        out[...] = operations.fold(op, [row.view(out.dtype) for row in rows], received.datatype)
        if finish is not None:
            finish()

    Create_group = Create_from_groups = refuses("Intercomm.Create_group", "Merge, then Create")


_ARRAYS = (
    *("Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall"),
    *("Alltoallv", "Alltoallw", "Reduce", "Reduce_scatter", "Reduce_scatter_block"),
)
for _name in (*_ARRAYS, "Split", "Create", "Split_type"):
    for _form in (_name, f"I{_name.lower()}", f"{_name}_init"):
        setattr(Intercomm, _form, refuses(f"Intercomm.{_form}", "Merge both groups first"))
for _form in ("Iallreduce", "Allreduce_init"):
    setattr(Intercomm, _form, refuses(f"Intercomm.{_form}", "Merge both groups first"))


def _between(
    whole: Communicator,
    places: Sequence[int],
    ranks: Sequence[int],
    remote: Sequence[int],
    context: str,
) -> State:
    """Return the state of an intercommunicator.

    Parameters
    ----------
    whole : Communicator
        The communicator of both groups.
    places : sequence of int
        The other group's ranks in `whole`.
    ranks, remote : sequence of int
        The members of this group and of the other one, by their ranks in COMM_WORLD.
    context : str
        Its identifier.
    """
    others = OtherGroup(whole, places)
    made = State(lambda: others, ranks, list(ranks).index(job.world.rank), context)
    made.remote = tuple(remote)
    _ = made.comm
    return made


def create(
    self: Intracomm, local_leader: int, peer_comm: Comm, remote_leader: int, tag: int = 0
) -> Intercomm:
    """Connect this group with another, whose leader this one's leader reaches by `peer_comm`."""
    ranks, theirs = list(self._state.ranks), None
    leader = integer(local_leader)
    if self.rank == leader:
        theirs = peer_comm.sendrecv(ranks, remote_leader, tag, None, remote_leader, tag)
    remote = Comm.bcast(self, theirs, leader)
    if set(ranks) & set(remote):
        raise argument_error(f"the groups {ranks} and {remote} overlap", "ERR_GROUP")
    members = ranks + remote if min(ranks) < min(remote) else remote + ranks
    context = f"inter{tag}"
    joined = made_by_members(context, members)
    assert joined is not None
    places = [members.index(rank) for rank in remote]
    made: Intercomm = Intercomm._of(_between(joined.comm, places, ranks, remote, context))
    return made


def private_of(comm: Intercomm) -> tuple[Intercomm, int, Intracomm, bool]:
    """Return a duplicate, a new tag, a communicator of this group, and whether it comes first.

    The first two are those of `object_calls.private_of`.
    """
    state = comm._state
    duplicate, tag = private_of_any(comm)
    if state.group is None:
        state.group = Intracomm._of(made_by_members(f"{state.context}/group", state.ranks))
    return duplicate, tag, state.group, min(state.ranks) < min(state.remote)


kinds["inter"] = Intercomm
Intracomm.Create_intercomm = create
