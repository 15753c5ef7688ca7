"""A collective through MPI, from beginning to end in compiled code.

The ranks of a host compare their signatures first, as in every call of the CPU backend. Then each
rank calls MPI. Movements use the MPI function of the same name; so do reductions if MPI has the
dtype and op with the same meaning. All other reductions exchange slices by MPI messages, apply our
kernel in rank order, and return the results, with as many bytes as a ring.
"""

from __future__ import annotations

from gpucoll.backends.mpi.movements import broadcast, move
from gpucoll.backends.mpi.reductions import reduce_blocks, reduce_by_kernels, reduce_by_mpi
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.shared.steps import (
    KERNEL,
    NOT_SHARED,
    OK,
    PATH,
    begin,
    close_record,
    post,
    wait_all_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Path
from gpucoll.transport.tcp import exchange_words
from gpucoll.types import Collective

_WORDS, _OPERATION = int(Call.MPI), int(Call.MPI_OPERATION)
_COLLECTIVE = int(Call.MPI_COLLECTIVE)
_N_HERE = int(Context.WORLD_SIZE)
_REDUCE_SCATTER, _BROADCAST = int(Collective.REDUCE_SCATTER), int(Collective.BROADCAST)
_MPI = int(Path.MPI)


@inline
def _run(context, words, call):
    kind = get(call, _COLLECTIVE)
    if get(call, _OPERATION) != 0:
        return reduce_by_mpi(context, words, call)
    if get(call, KERNEL) == 0:
        if kind == _BROADCAST:
            return broadcast(context, words, call)
        return move(context, words, call)
    if kind == _REDUCE_SCATTER:
        return reduce_blocks(context, words, call)
    return reduce_by_kernels(context, words, call)


@compiled_when_used(exchange_words.__name__)
def mpi_call(context, call):
    """Run the collective in the call block through MPI; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    post(context, call, NOT_SHARED, NOT_SHARED)
    if get(context, _N_HERE) > 1:
        status = wait_all_arrived(context, call)
        if status != OK:
            return status
    put(context, PATH, _MPI)
    status = _run(context, get(call, _WORDS), call)
    if status == OK:
        close_record(context)
    return status
