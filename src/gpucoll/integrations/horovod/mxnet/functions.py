"""Parameters and Python objects, from one rank to all."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from gpucoll.integrations.horovod.basics import size
from gpucoll.integrations.horovod.mxnet.mpi_ops import broadcast_
from gpucoll.integrations.horovod.objects import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[Any, Any], root_rank: int = 0, prefix: str | None = None
) -> None:
    """Overwrite parameters by those of one rank.

    Parameters
    ----------
    params : dict of NDArray or Parameter, or ParameterDict
        Such as ``Module.get_params()`` or ``Block.collect_params()``. A parameter whose shape is
        not known yet is broadcast when it gets its values.
    root_rank : int
    prefix : str, optional
        Of the names: different ones for different models.

    Raises
    ------
    ValueError
        `params` is something else.
    """
    if size() == 1:
        return
    if not isinstance(params, dict | ParameterDict):
        raise ValueError(f"invalid params of type: {type(params)}")
    for key, value in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if not isinstance(value, Parameter):
            broadcast_(value, root_rank, name)
            continue
        try:
            data = value.data()
        except DeferredInitializationError:
            initialise = _then_broadcast(value._init_impl, root_rank, name)
            value._init_impl = types.MethodType(initialise, value)
        else:
            broadcast_(data, root_rank, name)


def _then_broadcast(initialise: Callable[..., None], root_rank: int, name: str) -> Any:
    def initialise_and_broadcast(self: Parameter, *args: Any, **kwargs: Any) -> None:
        initialise(*args, **kwargs)
        broadcast_(self.data(), root_rank, name)

    return initialise_and_broadcast
