"""Jobs over several hosts: each host's gpucoll-run starts the ranks of that host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpucoll import config
from gpucoll.errors import GpucollError

if TYPE_CHECKING:
    from gpucoll.rendezvous.meeting_points import MeetingPoint

__all__ = ["NodesError", "Span", "find_span", "rank_counts"]

_SECRET = (
    "ranks on several hosts need a shared secret for the job, and none is set. In one terminal: "
    f"export {config.SECRET}=$(python3 -c 'import secrets; print(secrets.token_hex(32))'), and "
    f"export the same value in each of the others; or set {config.SECRET_FILE} to a file of mode "
    "600 that contains it"
)


class NodesError(ValueError):
    """Options contradict each other or are incomplete; the message is the line to print."""


class Span(NamedTuple):
    """The ranks of a job over several hosts that are started here."""

    first: int
    """The lowest rank; the others follow without gaps."""
    world_size: int
    meet: str
    """The meeting point, as the value of ``GPUCOLL_MEET``."""


def rank_counts(text: str) -> list[int]:
    """Parse the numbers of ``-n``: one for each host, or one for all hosts."""
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and int(word[:9]) > 0 for word in words):
        raise ValueError(text)
    return [int(word) for word in words]


def find_span(
    counts: list[int], nodes: int | None, node_rank: int | None, meet: str | None
) -> tuple[int, Span | None]:
    """Return how many ranks to start here and, for a job over several hosts, which ones.

    Parameters
    ----------
    counts : list of int
        The number of ranks of each node, or a single number for every node.
    nodes, node_rank, meet
        The values from the command line; None if not given.

    Raises
    ------
    NodesError
        The options contradict each other, or the job could not begin.
    """
    n_nodes = nodes or len(counts)
    if len(counts) not in (1, n_nodes):
        listed = ",".join(map(str, counts))
        raise NodesError(f"-n {listed} has {len(counts)} numbers, but --nodes is {n_nodes}")
    if n_nodes == 1:
        if node_rank or (meet is not None and nodes is None):
            option = f"--node-rank {node_rank}" if node_rank else "--meet"
            raise NodesError(
                f"{option} is for jobs over several hosts: add --nodes with their number"
            )
        return counts[0], None
    if node_rank is None:
        raise NodesError(
            f"{n_nodes} nodes need --node-rank: 0 on the host of rank 0, and 1 to {n_nodes - 1} "
            "on the others"
        )
    if not 0 <= node_rank < n_nodes:
        raise NodesError(f"--node-rank must be in 0..{n_nodes - 1}; got {node_rank}")
    each = counts * n_nodes if len(counts) == 1 else counts
    point = _meeting_point(meet)
    try:
        _check_secret(point)
        if node_rank == 0:
            point.listen_at()
    except GpucollError as error:
        raise NodesError(str(error)) from None
    return each[node_rank], Span(sum(each[:node_rank]), sum(each), point.text)


def _meeting_point(meet: str | None) -> MeetingPoint:
    from gpucoll.rendezvous.meet_argument import parse_meet

    text = config.variable(config.MEET) if meet is None else meet
    if not text:
        raise NodesError(
            "several nodes need --meet HOST:PORT, the same on each: HOST is an address of the "
            "host with --node-rank 0, PORT a free port there"
        )
    try:
        return parse_meet(text, where=config.MEET if meet is None else "--meet")
    except GpucollError as error:
        raise NodesError(str(error)) from None


def _check_secret(point: MeetingPoint) -> None:
    from gpucoll.transport.tcp.secret import job_secret

    # A file that only this user can read contains a secret of its own.
    if job_secret() is None and not point.text.startswith("file:"):
        raise NodesError(_SECRET)
