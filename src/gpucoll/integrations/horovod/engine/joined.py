"""What a rank that has joined contributes: zeros."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.checks import Described
    from gpucoll.integrations.horovod.engine.request import ArrayLibrary

__all__ = ["absent"]


def absent(described: Described) -> Request:
    """Return a request of zeros, in place of one that this rank has not submitted."""
    library = _library(described.library)
    zeros = [library.zeros(*array) for array in described.arrays]
    factors = described.prescale, described.postscale
    return Request(
        *(Kind(described.kind), described.name, library, zeros, zeros),
        *(ReduceOp(described.op), described.root, *factors),
    )


def _library(name: str) -> ArrayLibrary:
    if name == "torch":
        module: Any = importlib.import_module("gpucoll.integrations.horovod.torch.arrays")
        return cast("ArrayLibrary", module.TorchArrays())
    return NumpyArrays()
