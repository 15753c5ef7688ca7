"""Variables and objects of one rank, or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from gpucoll.integrations.horovod.basics import rank
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.mpi_ops import allgather, broadcast, broadcast_
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = [
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
    """Return the object of one rank; it is pickled."""
    label = name if name is not None else type(obj).__name__
    is_root = rank() == root_rank
    data = _pickled(obj) if is_root else np.empty(0, np.uint8)
    size = broadcast(
        tf.constant([data.size], tf.int64), root_rank, f"{label}.sz", process_set=process_set
    )
    n_bytes = int(_value(size, session)[0])
    sent = tf.constant(data) if is_root else tf.zeros([n_bytes], tf.uint8)
    got = _value(
        broadcast(sent, root_rank, f"{label}.t", process_set=process_set), session
    )
    return obj if is_root else cloudpickle.loads(got.tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts objects, with ops that are made once: for graphs."""
    label = name or "broadcast_object_fn"
    size = tf.compat.v1.placeholder(tf.int64, [1])
    data = tf.compat.v1.placeholder(tf.uint8, [None])
    got_size = broadcast(size, root_rank, f"{label}.sz", process_set=process_set)
    got_data = broadcast(data, root_rank, f"{label}.t", process_set=process_set)
    session = session or tf.compat.v1.get_default_session()

    def broadcast_one(obj: Any) -> Any:
        is_root = rank() == root_rank
        mine = _pickled(obj) if is_root else np.empty(0, np.uint8)
        (n_bytes,) = session.run(got_size, {size: [mine.size]})
        sent = mine if is_root else np.zeros(n_bytes, np.uint8)
        got = session.run(got_data, {data: sent})
        return obj if is_root else cloudpickle.loads(got.tobytes())

    return broadcast_one


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks; they are pickled."""
    label = name if name is not None else type(obj).__name__
    data = _pickled(obj)
    mine = tf.constant([data.size], tf.int64)
    sizes = _value(allgather(mine, f"{label}.sz", process_set=process_set), session)
    all_data = allgather(tf.constant(data), f"{label}.t", process_set=process_set)
    parts = np.split(_value(all_data, session), np.cumsum(sizes)[:-1])
    return [cloudpickle.loads(part.tobytes()) for part in parts]


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


def _value(tensor: Any, session: Any) -> Any:
    if _executing_eagerly():
        return tensor.numpy()
    return (session or tf.compat.v1.get_default_session()).run(tensor)
