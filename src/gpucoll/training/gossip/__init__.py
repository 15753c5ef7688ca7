"""Averages among neighbours, for ranks that must not wait for all others.

>>> from gpucoll.training import gossip
>>> ring = gossip.topology.ring(comm.world_size)
>>> x = gossip.neighbor_all_reduce(comm, x, topology=ring)

See `docs/gossip.md`.
"""

from gpucoll.training.gossip import topology
from gpucoll.training.gossip.neighbors import consensus, neighbor_all_reduce
from gpucoll.training.gossip.pairwise import PairwiseAverage
from gpucoll.training.gossip.pushing import PushSum, push_sum

__all__ = ["PairwiseAverage", "PushSum", "consensus", "neighbor_all_reduce", "push_sum", "topology"]
