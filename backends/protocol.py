"""What a communicator asks of a backend, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.group.protocol import StartedCalls
from gpucoll.transport.shared.layout import SentNumber
from gpucoll.transport.shared.words import Kind
from gpucoll.types import NO_ROOT, Collective, ReduceOp


@dataclass(frozen=True)
class PartOf:
    """The call that a request is a part of: what ranks compare, and errors name, in its place.

    Attributes
    ----------
    collective : Collective
        What the user called.
    op : ReduceOp or None
    dtype : str
        Of the user's array, or the first of a list; empty for objects.
    detail : int
        What else the call is: which compression.
    shape : tuple of int
        What errors show.
    numbers : tuple of int
        On these, too, all ranks must agree.
    """

    collective: Collective
    op: ReduceOp | None
    dtype: str
    detail: int
    shape: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One collective with its buffers.

    Attributes
    ----------
    collective : Collective
        What to do.
    source, destination : Buffer or None
        This rank's input and output; None where it has none.
    op : ReduceOp, optional
        Of a reduction.
    root : int
        Of a rooted collective.
    counts : tuple of int, optional
        Rows of axis 0 per rank, alike on all ranks; of an all_to_all, rows to each rank.
    receive_counts : tuple of int, optional
        Of an all_to_all with counts: rows from each rank.
    row_count : int
        Elements of a row.
    sources, destinations : tuple of Buffer, optional
        Of an input or output of one array for each rank: these, by rank. `source` or `destination`
        then says only what they are together.
    parts : tuple of (Buffer, Buffer), optional
        Of a fused list: each array's input and output, all of one dtype; `source` is the first.
    part_of : PartOf, optional
        The call that this one is a part of.
    keeps : bool
        Of one int64 element: whether the inputs are to be left behind the result, which has room
        for them (`gpucoll.kernels.cpu.keeping`). Ranks may differ in it.
    """

    collective: Collective
    source: Buffer | None
    destination: Buffer | None
    op: ReduceOp | None = None
    root: int = NO_ROOT
    counts: tuple[int, ...] | None = None
    receive_counts: tuple[int, ...] | None = None
    row_count: int = 1
    sources: tuple[Buffer, ...] = ()
    destinations: tuple[Buffer, ...] = ()
    parts: tuple[tuple[Buffer, Buffer], ...] = ()
    part_of: PartOf | None = None
    keeps: bool = False

    @property
    def data(self) -> Buffer:
        """The input, or where there is none the output: for what both have in common."""
        found = self.source or self.destination
        assert found is not None
        return found


@dataclass(eq=False)
class MessageRequest:
    """One send, receive or probe, and what was found.

    Attributes
    ----------
    kind : Kind
        Which.
    peer, tag : int
        To or from whom, and the message's tag; ANY_SOURCE and ANY_TAG except for a send.
    buffer : Buffer, optional
        What is sent, or where it goes; a probe has none.
    number : type, optional
        Of a number that is sent, so that it arrives as one.
    is_misfit : bool
        Whether the message has another size or dtype than the buffer; then it was left.
    found_peer, found_tag, found_bytes, found_dtype, found_shape
        What the message is; the dtype as its number, the shape None where it is not known.
    found_number : SentNumber or None
        Which kind of number was sent; None for an array.
    """

    kind: Kind
    peer: int
    tag: int
    buffer: Buffer | None = None
    number: type | None = None
    is_misfit: bool = False
    found_peer: int = -1
    found_tag: int = -1
    found_bytes: int = 0
    found_dtype: int = -1
    found_shape: tuple[int, ...] | None = ()
    found_number: SentNumber | None = None


class PreparedCall(Protocol):
    """A collective with its host buffers, ready to run as often as wanted."""

    run_once: Callable[[], int]
    """Run it where nothing stands against it; 0, or a status for Python to look at."""

    def run(self, timeout_s: float | None = None) -> None:
        """Do it; raise what went wrong."""

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Start it in the group's queue; return its number, or 0: it must be `run`."""


class HostMessages(Protocol):
    """Moves messages of host buffers between two ranks.

    Attributes
    ----------
    send, receive : callable
        The compiled entries ``(x, peer, tag)`` -> x, or None: not that way.
    """

    send: Callable[..., Any]
    receive: Callable[..., Any]

    @property
    def timeout_s(self) -> float:
        """The default deadline, in seconds."""

    def learn(self, kind: Kind, dtype: Any, name: str) -> None:
        """Make a compiled entry serve arrays of this dtype from now on."""

    def run(
        self,
        requests: Sequence[MessageRequest],
        on_done: Callable[[MessageRequest], None],
        more: Callable[[], Sequence[MessageRequest]] | None,
        due: Callable[[], tuple[int, float | None]],
    ) -> None:
        """Do all of them at once; return when the last is done.

        Parameters
        ----------
        requests : sequence of MessageRequest
            In the order in which they were made.
        on_done : callable
            Called for each when it is done, with what was found filled in.
        more : callable, optional
            Returns requests that have been added meanwhile. Without it nothing is reported before
            all are done.
        due : callable
            Returns since when (``time.monotonic_ns``) and how long, in seconds, the request whose
            deadline comes first may wait; None: the communicator's default.
        """

    def resume(self, requests: Sequence[MessageRequest]) -> None:
        """Go on with requests that a compiled entry has begun, and left to Python."""

    def look(self, request: MessageRequest) -> bool:
        """Probe without waiting; return whether there is such a message, and fill it in."""

    def ring_own_bell(self) -> None:
        """Make a `run` that goes on ask for more."""

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of messages that came and that nobody has received."""

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and tag of messages that lie with ranks which have closed."""


class HostBackend(Protocol):
    """Moves host buffers between the ranks of a group.

    The compiled entries are quick ways that a backend may leave out: one that serves nothing
    returns None from every call.
    """

    last_status: Callable[[], int]
    """Returns the `Status` with which a compiled entry has left a call to Python."""

    @property
    def messages(self) -> HostMessages:
        """What moves messages."""

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective. ArgumentTypeError where the dtype lacks the op."""

    def entry(self, collective: Collective) -> Callable[..., Any]:
        """Return the compiled entry: ``(x, out, op, root, timeout_s)`` -> `out`; None: not so.

        For ALL_REDUCE_LIST it is ``(xs, outs, op, timeout_s)`` of lists.
        """

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return the entry that starts a collective: ``(x, out, op, root)`` -> its number, or None.

        In the group's queue of started calls; None: not that way.
        """

    def learn(self, collective: Collective, kind: ArrayKind, op: Any, root: Any) -> None:
        """Make the compiled entry serve arrays of this kind with these arguments from now on."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in memory that the backend can use without a copy."""

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a context in which every new NumPy array is like one of `empty`."""

    def describe(self) -> Mapping[str, str]:
        """Return what is worth knowing: name -> sentence."""


class HostBackends(Protocol):
    """The module of a backend of host arrays (`gpucoll.backends.load`)."""

    def create(self, group: Any) -> HostBackend:
        """Return the backend for a group: of the kind that it moves arrays for."""
