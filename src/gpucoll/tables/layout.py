"""Where the arrays of a version lie among the bytes of a slot, and how they get there and back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.training.parameters import (
    AnyArray,
    kind_of,
    library_of,
    read_array,
    shown_kind,
    written_array,
)

__all__ = ["Layout"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
ALIGNMENT = 64


@dataclass(frozen=True)
class _Place:
    """One array: its name in errors, its kind, its bytes in a slot, and how to make a new one."""

    name: str
    kind: tuple[tuple[int, ...], str]
    on_host: np.dtype[Any]
    """The dtype of its bytes in NumPy: an integer's if NumPy does not know the array's."""
    offset: int
    size_bytes: int
    new: Callable[[Bytes], AnyArray]
    """Make an array like the first, of what lies in a slot."""

    def part(self, slot: Bytes) -> npt.NDArray[Any]:
        """Return its bytes in a slot as an array of host memory."""
        flat = slot[self.offset : self.offset + self.size_bytes]
        return flat.view(self.on_host).reshape(self.kind[0])


class Layout:
    """The arrays that each version consists of, as `like` has them.

    Parameters
    ----------
    like : array, or list, tuple or dict of arrays
        May be nested. Of dicts, only the keys count and not their order. No array is kept.

    Attributes
    ----------
    size_bytes : int
        Size of a slot.
    settings : dict
        What must be the same on all ranks, as errors show it.
    """

    def __init__(self, like: AnyArray) -> None:
        self._places: list[_Place] = []
        self.size_bytes = 0
        self._tree = _mapped(self._add, like)
        if not self._places:
            raise ArgumentError("like has no array")
        self.settings = {f"array{place.name}": shown_kind(place.kind) for place in self._places}

    def _add(self, name: str, array: AnyArray) -> int:
        kind = kind_of(array, f"like{name}")
        on_host = _on_host(array)
        size_bytes = int(np.prod(kind[0], dtype=np.int64)) * on_host.itemsize
        new = _maker(array, on_host)
        place = _Place(name, kind, on_host, self.size_bytes, size_bytes, new)
        self._places.append(place)
        self.size_bytes += -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return len(self._places) - 1

    def checked(self, what: str, arrays: AnyArray, *, written: bool = False) -> list[AnyArray]:
        """Return the arrays of a structure like `like`, in the order of their places.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The structure, a shape or a dtype is another one; or an array is to be written and
            cannot be.
        """
        found: dict[str, AnyArray] = {}
        _mapped(found.__setitem__, arrays)
        names = [place.name for place in self._places]
        if found.keys() != set(names):
            other = next(name for name in [*found, *names] if (name in found) != (name in names))
            state = "is missing" if other in names else "is not in like"
            raise ArgumentError(f"{what}: {what}{other} {state}; pass what like has")
        for place in self._places:
            array = found[place.name]
            kind = kind_of(array, f"{what}{place.name}")
            if kind != place.kind:
                raise ArgumentError(
                    f"{what}{place.name} must be {shown_kind(place.kind)}; got {shown_kind(kind)}"
                )
            flags = getattr(array, "flags", None)
            is_locked = library_of(array) == "jax" or not getattr(flags, "writeable", True)
            if written and is_locked:
                raise ArgumentError(f"{what}{place.name} cannot be written: leave out= out")
        return [found[name] for name in names]

    def store(self, arrays: list[AnyArray], slot: Bytes) -> None:
        """Copy arrays, which `checked` returned, into a slot."""
        for place, array in zip(self._places, arrays, strict=True):
            read_array(_as_known(array, place.on_host), place.part(slot))

    def write(self, slot: Bytes, arrays: list[AnyArray]) -> None:
        """Copy what lies in a slot into arrays, which `checked` returned."""
        for place, array in zip(self._places, arrays, strict=True):
            written_array(_as_known(array, place.on_host), place.part(slot))

    def made(self, slot: Bytes) -> AnyArray:
        """Return new arrays of what lies in a slot, in the structure of `like`."""
        made = [place.new(place.part(slot)) for place in self._places]
        return _mapped(lambda _, number: made[number], self._tree)


def _mapped(function: Callable[[str, Any], Any], tree: AnyArray, name: str = "") -> AnyArray:
    """Return a structure with ``function(name, leaf)`` in the place of each leaf.

    The leaves of a dict are visited in the order of its sorted keys, which all ranks have in
    common.
    """
    if isinstance(tree, Mapping):
        keys = sorted(tree, key=repr)
        made = {key: _mapped(function, tree[key], f"{name}[{key!r}]") for key in keys}
        return {key: made[key] for key in tree}
    if isinstance(tree, list | tuple):
        items = [_mapped(function, each, f"{name}[{i}]") for i, each in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return tuple(items) if isinstance(tree, tuple) else items
    return function(name, tree)


def _on_host(array: AnyArray) -> np.dtype[Any]:
    """Return the dtype of an array's bytes in NumPy; that of an integer if NumPy has no such."""
    if library_of(array) != "torch":
        dtype: np.dtype[Any] = np.dtype(array.dtype)
        if dtype.hasobject:
            raise ArgumentTypeError("like has an array of Python objects: only numbers are shared")
        return dtype
    try:
        dtype = np.dtype(str(array.dtype).removeprefix("torch."))
    except TypeError:
        dtype = np.dtype(np.void)
    return dtype if dtype.isbuiltin == 1 and dtype.itemsize else np.dtype(f"i{array.itemsize}")


def _as_known(array: AnyArray, on_host: np.dtype[Any]) -> AnyArray:
    """Return a tensor as one of the dtype of its bytes in NumPy, for example of a bfloat16."""
    if library_of(array) != "torch":
        return array
    array = array.detach()
    if str(array.dtype) == f"torch.{on_host}":
        return array
    return array.view(getattr(sys.modules["torch"], str(on_host)))


def _maker(array: AnyArray, on_host: np.dtype[Any]) -> Callable[[Bytes], AnyArray]:
    """Return a function that makes an array of this kind, on its device, of host memory.

    The function does not keep the array.
    """
    library, shape, dtype = library_of(array), tuple(array.shape), array.dtype
    if library == "jax":
        return functools.partial(_new_of_jax, dtype, array.sharding)
    if library == "numpy":
        new: Callable[[], AnyArray] = functools.partial(np.empty, shape, dtype)
    elif library == "torch":
        torch = sys.modules["torch"]
        new = functools.partial(torch.empty, shape, dtype=dtype, device=array.device)
    else:
        new = functools.partial(_new_of_cupy, shape, dtype, array.device)
    return functools.partial(_filled, new, on_host)


def _filled(new: Callable[[], AnyArray], on_host: np.dtype[Any], part: Bytes) -> AnyArray:
    array = new()
    written_array(_as_known(array, on_host), part)
    return array


def _new_of_jax(dtype: Any, sharding: Any, part: Bytes) -> AnyArray:
    # A copy of its own, which JAX may use as it is.
    return sys.modules["jax"].device_put(part.astype(dtype, copy=True), sharding)


def _new_of_cupy(shape: tuple[int, ...], dtype: Any, device: Any) -> AnyArray:
    with device:
        return sys.modules["cupy"].empty(shape, dtype)
