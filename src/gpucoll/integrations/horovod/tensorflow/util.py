"""What several modules ask of TensorFlow, under the names that programs of Horovod use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["_cache", "_executing_eagerly", "_make_subgraph", "refs_to_vars", "vars_to_refs"]


def _executing_eagerly() -> bool:
    """Return whether operations run at once, not in a graph that is being built."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(f)  # type: ignore[no-any-return]


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep results by arguments, apart for eager mode and for graphs."""
    kept: dict[Any, Any] = {}

    def cached(*args: Any) -> Any:
        key = args, _executing_eagerly()
        if key not in kept:
            kept[key] = f(*args)
        return kept[key]

    return cached


def vars_to_refs(variables: Any) -> Any:
    """Return hashable references instead of variables, in lists of lists, too."""
    if isinstance(variables, list):
        return tuple(vars_to_refs(x) for x in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables that references stand for."""
    if isinstance(refs, tuple):
        return [refs_to_vars(x) for x in refs]
    return refs.deref()


def is_elastic() -> bool:
    """Return whether the number of ranks can change while a graph lives."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))
