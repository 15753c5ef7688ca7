"""The interfaces between a communicator and the backends that move its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from gpucoll.algorithms.shares import edges_of
from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.buffer import Buffer
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import BackendUnavailableError
from gpucoll.group.protocol import StartedCalls
from gpucoll.transport.shared.layout import SentNumber
from gpucoll.transport.shared.words import Kind, Status
from gpucoll.types import ReduceOp

if TYPE_CHECKING:
    from gpucoll.compression import Compression

T = TypeVar("T")
ObjectEntry: TypeAlias = "Callable[[bytes | None], bytes | int]"
"""Gives and takes small pickles in compiled code; returns a `Status` if it has not."""


def row_of(table: Mapping[Collective, T], collective: Collective, backend: str) -> T:
    """Return what a backend's table has for a collective.

    Raises
    ------
    BackendUnavailableError
        It has nothing, on all ranks alike: the backend does not do this collective.
    """
    if (found := table.get(collective)) is None:
        raise BackendUnavailableError(f"{collective.spelled} is not available {backend}")
    return found


class PartOf(NamedTuple):
    """The user's call that a request is a part of.

    The ranks compare this call instead of the request, and errors name it.

    Attributes
    ----------
    collective : Collective
        What the user called.
    op : ReduceOp or None
        The reduce op of that call.
    dtype : str
        The dtype of the user's array, or of the first one in a list; empty for objects.
    detail : int
        A further property that the ranks compare, such as the number of the compression.
    shape : tuple of int
        The shape that errors show.
    numbers : tuple of int
        Further numbers that must be equal on all ranks.
    root : int or None
        The root that the user gave, if the request has another one; else None.
    counts : tuple of int
        The counts that the user gave; used only if `root` is not None.
    """

    collective: Collective
    op: ReduceOp | None
    dtype: str
    detail: int
    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    root: int | None = None
    counts: tuple[int, ...] = ()


class Request(NamedTuple):
    """One collective with its buffers.

    Attributes
    ----------
    collective : Collective
        What to do.
    source, destination : Buffer or None
        This rank's input and output; None if it has none.
    op : ReduceOp, optional
        For a reduction: how values are combined.
    root : int
        For a rooted collective: its root.
    counts : tuple of int, optional
        Number of rows of each rank along axis 0, equal on all ranks; for an all_to_all, the number
        of rows to send to each rank.
    receive_counts : tuple of int, optional
        For an all_to_all with counts: the number of rows that come from each rank.
    row_count : int
        Number of elements in a row.
    sources, destinations : tuple of Buffer, optional
        For an input or output that consists of one array per rank: these arrays, by rank. `source`
        or `destination` then only describes all of them together.
    parts : tuple of (Buffer, Buffer), optional
        For a fused list: input and output of each array, all of one dtype; `source` is the first
        input.
    part_of : PartOf, optional
        The call that this one is a part of.
    keeps : bool
        For a request of one int64 element: whether to store the inputs behind the result, which has
        room for them (`gpucoll.kernels.cpu.keeping`). Ranks may differ in it.
    compression : Compression, optional
        For a compressed all_reduce: what it sends in place of its float32 values. Its arrays are
        its `parts`.
    residuals : tuple of Buffer, optional
        For a compressed all_reduce that keeps residuals: a float32 buffer for each array.
    label : int
        A number that all ranks must have given, as for `gpucoll.entries.native.Site`; 0: none.
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
    compression: Compression | None = None
    residuals: tuple[Buffer, ...] = ()
    label: int = 0

    @property
    def data(self) -> Buffer:
        """Return the input, or the output if there is no input: for what both have in common."""
        found = self.source or self.destination
        assert found is not None
        return found

    @property
    def pairs(self) -> Sequence[tuple[Buffer, Buffer | None]]:
        """Return input and output of each array of a list, or of the only array."""
        return self.parts or ((self.data, self.destination),)

    @property
    def both(self) -> tuple[Buffer, Buffer]:
        """Return input and output, in a call in which every rank has both."""
        assert self.source is not None
        assert self.destination is not None
        return self.source, self.destination

    def edges(self, block_bytes: int, world_size: int) -> list[int]:
        """Return the edges of the ranks' blocks in bytes; their size is given without counts."""
        if self.counts is None:
            return edges_of([block_bytes] * world_size)
        row_bytes = self.row_count * self.data.item_bytes
        return edges_of([row_bytes * count for count in self.counts])


