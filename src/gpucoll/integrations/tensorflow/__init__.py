"""Collectives as ops of TensorFlow, eagerly, in `tf.function` and under XLA.

>>> import gpucoll, gpucoll.integrations.tensorflow as gct
>>> comm = gpucoll.init()
>>> total = gct.all_reduce(x)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.integrations.tensorflow.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        exclusive_scan,
        gather,
        reduce,
        reduce_scatter,
        scan,
        scatter,
    )
    from gpucoll.integrations.tensorflow.training import (
        DistributedGradientTape,
        broadcast_variables,
        shard,
    )

__all__ = [
    "DistributedGradientTape",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "exclusive_scan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "shard",
]

_HOMES = {
    "DistributedGradientTape": "training",
    "broadcast_variables": "training",
    "shard": "training",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: Horovod's front needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "collectives")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
