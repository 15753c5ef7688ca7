"""The protocol of a group of ranks, on which every communicator stands.

`gpucoll.group.host.group.HostGroup` implements it for the ranks of one host around one segment, and
`gpucoll.group.world.group.WorldGroup` for those of several hosts. The modules above use only this
protocol, and nothing of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpucoll.collectives import Collective
from gpucoll.errors import GpucollError
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status

if TYPE_CHECKING:
    from gpucoll.group.survivors import Agreement

ENDING_S = 2.0
"""How long a rank that gives a communicator up waits for threads in its calls.

They notice within 20 ms.
"""


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
    """This rank's calls on GPU arrays, posted for the other ranks to compare."""

    words: Any
    """A view: item `gpucoll.group.host.enqueued.SEQUENCE` is `sequence`, in half the time."""

    @property
    def sequence(self) -> int:
        """The number of the last call that this rank posted."""

    @property
    def compared(self) -> int:
        """The number of the last call that was the same on every rank."""

    @property
    def has_uncompared(self) -> bool:
        """Whether this rank has posted calls that have not been compared on all ranks."""

    @property
    def late_rank(self) -> int:
        """A rank that the last `compare` found late, or -1.

        This rank cannot tell which rank of another host is late. For such a host, it returns a rank
        that has closed the communicator, or else the leader.
        """

    def is_compared(self, sequence: int) -> bool:
        """Return whether this call was the same on every rank."""

    def poster(self, block: CallBlock) -> Callable[[], int]:
        """Return the built-in that posts this call and returns a `Status`; keep the block."""

    def compare(self) -> Status:
        """Compare as far as all ranks have posted; return OK, MORE (a rank is late) or MISMATCH."""

    def note_over(self, sequence: int) -> None:
        """Note, for those that watch the job, that a call is over on the GPU."""

    def note_pending(self, sequence: int, since_ns: int, *, has_begun: bool) -> None:
        """Note, for those that look at the job, the oldest call on the GPU, if it takes long.

        Parameters
        ----------
        sequence : int
            The call's number.
        since_ns : int
            Since when it is the oldest one, by the monotonic clock; 0: no call takes long.
        has_begun : bool
            Whether the stream has reached it.
        """

    def say_failed(self) -> None:
        """Tell the ranks that wait for this rank's GPU that it will not connect."""

    def failed_ranks(self) -> list[int]:
        """Return the ranks that have reported that their GPU will not connect."""


class StartedCalls(Protocol):
    """The queue of started calls: a waiting thread runs them in order, or the process's own thread.

    Each has a number: 1, 2, ...
    """

    wait: Callable[[int], int]
    """``(number)``: runs calls until the one of this number has ended.

    Returns 0 if that call succeeded and this has reaped it. Otherwise it returns 1, and Python has
    to find out more. If a failed call must be settled first, it may return 1 before the call has
    ended. It raises KeyboardInterrupt on Ctrl-C.
    """
    poll: Callable[[int, int], int]
    """``(number, wanted)``: returns whether the call has ended, without waiting for other ranks.

    It finishes calls that need no other rank any more. `wanted`: the thread runs the call from now
    on.
    """
    sleep: Callable[[int, int], int]
    """``(number, ns)``: sleeps until the call has ended, or for `ns`; returns whether it has
    ended."""
    reap: Callable[[int], int]
    """``(number)``: frees the entry of an ended call, once those of all calls before it are free.

    It must not be called before the call's Work has ended, unless nobody runs calls any more.
    """

    def start(self, block: CallBlock, timeout_s: float) -> int:
        """Start a call and return its number; 0: there is no room. Keep the block until its end."""

    def without_room(self) -> int:
        """Return the number of the next call if it found no memory and so has not begun; else 0."""

    def make_room(self, number: int) -> None:
        """Let a call that found no memory run again.

        Raises SharedMemoryError if there still is no memory; the call never runs then.
        """

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
        """Wait, for `ENDING_S` at most, until no thread runs calls; return whether none does.

        The end of the last call is visible a moment before its thread has stopped running calls. A
        call that was given up ends within one slice of waiting.
        """


