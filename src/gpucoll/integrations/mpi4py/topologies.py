"""Communicators with a grid or graph of ranks, and exchanges between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from gpucoll import GpucollError
from gpucoll.integrations.mpi4py import objects
from gpucoll.integrations.mpi4py.calls import Call
from gpucoll.integrations.mpi4py.collectives import add_forms
from gpucoll.integrations.mpi4py.communicator import Comm, kinds
from gpucoll.integrations.mpi4py.constants import CART, DIST_GRAPH, GRAPH
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.intracommunicator import Intracomm
from gpucoll.integrations.mpi4py.shapes import Cart
from gpucoll.integrations.mpi4py.specifications import AnySpec, Row, Simple, Typed, Vector

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.mpi4py.typing import BufSpecB


_T = TypeVar("_T")


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours."""

    _topology_number = 0

    def __new__(cls, comm: Comm | None = None) -> Self:
        self = super().__new__(cls, comm)
        topology = None if self._core is None else self._core.topology
        if self._core is not None and (
            topology is None or cls._topology_number not in (0, topology.number)
        ):
            raise TypeError(f"expecting a communicator that is a {cls.__name__}")
        return self

    def _neighbours(self) -> tuple[list[int], list[int]]:
        topology = self._state.topology
        if topology is None:
            raise argument_error("the communicator has no topology", "ERR_TOPOLOGY")
        return cast(tuple[list[int], list[int]], topology.neighbours(self.rank))

    inoutedges = property(_neighbours)
    inedges = property(lambda self: self._neighbours()[0])
    outedges = property(lambda self: self._neighbours()[1])
    indegree = property(lambda self: len(self._neighbours()[0]))
    outdegree = property(lambda self: len(self._neighbours()[1]))
    degrees = property(lambda self: (self.indegree, self.outdegree))

    def neighbor_allgather(self, sendobj: AnyObject) -> list[AnyObject]:
        """Send an object to all neighbours; return theirs."""
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: list[AnyObject]) -> list[AnyObject]:
        """Send an object to each neighbour; return theirs."""
        sources, destinations = self._neighbours()
        values, ends = list(sendobj), destinations
        if self._state.topology.number == CART:
            values, ends = _crossed(values), _crossed(destinations)
        try:
            return objects.neighbour_exchange(self._state.comm, values, ends, sources)
        except GpucollError as error:
            raise self._failed(error) from None


def _crossed(items: list[_T]) -> list[_T]:
    """Swap the two items of each dimension.

    Data sent down arrives from above. If both neighbours are the same rank, its item that was sent
    up comes first, because that one comes from below.
    """
    return [items[place ^ 1] for place in range(len(items))]


def _exchange(
    comm: Topocomm, sent: list[Row], sizes: list[int], spread: Callable[[int, Row], None]
) -> Call:
    """Send bytes along each edge, by an all_to_all with empty blocks between other ranks."""
    sources, destinations = comm._neighbours()
    if comm._state.topology.number == CART:
        sent, destinations = _crossed(sent), _crossed(destinations)
    n_ranks = comm.size
    outgoing: list[list[Any]] = [[] for _ in range(n_ranks)]
    for part, rank in zip(sent, destinations, strict=True):
        if rank >= 0:
            outgoing[rank].append(np.ascontiguousarray(part).view(np.uint8))
    incoming: list[list[int]] = [[] for _ in range(n_ranks)]
    for edge, rank in enumerate(sources):
        if rank >= 0:
            incoming[rank].append(edge)
    parts = [part for row in outgoing for part in row]
    out = np.empty(sum(sizes[edge] for row in incoming for edge in row), np.uint8)

    def finish() -> None:
        begin = 0
        for edge in (edge for row in incoming for edge in row):
            spread(edge, out[begin : begin + sizes[edge]])
            begin += sizes[edge]

    named = {
        "send_counts": [sum(map(len, row)) for row in outgoing],
        "recv_counts": [sum(sizes[edge] for edge in row) for row in incoming],
        "out": out,
    }
    whole = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return Call("all_to_all", (whole,), named, finish)


def _received(
    comm: Topocomm, recvbuf: AnySpec, is_vector: bool
) -> tuple[list[int], Callable[[int, Row], None]]:
    """Return the bytes that arrive along each edge, and the function that puts them in place."""
    n_edges = comm.indegree
    if is_vector:
        into = Vector(recvbuf, True, n_edges)
        counts, places = into.counts, into.displacements
        begins = [place * into.map.extent for place in places]
        memory, type_map = into.data, into.map
    else:
        one = Simple(recvbuf, True, max(n_edges, 1))
        counts, type_map, memory = [one.count] * n_edges, one.map, one.data
        begins = [one.offset + n * one.count * type_map.extent for n in range(n_edges)]
        one.check_reach(one.offset, one.count * n_edges, "what comes")

    def spread(edge: int, part: Row) -> None:
        if len(part):
            assert memory is not None
            type_map.unpack(part, memory, begins[edge])

    return [count * type_map.size for count in counts], spread


def neighbor_allgather(comm: Topocomm, sendbuf: BufSpecB, recvbuf: BufSpecB) -> Call:
    sizes, spread = _received(comm, recvbuf, False)
    return _exchange(comm, [Simple(sendbuf, False).row()] * comm.outdegree, sizes, spread)


