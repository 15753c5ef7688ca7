"""Secure and streaming aggregation for Flower's present API; see `docs/federated.md`."""

from gpucoll.integrations.flower.client import secure_aggregation
from gpucoll.integrations.flower.strategy import SecureAggregation
from gpucoll.integrations.flower.streaming import Streaming

__all__ = ["SecureAggregation", "Streaming", "secure_aggregation"]