@dataclass(eq=False)
class MessageRequest:
    """One send, receive or probe, and the message that it found.

    Attributes
    ----------
    kind : Kind
        Which of these it is. A TAKE is a receive that gives neither size nor dtype: it reserves a
        message, which then is `held`, and a RECV of that message fetches the data.
    peer, tag : int
        The other rank and the message's tag. Anything but a send may give ANY_SOURCE and ANY_TAG.
    buffer : Buffer, optional
        The data to send, or the memory for it. A probe and a TAKE have none.
    number : type, optional
        For a number that is sent: its type, so that it arrives as a number.
    mode : int
        For a send: see `Mode`.
    description : bytes or bytearray, optional
        For a send: describes a dtype that has no number. For a probe: room for such a description.
    place : int
        For a receive: the place of the message among all messages of its sender; the tag is then
        ignored. 0: receive by tag.
    held : int
        The message that a TAKE reserved for this receive; 0: none.
    error : Exception or None
        Why the request failed; no message was moved.
    is_misfit : bool
        Whether the message was larger than the buffer or of another dtype, and was therefore left.
    is_gone : bool
        Whether another receive took the message that `place` asked for.
    expired_ns : int
        The request's own timeout, if no message matched in time and the request was withdrawn; else
        0.
    found_peer, found_tag, found_bytes, found_dtype, found_shape
        The message's envelope: the dtype as its number; the shape is None if it is not known.
    found_place : int
        The place of the message among all messages of its sender.
    found_number : SentNumber or None
        The kind of number that was sent; None for an array.
    found_description : bytes
        For a TAKE or a probe: the description that the sender gave; empty for most messages.
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
    """Requests that were started together.

    Attributes
    ----------
    requests : list of MessageRequest
        The requests, in the order in which they were started.
    """

    requests: list[MessageRequest]

    def is_over(self) -> bool:
        """Return whether all of them are over, without trying to make progress."""

    def look(self) -> bool:
        """Take all pending messages a step further; return whether these requests are over."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all of them are over, or `timeout_s` has passed; return whether they are."""

    def settle(self) -> None:
        """Write the outcome into the requests; they must be over."""

    def withdraw(self) -> bool:
        """Withdraw the only request; return False if it is over or another rank may see it."""


class PreparedCall(Protocol):
    """A collective with its host buffers, ready to run any number of times."""

    @property
    def run_once(self) -> Callable[[], int]:
        """Run the call if nothing prevents it; return 0, or a status that Python must handle."""

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Start the call in the group's queue; return its number, or 0 if it must be `run`."""


def not_run() -> int:
    """Return `Status.NOT_RUN`."""
    return int(Status.NOT_RUN)


