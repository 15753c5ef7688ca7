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
    root : int or None
        What its user gave, where the part has another; None: the same.
    counts : tuple of int
        What its user gave, where `root` is not None.
    """

    collective: Collective
    op: ReduceOp | None
    dtype: str
    detail: int
    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    root: int | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compressed:
    """What travels in place of an all_reduce's numbers: `gpucoll.compression.options`.

    Attributes
    ----------
    name : str
        As the user calls it.
    wire_format : str
        As the kernels call it.
    seed : int or None
        Of stochastic rounding.
    residuals : tuple of Buffer
        One for each array, float32; or none.
    """

    name: str
    wire_format: str
    seed: int | None = None
    residuals: tuple[Buffer, ...] = ()


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
    compressed : Compressed, optional
        Of a compressed all_reduce of GPU arrays, which are its `parts`.
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
    compressed: Compressed | None = None

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
        Which. A TAKE is a receive that is told neither size nor dtype: it gets a message that is
        `held`, whose data a RECV of it receives then.
    peer, tag : int
        To or from whom, and the message's tag; ANY_SOURCE and ANY_TAG except for a send.
    buffer : Buffer, optional
        What is sent, or where it goes; a probe and a TAKE have none.
    number : type, optional
        Of a number that is sent, so that it arrives as one.
    mode : int
        Of a send, see `Mode`.
    description : bytes or bytearray, optional
        Of a send: what tells the receiver of a dtype that has no number. Of a probe: room for it.
    place : int
        Of a receive: which of all messages of that rank it asks for, and no tag; 0: by tag.
    held : int
        The message that was taken for this receive; 0: none.
    error : Exception or None
        Why it has failed; no message was moved.
    is_misfit : bool
        Whether the message is larger than the buffer, or of another dtype; then it was left.
    is_gone : bool
        Whether the message that was asked for by its place was received by another.
    expired_ns : int
        Its own deadline, where no message had matched by then and it was withdrawn; else 0.
    found_peer, found_tag, found_bytes, found_dtype, found_shape
        What the message is; the dtype as its number, the shape None where it is not known.
    found_place : int
        Which of all messages of that rank it is.
    found_number : SentNumber or None
        Which kind of number was sent; None for an array.
    found_description : bytes
        Of a TAKE or a probe: as it was sent; empty for most.
    """

    kind: Kind
    peer: int
    tag: int
    buffer: Buffer | None = None
    number: type | None = None
    mode: int = 0
    description: bytes | bytearray | None = None
    place: int = 0
    held: int = 0
    error: Exception | None = None
    is_misfit: bool = False
    is_gone: bool = False
    expired_ns: int = 0
    found_peer: int = -1
    found_tag: int = -1
    found_bytes: int = 0
    found_dtype: int = -1
    found_shape: tuple[int, ...] | None = ()
    found_place: int = 0
    found_number: SentNumber | None = None
    found_description: bytes = b""


class Transfers(Protocol):
    """Requests that were begun together.

    Attributes
    ----------
    requests : list of MessageRequest
        What they are.
    """

    requests: list[MessageRequest]

    def is_over(self) -> bool:
        """Return whether all of them are over, without looking whether they can be now."""

    def look(self) -> bool:
        """Take all pending messages a step further; return whether these are over."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all of them are over, or for so long; return whether they are."""

    def settle(self) -> None:
        """Write what became of them into the requests, once they are over."""

    def withdraw(self) -> bool:
        """Take the one request back; False where it is over, or another rank may see it."""


class PreparedCall(Protocol):
    """A collective with its host buffers, ready to run as often as wanted."""

    @property
    def run_once(self) -> Callable[[], int]:
        """Run it where nothing stands against it; 0, or a status for Python to look at."""

    def run(self, timeout_s: float | None = None) -> None:
        """Do it; raise what went wrong."""

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Start it in the group's queue; return its number, or 0: it must be `run`."""


