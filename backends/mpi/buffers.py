"""The places of blocks in a call through MPI, and copies of them."""

from __future__ import annotations

from gpucoll.backends.mpi.steps import COPY, allocate
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, get, load64
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Call, Context, Status

_OFFSETS, _BLOCK_BYTES = int(Call.OFFSETS), int(Call.BLOCK_BYTES)
_CONTEXT_RANK = int(Context.RANK)
_EVENT, _NO_ROOM = int(Status.EVENT), int(Abort.NO_ROOM)


@inline
def start_of(call, rank):
    """Return the offset of a rank's block among those of all ranks."""
    if get(call, _OFFSETS) != 0:
        return load64(get(call, _OFFSETS) + 8 * rank)
    return get(call, _BLOCK_BYTES) * rank


@inline
def bytes_of(call, rank):
    """Return the size of a rank's block."""
    return start_of(call, rank + 1) - start_of(call, rank)


@inline
def no_memory(context):
    """Give the communicator up: all ranks are in the call, and this one cannot take part."""
    give_up(context, _NO_ROOM, get(context, _CONTEXT_RANK))
    return _EVENT


@inline
def copy_plain(context, destination, source, size_bytes):
    """Copy, unless the data is in place already."""
    if size_bytes > 0 and destination != source:
        call_copy(get(context, COPY), destination, source, size_bytes, 0)


@inline
def copied(context, source, size_bytes):
    """Return a copy of this rank's input; 0: there is no memory for it.

    MPI_IN_PLACE would need no copy, but all ranks must give it or none (Open MPI then takes another
    algorithm), and here each rank may choose.
    """
    copy = allocate(max(size_bytes, 1))
    if copy != 0:
        copy_plain(context, copy, source, size_bytes)
    return copy
