"""The places of blocks in a call through MPI, and copies of them."""

from __future__ import annotations

from gpucoll.backends.mpi.steps import allocate
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Call, Context, Status


@inline
def start_of(call: Call, rank: int) -> int:
    """Return the offset of a rank's block among those of all ranks."""
    if call.offsets:
        return call.offsets[rank]
    return call.block_bytes * rank


@inline
def bytes_of(call: Call, rank: int) -> int:
    """Return the size of a rank's block."""
    return start_of(call, rank + 1) - start_of(call, rank)


@inline
def no_memory(context: Context) -> int:
    """Give the communicator up: all ranks are in the call, and this one cannot take part."""
    give_up(context, Abort.NO_ROOM, context.rank)
    return Status.EVENT


@inline
def copy_plain(context: Context, destination: int, source: int, size_bytes: int) -> None:
    """Copy, unless the data is in place already."""
    if size_bytes > 0 and destination != source:
        call_copy(context.copy_plain, destination, source, size_bytes, 0)


@inline
def copied(context: Context, source: int, size_bytes: int) -> int:
    """Return a copy of this rank's input; 0: there is no memory for it.

    MPI_IN_PLACE would need no copy, but all ranks must give it or none (Open MPI then takes another
    algorithm), and here each rank may choose.
    """
    copy = allocate(max(size_bytes, 1))
    if copy != 0:
        copy_plain(context, copy, source, size_bytes)
    return copy