class Group(Protocol):
    """This rank's part in a group of ranks.

    Attributes
    ----------
    rank, world_size : int
        This rank, and the number of ranks.
    timeout_s : float
        Default deadline of every wait, in seconds.
    keeps_order : bool
        Whether all reductions combine the ranks in the order 0 to P-1, whatever that costs; the
        same on every rank.
    was_told : bool
        Whether `failure` has been raised to the program.
    is_in_use : bool
        Whether a thread that cannot be ended may still look at what is shared.
    over_mpi : MpiRanks or None
        The ranks as MPI knows them, if arrays go through it (`gpucoll.backends.mpi.ranks`).
    n_founders : int
        How many ranks the communicator had before it grew; 0: it has not grown.
    object_key : bytes or None
        Key of the tags of objects (`gpucoll.calls.object_tags`); None: nobody can alter them.
    """

    rank: int
    world_size: int
    timeout_s: float
    keeps_order: bool
    was_told: bool
    is_in_use: bool
    n_founders: int
    over_mpi: Any

    @property
    def object_key(self) -> bytes | None:
        """See above."""

    @property
    def number(self) -> int:
        """The number of the last collective that this rank has begun; the same on every rank."""

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
        """The error that broke the group; None: it is not broken."""

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy, which cannot be used."""

    @property
    def is_running(self) -> bool:
        """Whether a Python thread is running a call at this moment."""

    @property
    def is_in_collective(self) -> bool:
        """Whether compiled code is running a collective at this moment, in whatever thread."""

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt in this rank's call has broken it, so that the program knows."""

    @property
    def needs_settling(self) -> bool:
        """Whether no call can run until `check_usable` has settled something, or ever again."""

    @property
    def completed(self) -> int:
        """The number of the last collective that this rank has completed."""

    # --- may a call run ---------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise if this rank has closed the communicator, or is a forked child."""

    def check_open(self) -> None:
        """Raise if no call can ever run again."""

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; first settle what an earlier mismatch has left open."""

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, if the group has been given up."""

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
        """Give the group up for all ranks, unless a rank already has."""

    def break_with(self, code: Abort, rank: int, why: str = "") -> None:
        """Give the group up for all ranks, unless a rank already has; raise the error.

        Parameters
        ----------
        code : Abort
            What has happened.
        rank : int
            The rank to which it has happened.
        why : str
            The exception that the rank has raised, if it is known here.
        """

    def abort_error(self, waited_s: float | None = None) -> GpucollError:
        """Return the error for why it was given up."""

    def fail(self, error: GpucollError) -> GpucollError:
        """Store the error that broke the group, and return it; later calls raise it."""

    def end_calls(self) -> bool:
        """Let no call begin, give up one that runs in another thread; return whether it has ended.

        It waits for the running call for `ENDING_S` at most.
        """

    def agreement(self, timeout_s: float) -> Agreement:
        """Return this rank's part in the agreement on the survivors after losses.

        Parameters
        ----------
        timeout_s : float
            How long the others wait for a rank that is alive.
        """

    def settle_growth(self, number: int, made: bool) -> bool:
        """Decide, once for all ranks of this host, whether a growth is made; return which it is.

        Parameters
        ----------
        number : int
            The number of the attempt: 1, 2, ...; all earlier ones are over on every rank.
        made : bool
            The decision, unless another rank has decided already.
        """

    # --- what stands on it ------------------------------------------------------------------------

    def enqueued_calls(self) -> EnqueuedCalls:
        """Return this rank's ring of calls on GPU arrays."""

    def started_calls(self) -> StartedCalls:
        """Return the queue in which compiled code runs started calls; the first call makes it."""

    def hold(self, n_reasons: int) -> None:
        """Make compiled entries leave every call to Python while `n_reasons` is not 0."""

    def bind_cpus(self) -> None:
        """Bind this process to CPUs of its own, if the ranks share enough of them."""

    def meeting_of(
        self, ranks: Sequence[int], token: str, call: str, tell: Callable[[bytes], list[bytes]]
    ) -> Job:
        """Return the job in which this rank and others of the group meet anew; every rank calls it.

        Parameters
        ----------
        ranks : sequence of int
            The ranks that meet, in their new order; empty: this rank meets nobody.
        token : str
            A token that all of them pass, and no other rank.
        call : str
            The call in which they meet, for messages.
        tell : callable
            Sends this rank's bytes to every rank of the group; returns all ranks' bytes, by rank.
        """

    def describe(self) -> Mapping[str, str]:
        """Return facts about the group for people to read: name -> sentence."""

    def note_exception(self, error: BaseException) -> None:
        """Store the exception that takes this rank out of the group, for the others to read.

        It must be called before `close` or `abort`.
        """

    def close(self) -> None:
        """Report that this rank leaves the group, and release everything shared."""
