"""Variables and objects of one rank, or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod import objects
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.mpi_ops import broadcast_
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign the variables of one rank to those of the others.

    Returns
    -------
    An op that does so, while a graph is built; None in eager mode.
    """
    assigned = broadcast_([_of_tensorflow(x) for x in variables], root_rank, None, process_set)
    return None if _executing_eagerly() else tf.group(*assigned)


def _of_tensorflow(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras 3 variable."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an op that broadcasts all variables of the graph."""
    if _executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all variables once a session has been made."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the op to the graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the op."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of one rank, which is pickled; no session is needed, also for graphs."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts objects."""
    label = name or "broadcast_object_fn"
    return lambda obj: objects.broadcast_object(obj, root_rank, label, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, which are pickled."""
    return objects.allgather_object(obj, name, process_set)
