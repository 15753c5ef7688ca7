"""Requests that every rank has submitted become calls of gpucoll."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.integrations.horovod.engine import adasum
from gpucoll.integrations.horovod.engine.request import Kind

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.engine.forms import Form
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["batches", "execute"]

_WITH_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER)


def batches(requests: Sequence[Request], limit_bytes: int) -> list[list[Request]]:
    """Return requests in the order in which to execute them, those together that one call does.

    Parameters
    ----------
    limit_bytes : int
        How many bytes one call takes at most, unless a single request has more.
    """
    if len(requests) < 2:
        return [[request] for request in requests]
    forms = [_form(request) for request in requests]
    first = forms[0]
    if (
        first.kind in _FUSED
        and all(form.batch is first.batch for form in forms)
        and sum(form.n_bytes for form in forms) <= limit_bytes
    ):
        return [list(requests)]
    made: list[list[Request]] = []
    filling: dict[Hashable, list[Request]] = {}
    n_bytes: dict[Hashable, int] = {}
    for request, form in zip(requests, forms, strict=True):
        kind = form.batch
        batch = filling.get(kind)
        if batch is None or form.kind not in _FUSED or n_bytes[kind] + form.n_bytes > limit_bytes:
            batch = filling[kind] = []
            n_bytes[kind] = 0
            made.append(batch)
        batch.append(request)
        n_bytes[kind] += form.n_bytes
    return made


def _form(request: Request) -> Form:
    assert request.form is not None
    return request.form


def execute(comm: Communicator, batch: list[Request]) -> None:
    """Execute requests that one call does, and set their results."""
    library = batch[0].library
    library.begin(batch)
    kind = batch[0].kind
    if (fused := _FUSED.get(kind)) is not None:
        try:
            fused(comm, batch)
        except (ArgumentError, ArgumentTypeError):  # nothing was sent
            _with_copies(fused, comm, batch)
    elif kind in _WITH_ROWS and any(len(x.shape) == 0 for x in batch[0].arrays):
        raise ArgumentError(f"Process-set rank zero tried to {kind.name} a rank-zero tensor.")
    else:
        _OTHERS[kind](comm, batch[0])
    library.ended(batch)


def _with_copies(
    fused: Callable[[Communicator, list[Request]], None], comm: Communicator, batch: list[Request]
) -> None:
    """Execute requests whose arrays gpucoll refuses, with copies of them.

    The arrays of this rank may share memory, as tied weights do, while those of others do not: the
    others are in the call. What is refused again is refused on every rank.
    """
    library = batch[0].library

    def copied(x: Any) -> Any:
        copy = library.empty(x, tuple(x.shape))
        library.scale(x, 1.0, copy)
        return copy

    copies = [
        replace(request, arrays=[copied(x) for x in request.arrays], outputs=None)
        for request in batch
    ]
    fused(comm, copies)
    for request, copy in zip(batch, copies, strict=True):
        request.results = copy.results
        if request.outputs is not None:
            for result, out in zip(copy.results or (), request.outputs, strict=True):
                library.scale(result, 1.0, out)
            request.results = request.outputs


def _all_reduce(comm: Communicator, batch: list[Request]) -> None:
    first = batch[0]
    sources, targets = first.arrays, _targets(first)
    if len(batch) > 1:
        sources = [x for request in batch for x in request.arrays]
        targets = [x for request in batch for x in _targets(request)]
    if first.prescale != 1.0:
        sources = [x for request in batch for x in _prescaled(request, len(sources) == 1)]
    form = _form(first)
    if len(sources) == 1:
        comm.all_reduce(sources[0], form.operation, out=targets[0])
    elif sources:
        comm.all_reduce(sources, form.operation, out=targets)
    if form.factor != 1.0:
        for target in targets:
            first.library.scale(target, form.factor, target)


def _prescaled(request: Request, is_alone: bool) -> list[Any]:
    """Return the inputs times their factor: in place, unless another array may lie there, too."""
    library, made = request.library, []
    in_place = is_alone or request.outputs is None
    for x, target in zip(request.arrays, request.results or (), strict=True):
        scaled = target if in_place else library.empty(x, tuple(x.shape))
        library.scale(x, request.prescale, scaled)
        made.append(scaled)
    return made


def _targets(request: Request) -> list[Any]:
    if request.outputs is None:
        empty = request.library.empty
        request.results = [empty(x, tuple(x.shape)) for x in request.arrays]
    else:
        request.results = request.outputs
    return request.results


def _broadcast(comm: Communicator, batch: list[Request]) -> None:
    sources = [x for request in batch for x in request.arrays]
    targets = [x for request in batch for x in _targets(request)]
    if len(targets) == 1:
        comm.broadcast(sources[0], batch[0].root, out=targets[0])
    elif targets:
        comm.broadcast(sources, batch[0].root, out=targets)


def _all_gather(comm: Communicator, request: Request) -> None:
    own = _counts([x.shape[0] for x in request.arrays])
    everyone = comm.all_gather(own).reshape(comm.world_size, -1)
    library, request.results = request.library, []
    for x, rows in zip(request.arrays, everyone.T.tolist(), strict=True):
        whole = library.empty(x, (sum(rows), *x.shape[1:]))
        if len(set(rows)) == 1:
            comm.all_gather(x, out=whole)
        else:
            comm.all_gather(x, counts=rows, out=whole)
        request.results.append(whole)


def _all_to_all(comm: Communicator, request: Request) -> None:
    (x,) = request.arrays
    splits = request.splits
    if splits is None:
        splits = [x.shape[0] // comm.world_size] * comm.world_size
    received = comm.all_to_all(_counts(splits))
    request.received_splits = came = received.tolist()
    result = request.library.empty(x, (sum(came), *x.shape[1:]))
    comm.all_to_all(x, send_counts=list(splits), recv_counts=came, out=result)
    request.results = [result]


def _counts(splits: Sequence[int]) -> Any:
    import numpy as np

    return np.asarray(splits, np.int64)


def _reduce_scatter(comm: Communicator, request: Request) -> None:
    form, library, request.results = _form(request), request.library, []
    for x in request.arrays:
        if request.prescale != 1.0:
            scaled = library.empty(x, tuple(x.shape))
            library.scale(x, request.prescale, scaled)
            x = scaled
        rows, left = divmod(x.shape[0], comm.world_size)
        counts = [rows + (rank < left) for rank in range(comm.world_size)]
        out = library.empty(x, (counts[comm.rank], *x.shape[1:]))
        if left:
            comm.reduce_scatter(x, form.operation, counts=counts, out=out)
        else:
            comm.reduce_scatter(x, form.operation, out=out)
        if form.factor != 1.0:
            library.scale(out, form.factor, out)
        request.results.append(out)


def _adasum(comm: Communicator, request: Request) -> None:
    library = request.library
    for x in request.arrays:
        if (dtype := library.dtype(x)) not in _OF_ADASUM:
            raise ArgumentError(f"Adasum takes {', '.join(_OF_ADASUM)}; got {dtype}")
    for x, target in zip(request.arrays, _targets(request), strict=True):
        library.scale(x, request.prescale, target)
        adasum.all_reduce(comm, target, target)
        if request.postscale != 1.0:
            library.scale(target, request.postscale, target)


def _nothing(comm: Communicator, request: Request) -> None:
    """Do nothing: the cycle that found every rank here was the barrier."""
    request.results = []


_OF_ADASUM = ("float16", "float32", "float64")
_FUSED = {Kind.ALLREDUCE: _all_reduce, Kind.BROADCAST: _broadcast}
_OTHERS = {
    Kind.ALLGATHER: _all_gather,
    Kind.ALLTOALL: _all_to_all,
    Kind.REDUCESCATTER: _reduce_scatter,
    Kind.ADASUM: _adasum,
    Kind.BARRIER: _nothing,
}
