"""The arrays of a model, of any host library, as a list, tuple or dict whose shapes are fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpucoll.arrays.libraries import is_array, library_of
from gpucoll.arrays.library import AnyArray, Template, View, kind_of
from gpucoll.errors import ArgumentError, ArgumentTypeError

Arrays: TypeAlias = Any
"""A list, tuple or dict of arrays of NumPy, PyTorch, JAX or another library of host arrays."""

WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtype of an array -> the dtype in which it is added up."""


class Leaf(NamedTuple):
    """One array of a model.

    Attributes
    ----------
    key : object
        Its index, or its key in the dict.
    template : Template
        Its shape, dtype and library.
    first, last : int
        Its elements in the flat vector of its wide dtype.
    """

    key: Hashable
    template: Template
    first: int
    last: int

    @property
    def wide(self) -> str:
        """The dtype in which the array is added up."""
        return WIDE[self.template.dtype]


class Layout:
    """The keys, shapes and dtypes of a model's arrays, and their places in flat vectors.

    Parameters
    ----------
    like : list, tuple or dict of arrays
    what : str
        Its name in errors.

    Attributes
    ----------
    leaves : list of Leaf
    sizes : dict of str to int
        Number of elements of each wide dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is not a list, tuple or dict of float arrays in host memory.
    """

    def __init__(self, like: Arrays, what: str) -> None:
        self.is_dict = isinstance(like, Mapping)
        self.kind = "dict" if self.is_dict else "list or tuple"
        self._is_tuple = isinstance(like, tuple)
        self.sizes: dict[str, int] = {}
        self.leaves: list[Leaf] = []
        for key, array in _items(like, what):
            template = _look(array, f"{what}[{key!r}]").template
            if template.dtype not in WIDE:
                raise ArgumentTypeError(
                    f"{what}[{key!r}] is {template.dtype}: only {', '.join(WIDE)} have a mean; "
                    "leave it out, or convert it"
                )
            first = self.sizes.get(WIDE[template.dtype], 0)
            last = self.sizes[WIDE[template.dtype]] = first + math.prod(template.shape)
            self.leaves.append(Leaf(key, template, first, last))
        if not self.leaves:
            raise ArgumentError(f"{what} has no array")

    def check(self, arrays: Arrays, what: str) -> list[AnyArray]:
        """Return the arrays in order; raise unless they have these keys, shapes and dtypes."""
        found = dict(_items(arrays, what))
        if isinstance(arrays, Mapping) != self.is_dict:
            raise ArgumentTypeError(f"{what} must be a {self.kind}; got a {kind_of(arrays)}")
        if list(found) != (keys := [leaf.key for leaf in self.leaves]) and set(found) != set(keys):
            missing = [key for key in keys if key not in found]
            other = [key for key in found if key not in set(keys)]
            raise ArgumentError(
                f"{what} must have {len(keys)} arrays; missing: {missing}, not expected: {other}"
            )
        for leaf in self.leaves:
            template = _look(found[leaf.key], f"{what}[{leaf.key!r}]").template
            if (template.shape, template.dtype) != (leaf.template.shape, leaf.template.dtype):
                raise ArgumentError(
                    f"{what}[{leaf.key!r}] is {_text(template)}; expected {_text(leaf.template)}"
                )
        return [found[leaf.key] for leaf in self.leaves]

    def settings(self) -> dict[str, str]:
        """Return what must be the same on all ranks, as errors show it."""
        texts = {f"array {leaf.key!r}": _text(leaf.template) for leaf in self.leaves}
        return {"the kind of the arrays": self.kind} | texts

    def structure(self, arrays: list[AnyArray]) -> Arrays:
        """Return arrays in order as a list, tuple or dict, like the model."""
        if self.is_dict:
            return {leaf.key: array for leaf, array in zip(self.leaves, arrays, strict=True)}
        return tuple(arrays) if self._is_tuple else arrays


def map_arrays(function: Callable[..., AnyArray], arrays: Arrays, *others: Arrays) -> Arrays:
    """Return what a function makes of each array of a model and of the others at its place.

    `arrays` decides about the keys, the kind of the result and, for NumPy, the dtypes. Tensors of
    PyTorch are detached from their graphs.
    """
    items = _items(arrays, "arrays")
    columns = [dict(_items(other, "arrays")) for other in others]
    for column in columns:
        if set(column) != {key for key, _ in items}:
            raise ArgumentError(
                f"arrays of one model must have the same keys; got {[key for key, _ in items]} "
                f"and {list(column)}"
            )
    made = {key: _made(function, x, *(column[key] for column in columns)) for key, x in items}
    if isinstance(arrays, Mapping):
        return made
    return tuple(made.values()) if isinstance(arrays, tuple) else list(made.values())


def _made(function: Callable[..., AnyArray], *arrays: AnyArray) -> AnyArray:
    shapes = [tuple(array.shape) for array in arrays]
    if len(set(shapes)) > 1:  # the library would broadcast some of them
        raise ArgumentError(f"arrays of the same key must have the same shape; got {shapes}")
    given = [array.detach() if hasattr(array, "detach") else array for array in arrays]
    made = function(*given)
    # NumPy makes numbers of arrays without axes.
    return np.asarray(made, given[0].dtype) if isinstance(given[0], np.ndarray) else made


def _items(arrays: Arrays, what: str) -> list[tuple[Hashable, AnyArray]]:
    if isinstance(arrays, Mapping):
        return list(arrays.items())
    if isinstance(arrays, list | tuple):
        return list(enumerate(arrays))
    raise ArgumentTypeError(
        f"{what} must be a list, tuple or dict of arrays; got {kind_of(arrays)}"
    )


def _look(array: AnyArray, what: str) -> View:
    if not is_array(array):
        raise ArgumentTypeError(f"{what} must be an array; got {kind_of(array)}")
    view = library_of(array, what).look(array, what)
    if view.template.device != "cpu":
        raise ArgumentTypeError(
            f"{what} lies on {view.template.device}: copy it to host memory first"
        )
    return view


def _text(template: Template) -> str:
    return f"{template.dtype} of shape {template.shape}"
