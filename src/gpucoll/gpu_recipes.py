"""Calls on GPU arrays like those that were made before: nothing is left to prepare but addresses.

A training step makes the same few kinds of call again and again: collective, op, root, dtype,
shape, device. The first of a kind goes the long way, with all its checks and errors, and leaves a
`Recipe` where it came down to one function of the library's. The next one only looks at its arrays;
whatever is not exactly as it was then goes the long way again. Nothing ever has to be forgotten: a
recipe holds no array's address and no stream, and the communicator's state is looked at each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from gpucoll.arrays import streams
from gpucoll.arrays.library import Library, Template
from gpucoll.backends.gpu.flight import Express
from gpucoll.errors import GpucollError
from gpucoll.preparation import Prepared
from gpucoll.types import Collective, ReduceOp

_MOST = 1024
"""How many are kept, as of signatures."""
_SIMPLE_OPS = (str, ReduceOp, type(None))
_SIMPLE_ROOTS = (int, type(None))


class Recipe(NamedTuple):
    """What all calls of a kind have in common."""

    name: str
    """What the user called."""
    express: Express
    signatures: Any
    """What `express` posts: to be kept."""
    shape: tuple[int, ...]
    """Of the result."""
    source_bytes: int
    destination_bytes: int


class Ready(NamedTuple):
    """A call that only has to be put on a stream."""

    name: str
    express: Express
    addresses: tuple[int, int]
    template: Template
    keep: tuple[Any, Any]
    """The memory's owners."""
    finish: Callable[[], Any]


class _Target(NamedTuple):
    """Where a result goes."""

    address: int
    owner: Any
    finish: Callable[[], Any]


class Recipes:
    """The recipes of a communicator's calls."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Recipe | None] = {}
        self.libraries: dict[type, Library] = {}
        """Type of an array that there are recipes for -> what serves it."""

    def learn(
        self, collective: Collective, x: Any, given: dict[str, Any], made: Prepared, connected: Any
    ) -> None:
        """Keep a recipe of a call that has gone the long way, if there can be one."""
        request, library = made.request, made.template.library
        source, destination = request.source, request.destination
        key = _key(collective, x, given, made.template)
        if (
            key is None
            or key in self._kept
            or source is None
            or destination is None
            or made.is_packed
            or made.lasting is None
            or not streams.is_stream_ordered(library)
            or streams.forgets_freed_memory(library)  # whose addresses are asked for each time
        ):
            return
        addresses = source.address, destination.address
        sizes = source.size_bytes, destination.size_bytes
        if given.get("out") is not x and not _are_apart(addresses, *sizes):
            return
        recipe = None
        signatures = connected.signatures([request])
        found = connected.express(signatures, connected.launches([request], ()))
        if found is not None and found[1] == addresses:
            recipe = Recipe(collective.spelled, found[0], signatures, destination.shape, *sizes)
        if len(self._kept) >= _MOST:
            self._kept.clear()
        self._kept[key] = recipe
        self.libraries[type(x)] = library

    def find(self, collective: Collective, x: Any, given: dict[str, Any]) -> Ready | None:
        """Return a call of a known kind; None where it has to go the long way."""
        library, out = self.libraries[type(x)], given.get("out")
        try:
            template, address, owner, strides = (
                library.look_at_out(x) if out is x else library.look(x, "x")
            )
            key = _key(collective, x, given, template)
            recipe = self._kept.get(key) if strides is None and address else None
            if recipe is None:
                return None
            if out is x:
                target: _Target | None = _Target(address, owner, partial(_finish, library, out))
            else:
                target = _target_of(recipe, template, x, out)
        except GpucollError:
            return None  # the long way says it in its own words
        if target is None:
            return None
        addresses = address, target.address
        sizes = recipe.source_bytes, recipe.destination_bytes
        if out is not x and not _are_apart(addresses, *sizes):
            return None
        name, express, keep = recipe.name, recipe.express, (owner, target.owner)
        return Ready(name, express, addresses, template, keep, target.finish)


def _target_of(recipe: Recipe, template: Template, x: Any, out: Any) -> _Target | None:
    """Return a new array, or `out` where it is just like one."""
    library = template.library
    if out is None:
        made = library.new(template, recipe.shape)
        return _Target(made.buffer.address, made.buffer.owner, made.finish)
    if type(out) is not type(x):
        return None
    like, address, owner, strides = library.look_at_out(out)
    is_alike = (like.shape, like.dtype, like.device) == (
        recipe.shape,
        template.dtype,
        template.device,
    )
    if not is_alike or strides is not None or not address:
        return None
    return _Target(address, owner, partial(_finish, library, out))


def _finish(library: Library, out: Any) -> Any:
    library.complete(out, None)
    return out


def _are_apart(addresses: tuple[int, int], source_bytes: int, destination_bytes: int) -> bool:
    source, destination = addresses
    return source + source_bytes <= destination or destination + destination_bytes <= source


def _key(
    collective: Collective, x: Any, given: dict[str, Any], template: Template
) -> Hashable | None:
    """Return what kind of call this is; None for one that is never of a known kind."""
    op, root, out = given.get("op"), given.get("root"), given.get("out")
    if type(op) not in _SIMPLE_OPS or type(root) not in _SIMPLE_ROOTS:
        return None
    if given.get("counts") is not None or given.get("receive_counts") is not None:
        return None
    shape, dtype, _, _, device, _, _, _ = template
    return collective, op, root, out is x, out is None, type(x), shape, dtype, device
