"""`Intracomm`: scans, communicators that only their members create, and topologies."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from gpucoll import GpucollError
from gpucoll.integrations.mpi4py import reductions
from gpucoll.integrations.mpi4py.collectives import add_forms
from gpucoll.integrations.mpi4py.communicator import Comm, kinds, refuses
from gpucoll.integrations.mpi4py.constants import UNDEFINED
from gpucoll.integrations.mpi4py.errors import argument_error, as_mpis, refused
from gpucoll.integrations.mpi4py.groups import Group
from gpucoll.integrations.mpi4py.infos import INFO_NULL, Errhandler, Info
from gpucoll.integrations.mpi4py.job import job, waiting_s
from gpucoll.integrations.mpi4py.meetings import meet
from gpucoll.integrations.mpi4py.shapes import (
    Cart,
    DistGraph,
    Graph,
    Topology,
    Weights,
    compute_dims,
)
from gpucoll.integrations.mpi4py.state import State

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject


def made_by_members(context: str, members: Sequence[int]) -> State | None:
    """Return the state of a communicator that only its members create; None on other ranks."""
    if job.world.rank not in members:
        return None
    try:
        comm = meet(context, members, waiting_s())
    except GpucollError as error:
        raise as_mpis(error) from None
    made = State(lambda: comm, members, comm.rank, context)
    _ = made.comm
    return made


_SPAWN = (
    "start all processes together, by gpucoll-run or another launcher; a pool of mpi4py.futures "
    "then takes the other ranks: gpucoll-run -n 4 -m gpucoll.integrations.mpi4py -m mpi4py.futures "
    "script.py"
)


class Intracomm(Comm):
    """A communicator of one group of ranks."""

    def Create_group(self, group: Group, tag: int = 0) -> Comm:
        """Make a communicator of a group. Only the group's members call it."""
        members = group._ranks
        if not set(members) <= set(self._state.ranks):
            raise argument_error("the group has members that this communicator lacks", "ERR_GROUP")
        return self._of_state(made_by_members(f"{self._state.context}|{tag}", members))

    @classmethod
    def Create_from_group(
        cls,
        group: Group,
        stringtag: str = "org.mpi4py",
        info: Info = INFO_NULL,
        errhandler: Errhandler | None = None,
    ) -> Comm:
        """Make a communicator of a group. Only the group's members call it."""
        return kinds[""]._of_state(made_by_members(stringtag, group._ranks))

    # --- topologies -------------------------------------------------------------------------------

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Comm:
        """Make a communicator of ranks in a grid; ranks beyond the grid get COMM_NULL."""
        topology = Cart(dims, periods)
        if topology.size > self.size:
            raise argument_error(
                f"a grid of {list(topology.dims)} has more places than {self.size} ranks",
                "ERR_DIMS",
            )
        return self._with_topology(topology, topology.size, "cart")

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> Comm:
        """Make a communicator with a graph that every rank passes in full."""
        topology = Graph(index, edges)
        if topology.size > self.size:
            raise argument_error(f"{topology.size} nodes are more than {self.size} ranks")
        return self._with_topology(topology, topology.size, "graph")

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        sourceweights: Weights = None,
        destweights: Weights = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Comm:
        """Make a communicator with a graph of which each rank passes its own neighbours."""
        topology = DistGraph(sources, destinations, sourceweights, destweights)
        return self._with_topology(topology, self.size, "dist_graph")

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Weights = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Comm:
        """Make a communicator with a graph of which any rank may pass any edges."""
        ends = [source for source, n in zip(sources, degrees, strict=True) for _ in range(n)]
        is_weighted = isinstance(weights, list | tuple)
        values = list(weights) if isinstance(weights, list | tuple) else [1] * len(ends)
        edges = [edge for part in self._all(list(zip(ends, destinations, values, strict=True)))
                 for edge in part]  # fmt: skip
        me = self.rank
        incoming = [(a, w) for a, b, w in edges if b == me]
        outgoing = [(b, w) for a, b, w in edges if a == me]
        topology = DistGraph(
            [a for a, _ in incoming],
            [b for b, _ in outgoing],
            [w for _, w in incoming] if is_weighted else weights,
            [w for _, w in outgoing] if is_weighted else weights,
        )
        return self._with_topology(topology, self.size, "dist_graph")

    def _all(self, value: AnyObject) -> list[AnyObject]:
        return self.allgather(value)

    def _with_topology(self, topology: Topology, size: int, kind: str) -> Comm:
        made = Comm.Split(self, 0 if self.rank < size else UNDEFINED, self.rank)
        if made:
            made._core.topology = topology
        return self._of_state(made._core, kind)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """Return the rank that this one would have in a grid."""
        return self.rank if self.rank < Cart(dims, periods).size else UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Return the rank that this one would have in a graph."""
        return self.rank if self.rank < Graph(index, edges).size else UNDEFINED

    Create_intercomm: Any
    """Defined in `intercommunicators`."""

    def Spawn(self, *_: object, **__: object) -> NoReturn:
        """Refuse. In a thread whose error might go unnoticed, end the job instead."""
        try:
            refused("Spawn", _SPAWN)
        except NotImplementedError:
            if threading.current_thread() is threading.main_thread():
                raise
            traceback.print_exc()
            job.abort(1, self._core)

    Spawn_multiple = Accept = Connect = Spawn


Comm.Join = refuses("Comm.Join", "start all processes together")  # type: ignore[attr-defined]
_ULFM = "catch PeerLostError, and make a new COMM_WORLD by gpucoll's own `shrink`"
for _name in ("Revoke", "Is_revoked", "Get_failed", "Ack_failed", "Agree", "Iagree", "Shrink",
              "Ishrink"):  # fmt: skip
    setattr(Comm, _name, refuses(f"Comm.{_name}", _ULFM))
kinds[""] = Intracomm
add_forms(Intracomm, {"Scan": reductions.scan, "Exscan": reductions.exscan})

COMM_NULL = Comm()
COMM_WORLD = Intracomm._of(job.world)
COMM_SELF = Intracomm._of(job.self)
Compute_dims = compute_dims

__all__ = [*("COMM_NULL", "COMM_SELF", "COMM_WORLD", "Compute_dims", "Intracomm")]
