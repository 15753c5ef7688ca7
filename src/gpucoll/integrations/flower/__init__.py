"""Secure aggregation for Flower's present API; see the section "Flower" of `docs/federated.md`."""

from gpucoll.integrations.flower.client import secure_aggregation
from gpucoll.integrations.flower.strategy import SecureAggregation

__all__ = ["SecureAggregation", "secure_aggregation"]
