"""Call blocks for the MPI loop, and the words of a communicator that it reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.cpu.host.backend import BlockMaker
from gpucoll.backends.mpi.library import Library, native_operation
from gpucoll.backends.mpi.loop import mpi_call
from gpucoll.backends.mpi.words import FUNCTIONS, Move, MpiWords
from gpucoll.backends.protocol import Request
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call
from gpucoll.types import ReduceOp

FEW_RANKS = 8
"""Up to this number of ranks our kernels do all reductions to all ranks, or to a root, even those
that MPI could do. Between two ranks an exchange of slices takes 0.5 to 0.9 of the time of Intel
MPI's and Open MPI's nonblocking all_reduce of 4 KiB to 1 MiB, and keeps rank order. It needs a
message for each pair of ranks, so MPI's trees are faster for many ranks. A test sets it to 0."""
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", ctypes.CDLL(None)))
MOST_BYTES = 1 << 30
"""Limit of one message, and of a call of a function without large counts; a test sets it lower."""


class CommunicatorWords:
    """The words of one MPI communicator for the loop, and its memory.

    Parameters
    ----------
    library : Library
        The MPI.
    communicator : mpi4py.MPI.Comm
        Used by this backend only; its ranks are those of the group.
    is_on_gpu : bool
        Whether the arrays lie in memory that MPI can access but the host cannot.
    """

    def __init__(self, library: Library, communicator: Any, is_on_gpu: bool = False) -> None:
        self.library = library
        self.words = words = np.zeros(MpiWords.n_words, np.int64)
        world_size = communicator.Get_size()
        words[MpiWords.communicator] = library.handle(communicator)
        words[MpiWords.rank], words[MpiWords.world_size] = communicator.Get_rank(), world_size
        words[MpiWords.is_on_gpu] = is_on_gpu
        words[MpiWords.has_large_counts] = library.has_large_counts
        words[MpiWords.most_bytes] = MOST_BYTES
        words[MpiWords.request_bytes] = library.request_bytes
        words[MpiWords.in_place] = int(library.mpi.IN_PLACE)
        words[MpiWords.byte] = library.handle(library.mpi.BYTE)
        for word in FUNCTIONS:
            words[word] = library.function(word)
        statuses = np.zeros(2 * world_size * library.status_bytes, np.uint8)
        tables = {
            MpiWords.requests: np.zeros(2 * world_size, np.int64),
            MpiWords.statuses: statuses,
            MpiWords.vectors: np.zeros(4 * world_size, np.int64),
            MpiWords.moves: np.zeros(Move.n_words * world_size, np.int64),
            MpiWords.inputs: np.zeros(world_size + 1, np.int64),
        }
        for word, table in tables.items():
            words[word] = table.ctypes.data
        self._keep = tables

    def release(self) -> None:
        """Free the loop's scratch memory: no call will run any more."""
        _free(int(self.words[MpiWords.scratch]))
        self.words[MpiWords.scratch] = self.words[MpiWords.scratch_bytes] = 0

    @property
    def is_given_up(self) -> bool:
        """Whether requests of a call or of leaders were left to MPI, which may still use them."""
        return bool(self.words[MpiWords.is_given_up] or self.words[MpiWords.n_requests])


class MpiBlockMaker(BlockMaker):
    """Makes the call blocks of one rank.

    Parameters
    ----------
    group : Group
        All ranks.
    words : CommunicatorWords
        The communicator's words.
    """

    def __init__(self, group: Group, words: CommunicatorWords) -> None:
        super().__init__(group.rank, group.world_size)
        self._library = words.library
        self._mpi_words = words
        self._group = group

    def plain(
        self,
        collective: Collective,
        dtype: str,
        item_bytes: int,
        op: ReduceOp | None = None,
        root: int = NO_ROOT,
        *,
        keeps: bool = False,
    ) -> CallBlock:
        """Return the block of a call whose arrays are not known yet."""
        block = super().plain(collective, dtype, item_bytes, op, root, keeps=keeps)
        words = block.words
        words[Call.loop] = mpi_call.address
        words[Call.post] = words[Call.finish] = 0
        words[Call.mpi] = self._mpi_words.words.ctypes.data
        if op is not None and not keeps:
            self._set_operation(block, collective, dtype, op)
        return block

    def _set_operation(
        self, block: CallBlock, collective: Collective, dtype: str, op: ReduceOp
    ) -> None:
        """Have MPI itself reduce if it can."""
        depends = self._group.keeps_order and op.depends_on_order(dtype)
        # Whether a reduce_scatter is in place may differ between its ranks.
        if op.function is not None or collective.has_blocks or depends:
            return
        if not collective.is_scan and self._world_size <= FEW_RANKS:
            return
        is_averaged = op.name == "avg" and dtype.startswith(("float", "complex"))
        if is_averaged and collective.is_scan:
            return
        native = native_operation(dtype, "sum" if is_averaged else op.name)
        if native is None:
            return
        block.words[Call.mpi_dtype] = self._library.dtype(dtype)
        block.words[Call.mpi_operation] = self._library.operation(native)
        block.words[Call.mpi_divides] = is_averaged


class BlockMakers:
    """Makes the call blocks of one rank, for arrays in host or GPU memory.

    Parameters
    ----------
    group : Group
        All ranks.
    words : callable
        Returns the communicator's words, given whether the arrays are on a GPU.
    """

    def __init__(self, group: Group, words: Callable[[bool], CommunicatorWords]) -> None:
        self.host = MpiBlockMaker(group, words(False))
        self._on_gpu: MpiBlockMaker | None = None
        self._group, self._words = group, words

    def of(self, request: Request) -> CallBlock:
        """Return the block of a call."""
        if request.data.device == HOST_ARRAYS:
            return self.host.of(request)
        if self._on_gpu is None:
            self._on_gpu = MpiBlockMaker(self._group, self._words(True))
        return self._on_gpu.of(request)
