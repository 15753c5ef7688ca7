"""The patterns that torch.distributed supports, with tensors on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpucoll.bench.rank.inputs import ASYNC, plain
from gpucoll.bench.rank.library import Call, Loop
from gpucoll.bench.rank.loops import repeated, timed
from gpucoll.bench.rank.objects import objects
from gpucoll.bench.rank.overlap import overlap

__all__ = ["pattern"]

Method = Callable[[Call], "partial[Any] | None"]


def pattern(
    distributed: Any, call: Call, function: Method, tensor: Callable[[Any], Any]
) -> Loop | None:
    """Return the loop of a pattern; None if torch.distributed does not support it.

    Parameters
    ----------
    distributed : module
        torch.distributed.
    call : Call
    function : callable
        Maps a collective's call to the function and its arguments, or to None if there is none.
    tensor : callable
        Maps an array to a tensor over its memory.
    """
    name, rank, ranks = call.collective, distributed.get_rank(), distributed.get_world_size()
    if name.startswith((ASYNC, "overlap")):
        blocking = function(replace(call, collective=plain(name)))
        if blocking is None:
            return None
        start = partial(blocking, async_op=True)
        if name.startswith(ASYNC):
            return repeated(start, then=".wait()")
        return overlap(call, start, ".wait()", blocking) if call.in_place else None
    if name.endswith("_object"):
        return objects(call, rank, ranks, partial(OBJECTS[name], distributed))
    if name != "isend_irecv" or call.in_place:
        return None  # there is no probe, and no message of objects from any source
    return timed(
        "receiving = receive(destination, before)\nsending = send(source, after)\n"
        "receiving.wait()\nsending.wait()",
        receive=distributed.irecv,
        send=distributed.isend,
        source=tensor(call.source),
        destination=tensor(call.destination),
        after=(rank + 1) % ranks,
        before=(rank - 1) % ranks,
    )


def broadcast(distributed: Any, given: Any, root: int) -> Any:
    """Return the root's object."""
    found = [given]
    distributed.broadcast_object_list(found, root)
    return found[0]


def gather(distributed: Any, given: Any, root: int) -> list[Any] | None:
    """Return every rank's object on the root."""
    found = [None] * distributed.get_world_size() if distributed.get_rank() == root else None
    distributed.gather_object(given, found, root)
    return found


def scatter(distributed: Any, given: list[Any] | None, root: int) -> Any:
    """Return this rank's item of the root's list."""
    found = [None]
    distributed.scatter_object_list(found, given, root)
    return found[0]


def all_gather(distributed: Any, given: Any) -> list[Any]:
    """Return every rank's object."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, given)
    return found


OBJECTS: dict[str, Callable[..., Any]] = {
    "broadcast_object": broadcast,
    "gather_object": gather,
    "scatter_object": scatter,
    "all_gather_object": all_gather,
}
