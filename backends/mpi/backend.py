"""Host arrays through MPI: with the calls, entries and signatures of the CPU backend.

The ranks of a host share a segment here, too. Through it they compare their calls, note what they
do and see which rank is lost. Only MPI moves the data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.cpu.host.backend import BlockMaker, CpuBackend
from gpucoll.backends.cpu.host.entry_tables import BlockEntryTable, EntryTable
from gpucoll.backends.cpu.world.phases import input_of, output_of, put_into
from gpucoll.backends.mpi.collectives import mpi_call
from gpucoll.backends.mpi.library import Library, library, native_operation
from gpucoll.backends.mpi.ranks import MpiRanks, keep_for_ever
from gpucoll.backends.mpi.words import FUNCTIONS, Move, MpiWords
from gpucoll.backends.protocol import HostBackend, HostMessages, NotStarted, PreparedCall, Request
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import BackendUnavailableError, StateError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call, Status
from gpucoll.types import ReduceOp
from gpucoll.wording import rank_of

FEW_RANKS = 8
"""Up to this number of ranks our kernels do all reductions to all ranks, or to a root, even those
that MPI could do. Between two ranks an exchange of slices takes 0.5 to 0.9 of the time of Intel
MPI's and Open MPI's nonblocking all_reduce of 4 KiB to 1 MiB, and keeps rank order. It needs a
message for each pair of ranks, so MPI's trees are faster for many ranks. A test sets it to 0."""
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", ctypes.CDLL(None)))
MOST_BYTES = 1 << 30
"""Limit of one message, and of a call of a function without large counts; a test sets it lower."""
PROMISES = {
    "same bits on every rank": "yes up to 8 ranks, except for scans; else not promised by MPI",
    "same bits run after run": "yes up to 8 ranks, except for scans; else not promised by MPI",
    "same bits whatever size, chunks and placement": "no",
    "half types": "reduced by our kernels: accumulated in float32, rounded once",
}
"""What this backend promises of rounding and reproducibility; `Communicator.describe` shows it."""


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


class MpiCall(NotStarted):
    """A prepared call: one built-in over one call block.

    Parameters
    ----------
    group : HostGroup
        The ranks of this host.
    memory : Memory
        The communicator's memory.
    block : CallBlock
        The call; this object owns it from here on.
    request : Request
        The call as a request.
    """

    def __init__(
        self, group: HostGroup, memory: Memory, block: CallBlock, request: Request
    ) -> None:
        self._memory = memory
        self._group = group
        self._block = block
        self._request = request
        self._is_packed = bool(request.sources or request.destinations or request.parts)
        self._run_at_once = self._group.prepare(block)
        self._run_queued: Callable[[], int] | None = None

    def run_once(self) -> int:
        """Run the call if nothing prevents it; return 0, or a status that Python must handle."""
        if self._is_packed:
            return int(Status.NOT_RUN)
        status = None
        try:
            status = self._run_at_once()
        finally:  # after a Ctrl-C, too
            if status != Status.OK:
                self._memory.keep_given_up(self._block)
        return status

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        if self._run_queued is None:
            self._run_queued = self._group.prepare(self._block, queued=True)
        held: Any = self._block
        try:
            if not self._is_packed:
                self._group.run_prepared(self._run_queued, timeout_s)
                return
            source, output = input_of(self._request), output_of(self._request)
            held = (self._block, source, output)
            words = self._block.words
            words[Call.source], words[Call.destination] = source.ctypes.data, output.ctypes.data
            self._group.run_prepared(self._run_queued, timeout_s)
            put_into(self._request, output)
        except BaseException:
            self._memory.keep_given_up(held)
            raise


