"""The memory of other ranks: arenas, mapped on demand, and private memory, read in one copy.

The kernel makes that copy (``process_vm_readv``). It does so between processes of one user, unless
a security policy forbids it. So every rank tries it on a token in every other rank. This also shows
that both processes mean the same by a process number, which is not so in different PID namespaces.

Ranks only read: a peer that was given up could still write into memory that its owner has reused.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_reach, compare_exchange64, load64, load64_acquire
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import copy_from_process, event_pending_since, give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Context, Status

# --- a peer's arena -------------------------------------------------------------------------------

# It is mapped as far as it is used. An arena has as much address space as the machine has memory.
# To map the whole arenas of all ranks would take more address space than a process may have. So the
# first part is mapped when the ranks meet. When a call needs more, a new mapping is made from the
# arena's beginning, four times as large or larger. The old mapping stays until the last
# communicator with this peer is closed, because another thread may be reading there.


FIRST_BYTES = 1 << 20
GROWTHS = 20
_GROWTH_BITS = 2


class PeerArena(Block):
    """An arena: one block for all communicators of this process."""

    mapped: int  # how often the mapping has grown
    size_bytes: int
    mappings: Field[Words] = words(GROWTHS + 1)  # for each growth: the address of its mapping


_MAY_MOVE = 1

_i64, _i32 = types.int64, types.int32
_mremap = types.ExternalFunction("mremap", _i64(_i64, _i64, _i64, _i32))
_munmap = types.ExternalFunction("munmap", _i32(_i64, _i64))


@inline
def _reaches(growth: int, stop: int) -> bool:
    """Return whether the mapping after `growth` growths includes all offsets before `stop`."""
    return stop <= FIRST_BYTES << (_GROWTH_BITS * growth)


@inline
def arena_of(context: Context, rank: int) -> int:
    """Return where the arena of `rank` is mapped, as far as `reach` has mapped it."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    return load64(arena.at.mappings + 8 * (load64_acquire(arena.at.mapped)))


@inline
def reach(context: Context, rank: int, stop: int) -> int:
    """Return the address of `rank`'s arena, mapped up to offset `stop`; 0: it was given up."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    growth = load64_acquire(arena.at.mapped)
    if _reaches(growth, stop):
        return load64(arena.at.mappings + 8 * growth)
    return call_reach(context.map_more, context, rank, stop)


@inline
def _map_growth(arena: PeerArena, growth: int) -> int:
    """Map the arena again, from its beginning, for this growth; return the address, or 0."""
    place = arena.at.mappings + 8 * growth
    address = load64_acquire(place)
    if address != 0:
        return address
    size_bytes = min(FIRST_BYTES << (_GROWTH_BITS * growth), load64(arena.at.size_bytes))
    # If the old size is 0, mremap(2) maps the same memory a second time.
    address = _mremap(load64(arena.at.mappings), 0, size_bytes, np.int32(_MAY_MOVE))
    if address == -1:
        return 0
    before = compare_exchange64(place, 0, address)
    if before == 0:
        return address
    _munmap(address, size_bytes)
    return before


@compiled
def map_more(context: Context, rank: int, stop: int) -> int:
    """Map the arena of `rank` up to `stop`; return its address, or give up and return 0."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    growth = load64_acquire(arena.at.mapped)
    while not _reaches(growth, stop):
        growth += 1
    address = 0
    if stop <= load64(arena.at.size_bytes):
        address = _map_growth(arena, growth)
    if address == 0:
        give_up(context, Abort.NO_ADDRESSES, context.rank)
        return 0
    before = load64_acquire(arena.at.mapped)
    while before < growth:  # another thread may have gone further
        before = compare_exchange64(arena.at.mapped, before, growth)
    return address


# --- private memory -------------------------------------------------------------------------------


TOKEN_BYTES = 16


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_probe: tuple[int, ctypes.Array[ctypes.c_char]] | None = None


def own_probe() -> tuple[int, str]:
    """Return the address of this process's token, and the token in hexadecimal."""
    global _probe
    if _probe is None or _probe[0] != os.getpid():
        _probe = os.getpid(), ctypes.create_string_buffer(os.urandom(TOKEN_BYTES))
    buffer = _probe[1]
    return ctypes.addressof(buffer), buffer.raw[:TOKEN_BYTES].hex()


def is_readable(pid: int, address: int, token: str) -> bool:
    """Return whether this process can read the token at this address of the other process."""
    read = getattr(_libc, "process_vm_readv", None)
    if read is None:
        return False
    found = ctypes.create_string_buffer(TOKEN_BYTES)
    local = _IoVector(ctypes.addressof(found), TOKEN_BYTES)
    remote = _IoVector(address, TOKEN_BYTES)
    read.restype = ctypes.c_ssize_t
    count = read(
        ctypes.c_int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return bool(count == TOKEN_BYTES and found.raw == bytes.fromhex(token))


# --- in compiled code -----------------------------------------------------------------------------


SLICE_BYTES = 16 << 20
"""After copying this much, check whether the call has been given up."""

_STATUS_COPIES = layout.STATUS_COPIES
_YES, _NO = 1, 2


@inline
def can_read(context: Context, rank: int) -> bool:
    """Return whether a rank can read the memory of all others."""
    return load64_acquire(context.status_lines + rank * LINE + _STATUS_COPIES) == 1


@inline
def can_copy_once(context: Context) -> bool:
    """Return whether all ranks can read each other's memory, once all have arrived; same on all."""
    if context.single_copy == 0:
        answer = _YES
        for rank in range(context.world_size):
            if not can_read(context, rank):
                answer = _NO
        context.single_copy = answer
    return context.single_copy == _YES


@inline
def read_from(context: Context, rank: int, destination: int, source: int, size_bytes: int) -> int:
    """Copy from an address in the process of `rank`; return a status."""
    done = 0
    while done < size_bytes:
        step = min(SLICE_BYTES, size_bytes - done)
        pid = context.pids[rank]
        if copy_from_process(context, pid, destination + done, source + done, step) != step:
            give_up(context, Abort.UNREADABLE, rank)
            return Status.LOST
        if event_pending_since(context):
            return Status.EVENT  # the data read may be invalid by now
        done += step
    return Status.OK
