"""The gradients of a step are reduced: all but those of variables that are a rank's own."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import Average
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    if_useful,
    size_of,
)
from gpucoll.integrations.horovod.tensorflow.util import (
    _cache,
    _executing_eagerly,
    _make_subgraph,
    refs_to_vars,
    vars_to_refs,
)

__all__ = ["LocalVariables", "checked_groups", "make_allreduce_grads_fn"]


def checked_groups(num_groups: int, groups: Any) -> Any:
    """Return how gradients are grouped: None, their number, or a list of lists of variables."""
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of tf.Variable."
        )
    return groups


def make_allreduce_grads_fn(
    name: str,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """Return a function that reduces gradients: ``f(gradients, variables, use_generic_names)``.

    Equal parameters give the same function, so that a new tape in each step traces nothing anew.
    """
    return _make_cached(  # type: ignore[no-any-return]
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        vars_to_refs(groups) if isinstance(groups, list) else groups,
        process_set,
    )


@_cache
def _make_cached(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: Any,
    gradient_predivide_factor: float,
    groups: Any,
    process_set: ProcessSet,
) -> Callable[..., Any]:
    factor = gradient_predivide_factor if op == Average else 1.0
    options = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "op": op,
        "prescale_factor": 1.0 / factor,
        "postscale_factor": factor,
    }

    def reduce(which: Callable[..., Any], given: Any, number: int, generic: bool) -> Any:
        return if_useful(
            which,
            given,
            process_set,
            name=f"grad_{number}" if generic else None,
            ignore_name_scope=generic,
            **options,
        )

    def allreduce_grads(
        grads: Sequence[Any], vars: Any = None, use_generic_names: bool = False
    ) -> list[Any]:
        with tf.name_scope(f"{name}_Allreduce"):
            if sparse_as_dense:
                grads = [as_dense(grad) for grad in grads]
            results: list[Any] = [None] * len(grads)
            for n, members in enumerate(_together(grads, vars, groups)):
                if len(members) == 1:
                    reduced = [reduce(allreduce, grads[members[0]], n, use_generic_names)]
                else:
                    given = [grads[i] for i in members]
                    reduced = reduce(grouped_allreduce, given, n, use_generic_names)
                for i, grad in zip(members, reduced, strict=True):
                    results[i] = grad
            return results

    if not _executing_eagerly():
        return allreduce_grads
    traced = _make_subgraph(allreduce_grads)
    # A function is traced anew for other variables: it gets them only if it looks at them.
    by_variable = isinstance(groups, tuple)
    return lambda grads, vars=None, generic=False: traced(
        grads, vars if by_variable else None, generic
    )


def as_dense(grad: Any) -> Any:
    """Return a tensor instead of IndexedSlices."""
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _together(grads: Sequence[Any], variables: Any, groups: Any) -> list[list[int]]:
    """Return the numbers of the gradients that one op reduces: of one group, and one dtype.

    Without groups all belong together. An op costs more than what it adds to a reduction.
    """
    there = [i for i, grad in enumerate(grads) if grad is not None]
    if groups is None:
        made = [there]
    elif isinstance(groups, int):
        each, more = divmod(len(there), groups)
        starts = [n * each + min(n, more) for n in range(groups + 1)]
        made = [there[a:b] for a, b in pairwise(starts)]
    else:
        left = {variables[i].name: i for i in there}
        named = [[x.name for x in group] for group in refs_to_vars(groups)]
        made = [[left.pop(name) for name in group if name in left] for group in named]
        made += [[i] for i in left.values()]
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for n, members in enumerate(made):
        for i in members:
            by_kind[n, grads[i].dtype, isinstance(grads[i], tf.IndexedSlices)].append(i)
    return list(by_kind.values())


class LocalVariables:
    """The variables that are a rank's own: their gradients are not reduced.

    Parameters
    ----------
    process_set : ProcessSet
    scale : bool
        Whether their gradients are divided by the number of ranks, as if the others had none.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, scale: bool = True) -> None:
        self._process_set, self._scale = process_set, scale
        self._refs: set[Any] = set()

    def add(self, variable: Any) -> None:
        """Register a variable."""
        self._refs.add(_reference(variable))

    def __contains__(self, variable: Any) -> bool:
        return _reference(variable) in self._refs

    def reduce(
        self,
        allreduce_grads: Callable[..., list[Any]],
        grads: Sequence[Any],
        variables: Sequence[Any],
        *rest: Any,
    ) -> list[Any]:
        """Return the gradients of all variables: the reduced ones, and the local ones scaled."""
        results = list(grads)
        shared = [i for i, x in enumerate(variables) if x not in self]
        reduced = allreduce_grads([grads[i] for i in shared], [variables[i] for i in shared], *rest)
        for i, grad in zip(shared, reduced, strict=True):
            results[i] = grad
        if self._refs and self._scale:
            for i, x in enumerate(variables):
                if x in self and grads[i] is not None:
                    results[i] = self._scaled(grads[i])
        return results

    def _scaled(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(self._scaled(grad.values), grad.indices, grad.dense_shape)
        return grad / tf.cast(size_of(self._process_set), grad.dtype)


def _reference(variable: Any) -> Any:
    return variable.ref() if hasattr(variable, "ref") else id(variable)  # Keras 3 has no ref
