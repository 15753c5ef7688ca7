"""Sums and means of what clients hold, which nobody can look into: federated learning's parts.

See `docs/federated.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpucoll.federated.aggregation import WeightedMean
from gpucoll.federated.privacy import DistributedNoise, epsilon_of_gaussian
from gpucoll.federated.samplers import discrete_gaussian, skellam
from gpucoll.federated.strategies import FedOpt, Scaffold, fed_avg, fed_prox

if TYPE_CHECKING:
    from gpucoll.federated.secure_sum import SecureSum, secure_all_reduce

__all__ = [
    "DistributedNoise",
    "FedOpt",
    "Scaffold",
    "SecureSum",
    "WeightedMean",
    "discrete_gaussian",
    "epsilon_of_gaussian",
    "fed_avg",
    "fed_prox",
    "secure_all_reduce",
    "skellam",
]


def __getattr__(name: str) -> object:
    """Import the secure sum when it is first used: it alone needs the package cryptography."""
    if name not in ("SecureSum", "secure_all_reduce"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpucoll.federated import secure_sum

    return getattr(secure_sum, name)
