"""Keras 3 on several ranks: ``fit`` data parallel over gpucoll, on JAX, TensorFlow or PyTorch.

See `docs/keras.md`. Keras reads ``KERAS_BACKEND`` when it is imported, and so does this package.
"""

from __future__ import annotations

from gpucoll.integrations.keras.callback import DataParallel, average_logs, broadcast_variables
from gpucoll.integrations.keras.optimizer import DistributedOptimizer
from gpucoll.integrations.keras.sharding import shard

__all__ = ["DataParallel", "DistributedOptimizer", "average_logs", "broadcast_variables", "shard"]
