"""Python objects from rank to rank: the same for every framework."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from gpucoll.integrations.horovod.arguments import root_of
from gpucoll.integrations.horovod.basics import engine_of, rank
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, Request
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]

_ARRAYS = NumpyArrays()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of a rank of the job, which cloudpickle pickles.

    Parameters
    ----------
    obj : object
        Other ranks' objects are ignored.
    root_rank : int
    name : str, optional
        Default: the class of `obj`; pass one where classes differ.
    process_set : ProcessSet
    """
    name = name or type(obj).__name__
    engine, root = engine_of(process_set), root_of(root_rank, process_set)
    is_root = rank() == root_rank
    data = _pickled(obj) if is_root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    engine.run(Request(Kind.BROADCAST, f"broadcast.{name}.sz", _ARRAYS, [size], [size], root=root))
    if not is_root:
        data = np.empty(size[0], np.uint8)
    engine.run(Request(Kind.BROADCAST, f"broadcast.{name}.t", _ARRAYS, [data], [data], root=root))
    return obj if is_root else pickle.loads(data.data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; see `broadcast_object`."""
    name = name or type(obj).__name__
    engine, data = engine_of(process_set), _pickled(obj)
    sizes = Request(Kind.ALLGATHER, f"allgather.{name}.sz", _ARRAYS, [np.array([data.size])])
    engine.run(sizes)
    objects = Request(Kind.ALLGATHER, f"allgather.{name}.t", _ARRAYS, [data])
    engine.run(objects)
    assert sizes.results is not None
    assert objects.results is not None
    ends = np.cumsum(sizes.results[0])[:-1]
    return [pickle.loads(part.data) for part in np.split(objects.results[0], ends)]


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)  # writable
