"""What every communicator stands on: a group of ranks, wherever they are.

`gpucoll.group.host.group.HostGroup` is the ranks of one host around one segment. What runs above
it knows this much of it, and nothing of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpucoll.errors import GpucollError
from gpucoll.group.survivors import Agreement
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status
from gpucoll.types import Collective

ENDING_S = 2.0
"""How long who gives a communicator up waits for threads in its calls, which notice in 20 ms."""


class Channel(Protocol):
    """Moves bytes of any length between all ranks of a group: the control channel."""

    @property
    def run_barrier(self) -> Callable[[], int]:
        """A barrier that returns its `Status`; does not run while asynchronous calls are queued."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has arrived."""

    def all_gather_bytes(
        self, data: bytes, collective: Collective, root: int = ..., timeout_s: float | None = None
    ) -> list[bytes]:
        """Return every rank's bytes, by rank."""


class EnqueuedCalls(Protocol):
    """This rank's calls on GPU arrays, posted for the others to compare."""

    words: Any
    """Of which the item `gpucoll.group.host.enqueued.SEQUENCE` is `sequence`, in half the time."""

    @property
    def sequence(self) -> int:
        """The number of the last call that this rank posted."""

    @property
    def compared(self) -> int:
        """The number of the last call that was the same on every rank."""

    @property
    def has_uncompared(self) -> bool:
        """Whether this rank has posted calls of which that is not known."""

    @property
    def late_rank(self) -> int:
        """A rank that the last `compare` found late; -1: none.

        Of another host one that has closed the communicator, where there is one: which of its ranks
        is late is not known here.
        """

    def is_compared(self, sequence: int) -> bool:
        """Return whether this call was the same on every rank."""

    def poster(self, block: CallBlock) -> Callable[[], int]:
        """Return the built-in that posts this call and returns a `Status`; keep the block."""

    def compare(self) -> Status:
        """Compare as far as all ranks have posted: OK, MORE (a rank is late) or MISMATCH."""

    def say_failed(self) -> None:
        """Tell the ranks that wait for this one's GPU that it will not come."""

    def failed_ranks(self) -> list[int]:
        """Return the ranks that said so."""


class StartedCalls(Protocol):
    """Calls that were started, in order: run by whoever waits, or by the process's own thread.

    Each has a number: 1, 2, ...
    """

    wait: Callable[[int], int]
    """``(number)``: runs calls until that one has ended, well and as the next to be noted: 0.

    Else returns 1, perhaps before that, where a failed call must be settled first. Ctrl-C comes out
    of it.
    """
    poll: Callable[[int, int], int]
    """``(number, wanted)``: finishes what needs nobody else; returns whether that one has ended.

    `wanted`: from now on the thread runs it.
    """
    sleep: Callable[[int, int], int]
    """``(number, ns)``: sleeps until that one has ended, for so long at most; returns whether."""
    reap: Callable[[int], int]
    """``(number)``: the entry of a call may be used anew, if all before it were reaped.

    Not before its Work has ended, or where nobody runs calls any more.
    """

    def start(self, block: CallBlock, timeout_s: float) -> int:
        """Start a call and return its number; 0: there is no room. Keep the block until its end."""

    def without_room(self) -> int:
        """Return the number of the next call, if it has found no memory and not begun; else 0."""

    def make_room(self, number: int) -> None:
        """Let such a call be run again; SharedMemoryError: there is no memory, it never will."""

    def begin_serving(self) -> bool:
        """Start the thread, unless it runs; return whether it runs calls of this queue."""

    def started(self) -> range:
        """Return the numbers of calls that were started and not reaped."""

    def ended(self) -> range:
        """Return the numbers of calls that have ended and were not reaped."""

    @property
    def n_reaped(self) -> int:
        """The number of the last call that was reaped; those up to it have all ended."""

    def status_of(self, number: int) -> int:
        """Return the status of a call that has ended and was not reaped."""

    def settle(self) -> bool:
        """Wait, for `ENDING_S` at most, until nobody runs calls; return whether nobody does.

        That the last one has ended is told a moment before that. One that was given up ends within
        a slice of waiting.
        """


