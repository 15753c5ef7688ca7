"""A second group of the same ranks, with the CPU backend, for the host's part of GPU calls.

If the communicator's host arrays go through MPI, the second group uses MPI, too. So the user's own
calls on host arrays are independent of it, and so is their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from gpucoll import backends
from gpucoll.backends.choice import MPI
from gpucoll.backends.protocol import HostBackend
from gpucoll.collectives import Collective
from gpucoll.errors import BackendError, GpucollError
from gpucoll.group.division import Division
from gpucoll.group.joining import Policy, join
from gpucoll.group.protocol import Channel, Group

NEVER_S = 1e8
"""Deadline of its calls: the deadlines of the GPU calls are watched where these are issued."""


class Inner:
    """A group with its backend for host arrays.

    Attributes
    ----------
    group : Group
    channel : Channel
        The channel on which its ranks agree before calls are made.
    backend : HostBackend
    """

    def __init__(self, group: Group, channel: Channel, backend: HostBackend) -> None:
        self.group = group
        self.channel = channel
        self.backend = backend

    @property
    def is_given_up(self) -> bool:
        """Whether requests were left to MPI, which may still read or write their memory."""
        return self.group.over_mpi is not None and bool(self.group.over_mpi.is_given_up)

    def abort(self) -> None:
        """End everything that any rank waits for in this group."""
        if not self.group.is_closed:
            self.group.abort()

    def close(self) -> None:
        """Release it; no rank is in a call."""
        self.backend.messages.end()
        self.group.close()


def tell(channel: Channel, timeout_s: float | None) -> Callable[[bytes], list[bytes]]:
    """Return a function that distributes this rank's bytes and returns those of all ranks."""
    return lambda data: channel.all_gather_bytes(data, Collective.CONNECT, timeout_s=timeout_s)


def meet(
    group: Group, channel: Channel, ranks: Sequence[int], token: str, timeout_s: float | None
) -> Inner | None:
    """Return a group of some ranks of another group; every rank of that group calls it.

    Parameters
    ----------
    ranks : sequence of int
        The ranks of the new group, in their new order. Empty: this rank is not one of them, and
        gets None.
    token : str
        A value of `new_token` that these ranks, and no others, share.
    """
    from gpucoll.backends.cpu.host import tuning

    with Division(group, Collective.CONNECT.spelled) as division:
        division.ranks = list(ranks)
        job = group.meeting_of(ranks, token, division.call, tell(channel, timeout_s))
        if not ranks:
            return None
        division.has_begun = True
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        policy = Policy(tuning.tune, tuning.waiting)
        said: dict[str, Any] = {tuning.WISH: "cpu"}
        met = join(job, policy, limit_s, NEVER_S, {}, said, division)
        try:
            met.group.keeps_order = group.keeps_order
            whole = group.over_mpi
            name, given = "cpu", []
            if whole is not None:
                name, given = MPI, [lambda: whole.part(ranks, limit_s)]
            module = backends.load(name, spans_hosts=met.spans_hosts)
            made: HostBackend = module.create(met.group, *given)
            return Inner(met.group, met.channel, made)
        except BaseException:
            met.group.close()
            raise


def told(error: BaseException, what: str) -> GpucollError:
    """Return an exception of a thread that does the host's part as an error of gpucoll."""
    if isinstance(error, GpucollError):
        return error
    made = BackendError(f"the host's part of {what} failed: {error!r}")
    made.__cause__ = error
    return made


def new_token() -> str:
    """Return a new name for a meeting."""
    return os.urandom(16).hex()
