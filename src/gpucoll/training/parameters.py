"""The parameters of a model, arrays of any library, as parts of flat vectors in host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpucoll import ArgumentError, ArgumentTypeError

AnyArray: TypeAlias = Any
"""An array of any library."""
Vector: TypeAlias = NDArray[Any]
"""A flat array in host memory, of the dtype in which all is computed: float32 or float64."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Parameters:
    """Arrays in the order given, of which a range is read from or written to a flat vector.

    Attributes
    ----------
    arrays : list
        The arrays: those given, or those that stand for them if they cannot be written.
    dtype : numpy.dtype
        That of the vectors: float64 if an array has it, otherwise float32, which half types are
        widened to.
    sizes : list of int
    """

    def __init__(self, given: Iterable[AnyArray]) -> None:
        if library_of(given) or not isinstance(given, Iterable):
            raise ArgumentTypeError(
                "parameters must be a list or another iterable of arrays; got one "
                f"{type(given).__name__}"
            )
        self.arrays = list(given)
        if not self.arrays:
            raise ArgumentError("parameters has no array")
        if len({id(array) for array in self.arrays}) < len(self.arrays):
            raise ArgumentError("parameters has an array twice")
        self.descriptions = [_describe(array, i) for i, array in enumerate(self.arrays)]
        dtypes = {dtype for _, dtype in self.descriptions}
        self.dtype = np.dtype("float64" if "float64" in dtypes else "float32")
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape, _ in self.descriptions]

    @property
    def immutable(self) -> bool:
        """Whether an array cannot be written, so that new ones take the place of these."""
        return any(library_of(array) == "jax" for array in self.arrays)

    def replace(self, given: Iterable[AnyArray]) -> None:
        """Take other arrays of the same shapes and dtypes."""
        arrays = list(given)
        if len(arrays) != len(self.arrays):
            raise ArgumentError(f"there are {len(self.arrays)} parameters; got {len(arrays)}")
        for i, (array, expected) in enumerate(zip(arrays, self.descriptions, strict=True)):
            if (found := _describe(array, i)) != expected:
                was, now = shown_kind(expected), shown_kind(found)
                raise ArgumentError(f"parameter {i} was {was} before, and is {now} now")
        self.arrays = arrays

    def settings(self) -> dict[str, str]:
        """Return what must be the same on all ranks, as errors show it."""
        texts = [shown_kind(description) for description in self.descriptions]
        settings = {"the number of parameters": str(len(texts))}
        return settings | {f"parameter {number}": text for number, text in enumerate(texts)}

    def read(self, first: int = 0, last: int | None = None) -> Vector:
        """Return the arrays from number `first` up to `last` as a new vector."""
        chosen = slice(first, last)
        vector = np.empty(sum(self.sizes[chosen]), self.dtype)
        for array, part in zip(self.arrays[chosen], self._parts(vector, chosen), strict=True):
            read_array(array, part)
        return vector

    def write(self, vector: Vector, first: int = 0, last: int | None = None) -> None:
        """Write a vector to the arrays from number `first` up to `last`."""
        chosen = slice(first, last)
        for i, part in enumerate(self._parts(vector, chosen), first):
            self.arrays[i] = written_array(self.arrays[i], part)

    def _parts(self, vector: Vector, chosen: slice) -> list[Vector]:
        """Return the parts of a vector in the shapes of arrays."""
        ends = np.cumsum(self.sizes[chosen])
        shapes = [shape for shape, _ in self.descriptions[chosen]]
        parts = np.split(vector, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def fragments_of(sizes: Sequence[int], fragments: int) -> list[tuple[int, int]]:
    """Return the first and last number of the arrays of each fragment, of about equal sizes."""
    ends = np.cumsum(sizes)
    bounds = [0]
    for number in range(1, fragments):
        least, most = bounds[-1] + 1, len(sizes) - (fragments - number)
        distances = np.abs(ends[least - 1 : most] - ends[-1] * number / fragments)
        bounds.append(least + int(distances.argmin()))
    return [*zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def library_of(array: object) -> str:
    """Return the name of an array's library, if it is one of those that are served."""
    if isinstance(array, np.ndarray):
        return "numpy"
    for name, kind in (("torch", "Tensor"), ("jax", "Array"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, kind, ())):
            return name
    return ""


def kind_of(array: AnyArray, name: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of an array of one of the libraries that are served."""
    library = library_of(array)
    if not library:
        raise ArgumentTypeError(
            f"{name} must be an array of NumPy, CuPy, PyTorch or JAX; got {type(array).__name__}"
        )
    if hasattr(array, "to_local") and hasattr(array, "placements"):
        raise ArgumentTypeError(
            f"{name} is a {type(array).__name__}: pass its part on this rank, x.to_local()"
        )
    if (
        library == "numpy"
        and type(array) is not np.ndarray
        and isinstance(array, np.ma.MaskedArray)
    ):
        raise ArgumentTypeError(f"{name} is a masked array: its mask would be ignored")
    return tuple(array.shape), str(array.dtype).removeprefix("torch.")


def _describe(array: AnyArray, number: int) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of an array that can be averaged and written."""
    shape, dtype = kind_of(array, f"parameter {number}")
    if dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"parameter {number} is {dtype}: only {', '.join(_DTYPES)} are averaged; leave it out"
        )
    if library_of(array) == "numpy" and not array.flags.writeable:
        raise ArgumentError(f"parameter {number} is read-only: pass a copy")
    return shape, dtype


def shown_kind(description: tuple[tuple[int, ...], str]) -> str:
    """Return the kind of an array as errors show it."""
    shape, dtype = description
    return f"{dtype} of shape {shape}"


def read_array(array: AnyArray, part: Vector) -> None:
    """Copy an array into one of host memory, and widen its values if that has another dtype."""
    library = library_of(array)
    if library == "torch":
        # A view of the vector: the tensor's library widens and copies from any device.
        sys.modules["torch"].from_numpy(part).copy_(array.detach())
        return
    on_host = array.get() if library == "cupy" else np.asarray(array)
    np.copyto(part, on_host, casting="unsafe")


def written_array(array: AnyArray, part: Vector) -> AnyArray:
    """Write to an array and return it; return a new one if it cannot be written."""
    library = library_of(array)
    if library == "numpy":
        np.copyto(array, part, casting="unsafe")
    elif library == "torch":
        torch = sys.modules["torch"]
        with torch.no_grad():
            array.copy_(torch.from_numpy(part))
    elif library == "cupy":
        array[...] = sys.modules["cupy"].asarray(part)
    else:  # of memory of its own, which JAX may use as it is
        return sys.modules["jax"].device_put(part.astype(array.dtype, copy=True), array.sharding)
    return array
