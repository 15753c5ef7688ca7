"""The ranks once more, as a group of the CPU backend of its own: for the host's part of GPU calls.

Of MPI's, where the communicator's host arrays go through that.

So the user's own calls on host arrays, and their order, have nothing to do with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from gpucoll import backends
from gpucoll.backends.choice import MPI
from gpucoll.backends.protocol import HostBackend
from gpucoll.errors import BackendError, GpucollError
from gpucoll.group.division import Division
from gpucoll.group.joining import Policy, join
from gpucoll.group.protocol import Channel, Group
from gpucoll.types import Collective

NEVER_S = 1e8
"""Deadline of its calls: those of the GPU calls are looked after where these are issued."""


class Inner:
    """A group of the CPU backend, and what moves its arrays.

    Attributes
    ----------
    group : Group
    channel : Channel
        On which its ranks agree, until calls are made.
    backend : HostBackend
    """

    def __init__(self, group: Group, channel: Channel, backend: HostBackend) -> None:
        self.group = group
        self.channel = channel
        self.backend = backend

    @property
    def is_given_up(self) -> bool:
        """Whether MPI was left with requests, and may still read or write what they are of."""
        return self.group.over_mpi is not None and bool(self.group.over_mpi.is_given_up)

    def abort(self) -> None:
        """End what any rank waits for in it."""
        if not self.group.is_closed:
            self.group.abort()

    def close(self) -> None:
        """Let go of it; nobody is in a call."""
        self.backend.messages.end()
        self.group.close()


def tell(channel: Channel, timeout_s: float | None) -> Callable[[bytes], list[bytes]]:
    """Return what gives every rank this one's bytes."""
    return lambda data: channel.all_gather_bytes(data, Collective.CONNECT, timeout_s=timeout_s)


def meet(
    group: Group, channel: Channel, ranks: Sequence[int], token: str, timeout_s: float | None
) -> Inner | None:
    """Return the group of some ranks of another one; every rank of that calls it.

    Parameters
    ----------
    ranks : sequence of int
        They, in their new order; empty: this rank is none of them, and gets None.
    token : str
        Of `new_token`: the same for all of them, and nobody else's.
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
    """Return what a thread that does the host's part has met, as an error of gpucoll's."""
    if isinstance(error, GpucollError):
        return error
    made = BackendError(f"the host's part of {what} failed: {error!r}")
    made.__cause__ = error
    return made


def new_token() -> str:
    """Return what names a meeting."""
    return os.urandom(16).hex()
