"""The collectives, and who this rank is: where Horovod's programs import them from."""

# ruff: noqa: F401, F403  # the names are the module

from __future__ import annotations

from typing import Any

from gpucoll.integrations.horovod import basics as _basics
from gpucoll.integrations.horovod.basics import is_initialized, rank
from gpucoll.integrations.horovod.names import *
from gpucoll.integrations.horovod.torch.compression import Compression
from gpucoll.integrations.horovod.torch.handles import forget as _forget
from gpucoll.integrations.horovod.torch.handles import poll, synchronize
from gpucoll.integrations.horovod.torch.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from gpucoll.integrations.horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)


def init(*args: Any, **kwargs: Any) -> None:
    """Meet the other ranks; see `gpucoll.integrations.horovod.basics.init`."""
    if not is_initialized():
        _forget()
    _basics.init(*args, **kwargs)


def shutdown() -> None:
    """Leave the job; `init` may be called again, by all ranks."""
    _basics.shutdown()
    _forget()


__all__ = [
    name for name in globals() if not name.startswith("_") and name not in ("Any", "annotations")
]