class Memory:
    """Memory of calls through one MPI communicator: kept for ever if requests are left to MPI.

    Parameters
    ----------
    group : HostGroup
        The ranks of this host.
    ranks : MpiRanks
        All ranks, as an MPI communicator; this object owns it from here on.
    who : str
        This rank, for messages.
    further : object
        Further memory that MPI reads and writes.
    """

    def __init__(self, group: HostGroup, ranks: MpiRanks, who: str, further: object = None) -> None:
        self._words: dict[bool, CommunicatorWords] = {}
        self._group = group
        self._ranks = ranks
        self._who = who
        self._further = further
        self.end_messages: Callable[[], None] | None = None
        """Ends the messages that MPI carries."""
        ranks.at_end = self._note_end
        group.at_close(self._close)

    def words(self, is_on_gpu: bool = False) -> CommunicatorWords:
        """Return the words of the communicator for the loop, for arrays in host or GPU memory."""
        if is_on_gpu not in self._words:
            made = CommunicatorWords(library(), self._ranks.communicator, is_on_gpu)
            self._words[is_on_gpu] = made
        return self._words[is_on_gpu]

    @property
    def is_given_up(self) -> bool:
        """Whether requests were left to MPI."""
        return any(words.is_given_up for words in self._words.values())

    def keep_given_up(self, held: Any) -> None:
        """Keep an object for ever if requests that use it were left to MPI."""
        if self.is_given_up:
            self._ranks.is_given_up = True
            keep_for_ever(held)

    def kept_where_given_up(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled entry that keeps its arrays for ever if requests are left to MPI.

        Such an entry allocates new results for tensors and drops them if the call fails. So they
        are made here instead, and can be kept, too.
        """
        keep, words = self.keep_given_up, self.words()

        def entry(x: Any, out: Any, *given: Any) -> Any:
            if out is None and hasattr(x, "new_empty"):
                out = x.new_empty(x.shape)
            result = None
            try:
                result = call(x, out, *given)
            finally:  # after a Ctrl-C, too
                if result is None and words.is_given_up:
                    keep((x, out))
            return result

        return entry

    def _note_end(self) -> None:
        """Mark the communicator as failed: MPI is being finalised, so no call can run any more."""
        if not self._group.is_closed and self._group.failure is None:
            self._group.fail(
                StateError(
                    f"{self._who}: MPI was finalised before this communicator, which moves "
                    "its arrays through MPI: close the communicator first"
                )
            )
        if self.end_messages is not None:
            self.end_messages()

    def _close(self) -> None:
        if self.end_messages is not None:
            self.end_messages()
        is_given_up = self.is_given_up
        self._ranks.free(keep=is_given_up)
        for words in self._words.values():
            if is_given_up:
                keep_for_ever((words, self._further))
            else:
                words.release()


class MpiBackend:
    """Moves host buffers through MPI.

    Parameters
    ----------
    group : HostGroup
        The ranks.
    ranks : MpiRanks
        The same ranks, as an MPI communicator; this object owns it from here on.
    """

    def __init__(self, group: HostGroup, ranks: MpiRanks) -> None:
        self.group = group
        self.last_status = group.last_status
        self._host = CpuBackend(group)
        self.messages: HostMessages = self._host.messages
        self.memory = Memory(group, ranks, rank_of(group.rank, group.world_size))
        self._blocks = BlockMakers(group, self.memory.words)
        self._tables: dict[tuple[Collective, bool], EntryTable] = {}
        self._knows_nothing = EntryTable(group)

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective."""
        return MpiCall(self.group, self.memory, self._blocks.of(request), request)

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the entry of a collective."""
        if collective.is_list:
            return self._serve_nothing  # MPI takes no lists: Python packs them
        key = collective, of_blocks
        if key not in self._tables:
            self._tables[key] = (BlockEntryTable if of_blocks else EntryTable)(self.group)
        call = self.memory.kept_where_given_up(self._tables[key].call)
        if not of_blocks:
            return call

        def entry(x: Any, out: Any, *given: Any) -> Any:
            is_listed = type(x) is list or type(out) is list  # Python packs lists
            return self._serve_nothing() if is_listed else call(x, out, *given)

        return entry

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return an entry that starts nothing."""
        return self._serve_nothing

    def _serve_nothing(self, *_: object) -> None:
        """Leave a call to Python, without an error."""
        self._knows_nothing.call(None, None, None, None, None)  # which also sets the status

    def learn(
        self,
        collective: Collective,
        kind: ArrayKind,
        op: Any,
        root: Any,
        *,
        of_blocks: bool = False,
    ) -> None:
        """Make the entry serve arrays of this kind with these arguments from now on."""
        table = self._tables.get((collective, of_blocks))
        if table is None:
            return

        def make() -> CallBlock:
            parsed = None if op is None else ReduceOp.parse(op)
            place = NO_ROOT if root is None else root
            return self._blocks.host.plain(collective, kind.dtype, kind.item_bytes, parsed, place)

        table.learn(kind.native, op, root, make, key=kind.key, tensor_table=kind.tensor_table)

    def native_table(self, collective: Collective) -> int:
        """Return 0: MPI keeps addresses of arrays, which Python keeps alive."""
        return 0

    def object_entry(self, request: Request) -> None:
        """Return None: no entry serves objects here."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in this rank's arena."""
        return self._host.empty(shape, dtype)

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a context in which every new NumPy array lies in memory like that of `empty`."""
        return self._host.shared_arrays()

    def describe(self) -> dict[str, str]:
        """Return facts about the MPI for the user: name -> sentence."""
        return {
            "MPI": described_mpi(),
            "messages": "through shared memory, as with backend='cpu'",
            "last call on this rank": self._host.last_path().spelled,
            **PROMISES,
        }


def described_mpi() -> str:
    """Return a description of the MPI."""
    counts = "beyond 31 bits" if library().has_large_counts else "of 31 bits, more in pieces"
    return f"{library().name}; counts {counts}"


def brought_together(over_mpi: Callable[[], MpiRanks] | None) -> MpiRanks:
    """Return the ranks as an MPI communicator.

    Raises
    ------
    BackendUnavailableError
        MPI has not brought these ranks together.
    """
    if over_mpi is None:
        raise BackendUnavailableError(
            "backend='mpi' needs ranks that MPI has brought together: start them with mpiexec or "
            "srun and call init(backend='mpi'), or Communicator.from_mpi(MPI.COMM_WORLD)"
        )
    return over_mpi()


def create(group: Any, over_mpi: Callable[[], MpiRanks] | None) -> HostBackend:
    """Return this backend for the ranks of one host."""
    group.over_mpi = brought_together(over_mpi)
    return MpiBackend(group, group.over_mpi)