class HostMessages(Protocol):
    """Moves messages of host buffers between two ranks.

    All that are pending make progress whenever one is begun, waited for or looked at, beside
    collectives and in whatever thread.

    Attributes
    ----------
    send, receive : callable
        The compiled entries ``(x, peer, tag, timeout_s)`` -> x, or ``(x, dest, source, out, tag,
        timeout_s)`` -> out. Where a message has failed they return its rows, for `ended_together`;
        None: not that way, and nothing was begun, or the communicator is broken.
    """

    send: Callable[..., Any]
    receive: Callable[..., Any]
    begin_send: Callable[..., Any]
    begin_receive: Callable[..., Any]
    """``(x, peer, tag)``: returns what the message is known by here, its row; x where that was sent
    already; None: not that way. The arrays are kept alive until one of the next two."""
    wait_begun: Callable[[bytearray], int]
    """``(row,)``: returns a `Status`: 0 where it has ended well."""
    let_go_begun: Callable[[bytearray], None]
    """``(row,)`` of one that is over, or whose communicator is."""
    receive_row: Callable[..., bytearray | None]
    """``(x, source, tag, timeout_s)``: receives into x; returns the row, which is over: for
    `plain_array` and `ended`. None as above."""
    take: Callable[..., bytearray | None]
    """``(source, tag, timeout_s)``: takes a message, whatever it is; returns the row as above."""
    find: Callable[..., bytearray | None]
    """``(source, tag, timeout_s)``: finds a message, which stays; returns the row as above."""

    def begun(self, row: bytearray) -> Transfers:
        """Return a message that an entry has begun, for whoever does more than wait for it."""

    def receive_taken(self, row: bytearray, code: int | None = None) -> Any:
        """Receive what `take` has taken into a new NumPy array; None: see `ended`.

        With `code` as bytes, if it is what that number of a dtype stands for.
        """

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return source, tag, dtype's number, shape, size in bytes and place of what was found.

        None where it is no array of a dtype that has a number, or not found yet.
        """

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of what was received."""

    def ended(self, row: bytearray) -> MessageRequest:
        """Return a row that is over as a request, with what it has found or how it has failed."""

    def ended_together(self, rows: bytearray) -> list[MessageRequest]:
        """Return the rows of one call of an entry in the same way."""

    def learn(self, kind: Kind, dtype: Any, name: str, description: bytes | None) -> None:
        """Make a compiled entry serve arrays of this dtype from now on."""

    def hold(self, is_held: bool) -> None:
        """Keep the compiled entries from running calls at once, or let them again."""

    def start(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> Transfers:
        """Begin requests, in this order and behind all that were begun before."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for a blocking call; StateError where another thread is in one."""

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Begin requests and wait until all are over; within a turn, or as the rest of a call."""

    def probe(self, request: MessageRequest) -> bool:
        """Probe without waiting; return whether there is such a message, and fill it in."""

    def let_go(self, request: MessageRequest) -> None:
        """Give a held message up that nobody will receive."""

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], object]:
        """Return what sends or receives the same memory again and again, and says a `Status`.

        And what has to be kept with it.
        """

    def end(self) -> None:
        """Let go of everything: whatever is pending will never be over."""

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of messages that came and that nobody has received."""

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and number of messages that lie with ranks which have closed."""


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

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry: ``(x, out, op, root, timeout_s)`` -> `out`; None: not so.

        For ALL_REDUCE_LIST it is ``(xs, outs, op, timeout_s)`` of lists. One `of_blocks` serves the
        same collective with counts and with lists of blocks, and takes two arguments more:
        ``counts, receive_counts``.
        """

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return the entry that starts a collective: ``(x, out, op, root)`` -> its number, or None.

        In the group's queue of started calls; None: not that way.
        """

    def learn(
        self,
        collective: Collective,
        kind: ArrayKind,
        op: Any,
        root: Any,
        *,
        of_blocks: bool = False,
    ) -> None:
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
