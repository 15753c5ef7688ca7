"""Sums and means of what clients hold, which nobody can look into: federated learning's parts.

See `docs/federated.md`.
"""

from gpucoll.federated.aggregation import WeightedMean

__all__ = ["WeightedMean"]
