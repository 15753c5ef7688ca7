"""MPI's collectives as jaxlib calls them: by number of dtype and op, in threads of XLA.

A handle of MPI's is the address of a `Handle`, which has a site of `gpucoll.entries.native` for
each collective, dtype and op that has been called. A function without a site calls Python, which
makes one. MPI's ints are 32 bits wide: what their registers have above them means nothing.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.entries.native import Site
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_words, load32, signed32

__all__ = [
    "FIRST_DTYPE",
    "FIRST_OP",
    "N_DTYPES",
    "N_OPS",
    "Handle",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
]

N_DTYPES, N_OPS = 16, 4
FIRST_DTYPE, FIRST_OP = 0x100, 0x200
"""MPI's numbers of the first dtype and of the first op."""
N_SITES = N_DTYPES * N_OPS


class Handle(Block):
    """A communicator of MPI's, as one of its members sees it."""

    size: int
    failed: int  # address of a function of Python: keeps an error's text, and returns its code
    all_reduce_in_python: int
    all_gather_in_python: int
    reduce_scatter_in_python: int
    dimensions: Field[Words] = words(1)
    all_reduce_sites: Field[Words] = words(N_SITES)
    reduce_scatter_sites: Field[Words] = words(N_SITES)
    all_gather_sites: Field[Words] = words(N_DTYPES)


@inline
def _place(dtype: int, op: int) -> int:
    """Return the place of a site among those of a collective; -1: there is none."""
    dtype, op = dtype - FIRST_DTYPE, op - FIRST_OP
    if dtype < 0 or dtype >= N_DTYPES or op < 0 or op >= N_OPS:
        return -1
    return dtype * N_OPS + op


@inline
def _run(handle: Handle, site: Site, source: int, destination: int, count: int) -> int:
    """Make the call of a site; return the code of an error, or 0."""
    handle.dimensions[0] = count
    text = call_words(site.run, site, source, destination, 1, handle.dimensions, 0, 0, 0)
    if text == 0:
        return 0
    return call_words(handle.failed, text, 0, 0, 0, 0, 0, 0, 0)


@compiled_when_used()
def all_reduce(
    source: int, destination: int, count: int, dtype: int, op: int, handle: Handle
) -> int:
    """Make MPI_Allreduce's call."""
    count, place = signed32(count), _place(dtype, op)
    if place >= 0 and handle.all_reduce_sites[place] != 0:
        site = Site(handle.all_reduce_sites[place])
        return _run(handle, site, source, destination, count)
    python = handle.all_reduce_in_python
    return call_words(python, source, destination, count, dtype, op, handle, 0, 0)


@compiled_when_used()
def reduce_scatter(
    source: int, destination: int, counts: int, dtype: int, op: int, handle: Handle
) -> int:
    """Make MPI_Reduce_scatter's call, with blocks of one size."""
    place = _place(dtype, op)
    if place >= 0 and handle.reduce_scatter_sites[place] != 0:
        site = Site(handle.reduce_scatter_sites[place])
        count = signed32(load32(counts)) * handle.size
        return _run(handle, site, source, destination, count)
    python = handle.reduce_scatter_in_python
    return call_words(python, source, destination, counts, dtype, op, handle, 0, 0)


@compiled_when_used()
def all_gather(
    source: int, count: int, dtype: int, destination: int, each: int, dtype_out: int, handle: Handle
) -> int:
    """Make MPI_Allgather's call."""
    count, place = signed32(count), _place(dtype, FIRST_OP)
    if place >= 0 and dtype == dtype_out and count == signed32(each):
        site = Site(handle.all_gather_sites[place // N_OPS])
        if site:
            return _run(handle, site, source, destination, count)
    python = handle.all_gather_in_python
    return call_words(python, source, count, dtype, destination, each, dtype_out, handle, 0)
