"""A collective through MPI, from beginning to end in compiled code.

The ranks of a host compare their signatures first, as in every call of the CPU backend. Then each
rank calls MPI. Movements use the MPI function of the same name; so do reductions if MPI has the
dtype and op with the same meaning. All other reductions exchange slices by MPI messages, apply our
kernel in rank order, and return the results, with as many bytes as a ring.
"""

from __future__ import annotations

from gpucoll.backends.mpi.movements import broadcast, move
from gpucoll.backends.mpi.reductions import reduce_blocks, reduce_by_kernels, reduce_by_mpi
from gpucoll.backends.mpi.words import MpiWords
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.transport.shared.steps import NOT_SHARED, begin, close_record, post, wait_all_arrived
from gpucoll.transport.shared.words import Call, Context, Path, Status
from gpucoll.transport.tcp import exchange_words


@inline
def _run(context: Context, words: MpiWords, call: Call) -> int:
    if call.mpi_operation != 0:
        return reduce_by_mpi(context, words, call)
    if call.kernel == 0:
        if not call.spreads and not call.gathers:
            return broadcast(context, words, call)
        return move(context, words, call)
    if call.spreads:
        return reduce_blocks(context, words, call)
    return reduce_by_kernels(context, words, call)


@compiled_when_used(exchange_words.__name__)
def mpi_call(context: Context, call: Call) -> int:
    """Run the collective in the call block through MPI; return a status."""
    status = begin(context, call)
    if status != Status.OK:
        return status
    post(context, call, NOT_SHARED, NOT_SHARED)
    if context.world_size > 1:
        status = wait_all_arrived(context, call)
        if status != Status.OK:
            return status
    context.path = Path.MPI
    status = _run(context, MpiWords(call.mpi), call)
    if status == Status.OK:
        close_record(context)
    return status