def neighbor_allgatherv(comm: Topocomm, sendbuf: BufSpecB, recvbuf: BufSpecB) -> Call:
    sizes, spread = _received(comm, recvbuf, True)
    return _exchange(comm, [Simple(sendbuf, False).row()] * comm.outdegree, sizes, spread)


def neighbor_alltoall(comm: Topocomm, sendbuf: BufSpecB, recvbuf: BufSpecB) -> Call:
    sizes, spread = _received(comm, recvbuf, False)
    n_edges = comm.outdegree
    row = Simple(sendbuf, False, max(n_edges, 1)).row(n_edges)
    share = len(row) // max(n_edges, 1)
    parts = [row[n * share : (n + 1) * share] for n in range(n_edges)]
    return _exchange(comm, parts, sizes, spread)


def neighbor_alltoallv(comm: Topocomm, sendbuf: BufSpecB, recvbuf: BufSpecB) -> Call:
    sizes, spread = _received(comm, recvbuf, True)
    sent = Vector(sendbuf, False, comm.outdegree)
    return _exchange(comm, [sent.block(n) for n in range(comm.outdegree)], sizes, spread)


def neighbor_alltoallw(comm: Topocomm, sendbuf: BufSpecB, recvbuf: BufSpecB) -> Call:
    received = Typed(recvbuf, True, comm.indegree)
    sent = Typed(sendbuf, False, comm.outdegree)

    def spread(edge: int, part: Row) -> None:
        if len(part):
            received.maps[edge].unpack(part, received.data, received.displacements[edge])

    parts = [sent.block(n) for n in range(comm.outdegree)]
    return _exchange(comm, parts, received.sizes, spread)


class Cartcomm(Topocomm):
    """A communicator of ranks in a grid."""

    _topology_number = CART

    @property
    def _cart(self) -> Cart:
        return cast(Cart, self._state.topology)

    def Get_dim(self) -> int:
        return len(self._cart.dims)

    dim = ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        cart = self._cart
        return list(cart.dims), [int(item) for item in cart.periods], cart.coords(self.rank)

    topo = property(Get_topo)
    dims = property(lambda self: list(self._cart.dims))
    periods = property(lambda self: [int(item) for item in self._cart.periods])
    coords = property(lambda self: self._cart.coords(self.rank))

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        rank = self._cart.rank_at([coords] if isinstance(coords, int) else coords)
        if rank < 0:
            raise argument_error(f"{list(coords)} is beyond the grid {self.dims}", "ERR_ARG")
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        return self._cart.coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks to receive from and to send to; PROC_NULL beyond an edge."""
        return self._cart.shifted(self.rank, direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> Comm:
        """Split into grids that keep some of the dimensions."""
        cart = self._cart
        keeps = [bool(item) for item in
                 ([remain_dims] if isinstance(remain_dims, int) else remain_dims)]  # fmt: skip
        if len(keeps) != len(cart.dims):
            raise ValueError(f"expecting {len(cart.dims)} items, got {len(keeps)}")
        place = cart.coords(self.rank)
        rest = Cart([n for n, kept in zip(cart.dims, keeps, strict=True) if not kept])
        part = Cart(
            [n for n, kept in zip(cart.dims, keeps, strict=True) if kept],
            [p for p, kept in zip(cart.periods, keeps, strict=True) if kept],
        )
        color = rest.rank_at([n for n, kept in zip(place, keeps, strict=True) if not kept])
        key = part.rank_at([n for n, kept in zip(place, keeps, strict=True) if kept])
        made = self.Split(color, key)
        made._core.topology = part
        return self._of_state(made._core, "cart")


class Graphcomm(Topocomm):
    """A communicator with a graph that every rank has passed in full."""

    _topology_number = GRAPH

    def Get_dims(self) -> tuple[int, int]:
        graph = self._state.topology
        return graph.size, len(graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        graph = self._state.topology
        return list(graph.index), list(graph.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        return list(self._state.topology.neighbours(rank)[0])

    dims = property(Get_dims)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])
    topo = property(Get_topo)
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])
    nneighbors = property(lambda self: self.Get_neighbors_count(self.rank))
    neighbors = property(lambda self: self.Get_neighbors(self.rank))


class Distgraphcomm(Topocomm):
    """A communicator with a graph of which each rank has passed its neighbours."""

    _topology_number = DIST_GRAPH

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        graph = self._state.topology
        return len(graph.sources), len(graph.destinations), graph.is_weighted

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        graph = self._state.topology
        weights = graph.weights if graph.is_weighted else None
        return list(graph.sources), list(graph.destinations), weights


kinds.update({"cart": Cartcomm, "graph": Graphcomm, "dist_graph": Distgraphcomm})
_FORMS = {
    "Neighbor_allgather": neighbor_allgather,
    "Neighbor_allgatherv": neighbor_allgatherv,
    "Neighbor_alltoall": neighbor_alltoall,
    "Neighbor_alltoallv": neighbor_alltoallv,
    "Neighbor_alltoallw": neighbor_alltoallw,
}
add_forms(Topocomm, _FORMS)
__all__ = ["Cartcomm", "Distgraphcomm", "Graphcomm", "Topocomm"]