class NotStarted:
    """A prepared call that no queue of compiled calls takes."""

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Return 0: a Python thread runs a started call, or the thread that waits for it."""
        return 0


class RunByPython(NotStarted):
    """A prepared call in the middle of which Python has a part."""

    def run_once(self) -> int:
        """Return `Status.NOT_RUN`: the call has to be `run`."""
        return not_run()


class HostMessages(Protocol):
    """Moves messages of host buffers between two ranks.

    Whenever a message is started, waited for or looked at, all pending messages make progress, in
    whatever thread that is. Messages and collectives may be under way at the same time.

    Attributes
    ----------
    send, receive : callable
        The compiled entries ``(x, peer, tag, timeout_s)`` -> x, and ``(x, dest, source, out, tag,
        timeout_s)`` -> out. If a message has failed, they return its rows, for `ended_together`.
        They return None if nothing was started, because the entry does not serve this call or the
        communicator is broken.
    """

    send: Callable[..., Any]
    receive: Callable[..., Any]
    begin_send: Callable[..., Any]
    begin_receive: Callable[..., Any]
    """``(x, peer, tag)``: returns the row by which the message is known here; x if it was sent
    already; None if the entry does not serve this call. The arrays are kept alive until one of the
    next two entries is called."""
    wait_begun: Callable[[bytearray], int]
    """``(row,)``: returns a `Status`, which is 0 if the message succeeded."""
    let_go_begun: Callable[[bytearray], None]
    """``(row,)``: releases a message that is over, or whose communicator is closed."""
    receive_row: Callable[..., bytearray | None]
    """``(x, source, tag, timeout_s)``: receives into x; returns the row, which is over, for
    `plain_array` and `ended`; None as for `send`."""
    take: Callable[..., bytearray | None]
    """``(source, tag, timeout_s)``: reserves any message that matches; returns the row as above."""
    find: Callable[..., bytearray | None]
    """``(source, tag, timeout_s)``: finds a message and leaves it; returns the row as above."""

    def begun(self, row: bytearray) -> Transfers:
        """Return a message that an entry has started, for uses other than waiting for it."""

    def receive_taken(self, row: bytearray, code: int | None = None) -> Any:
        """Receive the message that `take` reserved into a new NumPy array.

        Returns None if that is not possible: see `ended`. With `code`, a dtype's number, receives
        the message as bytes if its dtype has that number.
        """

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return source, tag, dtype's number, shape, size in bytes and place of the found message.

        Returns None if nothing was found yet, or the message is no array of a dtype with a number.
        """

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of the received message."""

    def ended(self, row: bytearray) -> MessageRequest:
        """Return a row that is over as a request, with the message that it found or its error."""

    def ended_together(self, rows: bytearray) -> list[MessageRequest]:
        """Return the rows of one call of an entry, all over, as such requests."""

    def learn(self, kind: Kind, dtype: Any, name: str, description: bytes | None) -> None:
        """Make a compiled entry serve arrays of this dtype from now on."""

    def hold(self, is_held: bool) -> None:
        """Stop the compiled entries from running calls immediately, or allow it again."""

    def start(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> Transfers:
        """Start requests, in this order, after all that were started before."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for a blocking call; StateError if another thread is in one."""

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Start requests and wait until all are over; within a turn, or as the rest of a call."""

    def probe(self, request: MessageRequest) -> bool:
        """Probe without waiting; fill in the request and return whether a message matches."""

    def let_go(self, request: MessageRequest) -> None:
        """Release a held message that will not be received by this request."""

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], object]:
        """Return a function that sends or receives the same memory at every call.

        The function returns a `Status`. The second value is an object that must be kept with it.
        """

    def end(self) -> None:
        """Release everything; pending messages will never be over."""

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of the messages that arrived and were not received."""

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and number of the messages that wait at ranks which have closed."""


class HostBackend(Protocol):
    """Moves host buffers between the ranks of a group.

    The compiled entries are fast paths that a backend may omit: an entry that serves nothing
    returns None from every call.
    """

    last_status: Callable[[], int]
    """Returns the `Status` with which a compiled entry left its last call to Python."""

    @property
    def messages(self) -> HostMessages:
        """Moves the messages."""

    def prepare(self, request: Request) -> PreparedCall:
        """Prepare a collective; raise ArgumentTypeError if the dtype lacks the op."""

    def entry(self, collective: Collective, *, of_blocks: bool = False) -> Callable[..., Any]:
        """Return the compiled entry ``(x, out, op, root, timeout_s)`` -> `out`.

        The entry returns None for a call that it does not serve. For ALL_REDUCE_LIST it takes
        lists: ``(xs, outs, op, timeout_s)``. With `of_blocks` the entry serves the same collective
        with counts and with lists of blocks, and takes two more arguments: ``counts,
        receive_counts``.
        """

    def starter(self, collective: Collective) -> Callable[..., Any]:
        """Return the entry that starts a collective: ``(x, out, op, root)`` -> its number, or None.

        The call goes into the group's queue of started calls. None: the entry does not serve it.
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

    def native_table(self, collective: Collective) -> int:
        """Return the address of the entry's table, for `gpucoll.entries.native`.

        0: there is none, and Python makes every call.
        """

    def object_entry(self, request: Request) -> ObjectEntry | None:
        """Return the compiled entry of an object collective's first round, which is a request.

        It is `gpucoll.entries.objects.object_entry`, for this root and these arrays. None: there is
        no such entry.
        """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in memory that the backend can use without a copy."""

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a context in which every new NumPy array lies in memory like that of `empty`."""

    def describe(self) -> Mapping[str, str]:
        """Return facts about this backend for the user: name -> sentence."""


class HostBackends(Protocol):
    """The module of a backend of host arrays (`gpucoll.backends.load`)."""

    def create(self, group: Any) -> HostBackend:
        """Return the backend for a group, which moves the kind of arrays of this module."""
