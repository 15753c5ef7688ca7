"""Running a call's reduce kernel over the context's tables of addresses."""

from __future__ import annotations

from gpucoll.control.calls import KERNEL, PARAMETER, PART_BYTES
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_reduce, get
from gpucoll.transport.layout import Context

SOURCES, DESTINATIONS = int(Context.SOURCES), int(Context.DESTINATIONS)


@inline
def reduce_tables(context, call, n_destinations, n_sources, size_bytes, ahead):
    """Reduce the first `n_sources` of the table of sources, in order, into each destination."""
    call_reduce(
        get(call, KERNEL),
        get(context, DESTINATIONS),
        n_destinations,
        get(context, SOURCES),
        n_sources,
        size_bytes // get(call, PART_BYTES),
        get(call, PARAMETER),
        ahead,
    )
