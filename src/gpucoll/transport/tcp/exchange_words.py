"""The words of small calls between hosts, by number, for Python and the compiled loops.

Leaders send one message for each step. It is a header of `MESSAGE_WORDS`, followed by one part for
each host whose part the sender has. A part is a header (`Part`) and the inputs of that
host's ranks, one after the other, padded to whole words.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.codes import Codes

MAGIC = int.from_bytes(b"gpusmal\x01", "little")
"""First word of a message; its last byte is the version of the protocol on the connection."""
MESSAGE_WORDS = 4
"""Magic, number of the call, step, bytes that follow."""


class Route(Codes):
    """How the data of a call goes between hosts."""

    SMALL = 0
    """All of it goes to every host, in one exchange."""
    PAIRWISE = 1
    """After an exchange without data, each leader sends each other one what that one needs."""
    LARGE = 2
    """Other code moves it."""


class PartKind(Codes):
    """What a host brings to an exchange."""

    DATA = 0
    """The inputs of its ranks, in the sizes that its call gives."""
    NOTHING = 1
    """No data: it only finds out whether all hosts make the same call."""
    FURTHER = 2
    """No data here: its data goes by another exchange, over the links."""


class Outcome(Codes):
    """How the exchange of a call ended."""

    NONE = 0
    """The call has no exchange, or none yet."""
    AGREED = 1
    """All hosts have made the same call, and everything is here."""
    DIFFERS = 2
    """They have not, or some data goes another way: an exchange over the links must follow."""
    AGAIN = 3
    """The slice is over; go on."""
    GONE = 4
    """A connection has ended."""
    ABORTED = 5
    DEADLINE = 6
    GARBLED = 7
    """The received bytes are not a message of this call."""


class Part(Block):
    """The header of a part."""

    digest: int
    """Digest of the call's signature."""
    kind: int
    """A `PartKind`."""
    data_bytes: int
    owner: int
    """See `exchange.owner_of`."""


class Step(Block):
    """One step of an exchange. If other code carries it, ranks are in place of descriptors."""

    to: int
    """Descriptor to send on."""
    origin: int
    """Descriptor to receive from."""
    n_parts: int


class Peer(Block):
    """The messages of a pairwise call to and from another leader.

    Attributes
    ----------
    share, share_start : int
        Size of that host's share of every input, and where it begins.
    fd : int
        Descriptor of the connection.
    sent, came : int
        How many bytes of the two messages were sent and received.
    to_send, to_come : int
        Their sizes, with the headers.
    pieces_end, pieces_come : int
        Where in them the pieces of inputs end.
    piece_bytes : int
        Size of each piece to send; it begins in an input where the share does.
    landing, part : int
        Addresses: where the pieces land, and what that leader passes on.
    sent_header, came_header : int
        The headers.
    """

    share: int
    share_start: int
    fd: int
    sent: int
    came: int
    to_send: int
    to_come: int
    pieces_end: int
    pieces_come: int
    piece_bytes: int
    landing: int
    part: int
    sent_header: Field[Words] = words(4)
    came_header: Field[Words] = words(4)


class Exchange(Block):
    """The words of a rank in a group on several hosts.

    Attributes
    ----------
    here, n_hosts : int
        This host, and the number of hosts.
    rank, world_size : int
        This rank, and the number of ranks.
    edges : int
        Address of n_hosts + 1 numbers: how many ranks there are on the hosts before each.
    order : int
        Address of all ranks, host by host.
    most_bytes : int
        Calls with more data than this, of all ranks together, are not small.
    least_pairwise_bytes : int
        The same limit for calls in which an exchange sends more than hosts need.
    most_pairwise_bytes : int
        Calls with more data of a host than this are not pairwise. 0: none is pairwise.
    is_in_order : int
        Whether each host's ranks are consecutive.
    large : int
        Address of the loop that runs large calls, once all hosts have agreed on them; 0: Python
        does.
    route : int
        The `Route` of this call.
    number : int
        Number of the last call, counted alike on all ranks.
    completed : int
        Number of the last call that has succeeded here.
    entered : int
        Address at which the other ranks of this host read `number`.
    n_closed : int
        Address of a word that is not 0 once a rank has closed the communicator.
    may_run : int
        Whether Python has checked, before this call, which ranks have closed.
    bell_fd : int
        Descriptor that wakes the thread of this host's leader.
    abort : int
        Address of this host's abort word.
    is_open : int
        Whether this leader's connections are open.
    go_on, carrier : int
        If other code than connections carries exchanges: address of the function that goes on with
        an exchange until a given time and returns its `Outcome`, and of further data for it. 0:
        there is none.
    steps, n_steps : int
        Address and number of the exchange's steps.
    held, held_bytes, capacity : int
        Address of the parts that are here (this host's, then those of the hosts before it,
        backwards), their bytes, and the room for them in bytes.
    digest, kind : int
        Digest and kind of this host's part.
    step, sent, came : int
        The current step, and how many bytes of its two messages were sent and received.
    comes : int
        How many bytes are expected after the header of the message to receive.
    outcome, link, errno : int
        How the exchange of the last call ended; with which host, and the errno.
    start_ns : int
        When the call began.
    sent_header, came_header, message, vectors, poll_fds, clock, one : int
        Arguments of system calls.
    parts : int
        Address of the addresses of each host's data, by host; then the bytes that each is to bring.
    inputs : int
        Address of the addresses of each rank's input, by rank; then one more word, for the kernel's
        output.
    peers, peer_polls : int
        Addresses of each other leader's `Peer`, by host, and of as many words for `poll`.
    room : int
        Address of memory for pairwise calls.
    result, result_bytes : int
        What the leader brings to the ranks of its host: the result that a pairwise call makes for
        them, or the parts that are here.
    first_input : int
        In a pairwise call: address of the input of this host's first rank.
    further_inputs, input_bytes : int
        Address of the inputs of all its ranks, of which the first may be missing, and the size of
        each.
    part : int
        Address of what this host makes of its share.
    is_shared : int
        Whether the shares of a pairwise call are on their way.
    made_bytes : int
        How much of this host's share can be passed on.
    root_host : int
        The host of this call's root; -1 if it has none.
    """

    here: int
    n_hosts: int
    rank: int
    world_size: int
    edges: Field[Words]
    order: Field[Words]
    most_bytes: int
    number: int
    entered: int
    n_closed: int
    may_run: int
    bell_fd: int
    abort: int
    is_open: int
    steps: int
    n_steps: int
    held: int
    held_bytes: int
    capacity: int
    digest: int
    kind: int
    step: int
    sent: int
    came: int
    comes: int
    outcome: int
    link: int
    errno: int
    start_ns: int
    parts: Field[Words]
    inputs: Field[Words]
    one: int
    sent_header: Field[Words] = words(4)
    came_header: Field[Words] = words(4)
    message: Field[Words] = words(8)
    vectors: Field[Words] = words(4)
    poll_fds: Field[Words] = words(2)
    clock: Field[Words] = words(2)
    completed: int
    large: int
    route: int
    go_on: int
    carrier: int
    least_pairwise_bytes: int
    most_pairwise_bytes: int
    is_in_order: int
    peers: Field[Peer]
    peer_polls: Field[Words]
    room: int
    result: int
    result_bytes: int
    first_input: int
    further_inputs: int
    input_bytes: int
    part: int
    is_shared: int
    made_bytes: int
    root_host: int