class Group(Protocol):
    """This rank's part in a group of ranks.

    Attributes
    ----------
    rank, world_size : int
        Which of how many.
    timeout_s : float
        Default deadline of every wait, in seconds.
    keeps_order : bool
        Whether all reductions combine the ranks in the order 0 to P-1, whatever that costs; the
        same on every rank.
    was_told : bool
        Whether that was raised to somebody.
    is_in_use : bool
        Whether a thread that cannot be ended may still look at what is shared.
    over_mpi : MpiRanks or None
        The ranks as MPI knows them, where arrays go through it (`gpucoll.backends.mpi.ranks`).
    """

    rank: int
    world_size: int
    timeout_s: float
    keeps_order: bool
    was_told: bool
    is_in_use: bool
    over_mpi: Any

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its host."""

    @property
    def here(self) -> int:
        """The number of this rank's host."""

    @property
    def interface(self) -> str:
        """The network interface that links this host to the others; empty: there is one host."""

    @property
    def failure(self) -> GpucollError | None:
        """Why it is broken."""

    @property
    def is_closed(self) -> bool:
        """Whether this rank takes part no more."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy, which can do nothing."""

    @property
    def is_running(self) -> bool:
        """Whether a call is running at this moment, in some thread of Python's."""

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt in a call of this rank has broken it: the program got that."""

    @property
    def needs_settling(self) -> bool:
        """Whether no call can run before `check_usable`, or at all."""

    @property
    def completed(self) -> int:
        """The number of the last collective that this rank has completed."""

    # --- may a call run ---------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise where this rank has closed the communicator, or is a forked child."""

    def check_open(self) -> None:
        """Raise where no call can ever run again."""

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; settle what an earlier mismatch left to be settled."""

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, where the group has been given up."""

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means."""

    # --- who is still there -----------------------------------------------------------------------

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose process has ended."""

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""

    def gone_ranks(self) -> list[int]:
        """Return the ranks that will never take part again: ended or closed."""

    # --- giving up --------------------------------------------------------------------------------

    def abort(
        self, code: Abort = ..., rank: int | None = None, sequence: int | None = None
    ) -> None:
        """Give the group up for all ranks, unless somebody already has."""

    def break_with(self, code: Abort, rank: int, why: str = "") -> None:
        """Give the group up for all ranks, unless somebody already has; raise.

        Parameters
        ----------
        code : Abort
            What has happened.
        rank : int
            To whom.
        why : str
            What that rank has raised, where it is known here.
        """

    def abort_error(self, waited_s: float | None = None) -> GpucollError:
        """Return the error for why it was given up."""

    def fail(self, error: GpucollError) -> GpucollError:
        """Note why it is broken, and return it: every later call raises that."""

    def end_calls(self) -> bool:
        """Let no call begin, and give up one that runs in another thread; return whether it ended.

        Waits for it for `ENDING_S` at most.
        """

    def agreement(self, timeout_s: float) -> Agreement:
        """Return this rank's part in agreeing who goes on after losses.

        Parameters
        ----------
        timeout_s : float
            How long a rank that lives has for coming.
        """

    # --- what stands on it ------------------------------------------------------------------------

    def enqueued_calls(self) -> EnqueuedCalls:
        """Return this rank's ring of calls on GPU arrays."""

    def started_calls(self) -> StartedCalls:
        """Return the queue in which compiled code runs started calls, made at the first time."""

    def hold(self, n_reasons: int) -> None:
        """Let compiled entries leave every call to Python, while there are reasons for it."""

    def bind_cpus(self) -> None:
        """Bind this process to CPUs of its own, where the ranks share enough of them."""

    def meeting_of(
        self, ranks: Sequence[int], token: str, call: str, tell: Callable[[bytes], list[bytes]]
    ) -> Job:
        """Return the job of this rank and others of the group, who meet anew; every rank calls it.

        Parameters
        ----------
        ranks : sequence of int
            They, in their new order; empty: this rank meets nobody.
        token : str
            The same for all of them, and nobody else's.
        call : str
            What for, for messages.
        tell : callable
            Gives every rank of the group this one's bytes and returns theirs, by rank.
        """

    def describe(self) -> Mapping[str, str]:
        """Return what is worth knowing: name -> sentence."""

    def note_exception(self, error: BaseException) -> None:
        """Keep what takes this rank out of the group, for the others: before `close` or `abort`."""

    def close(self) -> None:
        """Say that this rank takes part no more, and let go of everything shared."""
