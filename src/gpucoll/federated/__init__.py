"""Sums and means of what clients hold, which nobody can look into: federated learning's parts.

See `docs/federated.md`.
"""

from gpucoll.federated.aggregation import WeightedMean
from gpucoll.federated.strategies import FedOpt, Scaffold, fed_avg, fed_prox

__all__ = ["FedOpt", "Scaffold", "WeightedMean", "fed_avg", "fed_prox"]
