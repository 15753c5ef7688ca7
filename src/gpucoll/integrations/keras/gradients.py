"""One fused all_reduce of gradients, inside the step that Keras' backend compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["all_reduce"]

Reduce = Callable[["Communicator", list[Any], str], Sequence[Any]]


def all_reduce(comm: Communicator, tensors: list[Any], op: str) -> list[Any]:
    """Return tensors of Keras' backend, reduced over all ranks in one call for each dtype."""
    return list(_REDUCE[keras.backend.backend()](comm, tensors, op)) if tensors else []


def _on_torch(comm: Communicator, tensors: list[Any], op: str) -> Sequence[Any]:
    found = [tensor.detach() for tensor in tensors]
    comm.all_reduce(found, op=op, out=found)
    return found


def _on_jax(comm: Communicator, tensors: list[Any], op: str) -> Sequence[Any]:
    from gpucoll.integrations import jax as calls

    found: Sequence[Any] = calls.all_reduce(tensors, op, comm=comm)
    return found


def _on_tensorflow(comm: Communicator, tensors: list[Any], op: str) -> Sequence[Any]:
    import tensorflow as tf

    from gpucoll.integrations import tensorflow as calls

    dense = [tf.convert_to_tensor(x) for x in tensors]  # of tf.IndexedSlices, too
    found: Sequence[Any] = calls.all_reduce(dense, op, comm=comm)
    return found


_REDUCE: dict[str, Reduce] = {"jax": _on_jax, "tensorflow": _on_tensorflow, "torch": _on_torch}
