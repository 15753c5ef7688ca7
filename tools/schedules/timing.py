"""Predict the duration of a schedule by a network model: latency, bandwidth of links and NICs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpucoll.algorithms.cost import span_bytes
from gpucoll.algorithms.steps import NOBODY, Step
from gpucoll.errors import ArgumentError


@dataclass(frozen=True)
class Network:
    """The connections between hosts.

    Parameters
    ----------
    latency_s : float
        From the departure of the first byte to its arrival, including the work of both hosts for
        it.
    link_bytes_per_s : float
        What one connection carries in each direction.
    nic_bytes_per_s : float
        What a host carries in each direction over all connections; unlimited by default.
    """

    latency_s: float
    link_bytes_per_s: float
    nic_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ArgumentError(f"a latency of {self.latency_s} s: 0 or more is needed")
        for rate in (self.link_bytes_per_s, self.nic_bytes_per_s):
            if not rate > 0:
                raise ArgumentError(f"a bandwidth of {rate} bytes/s: more than 0 is needed")

    def rate(self, flows: int) -> float:
        """Return the rate of each of `flows` concurrent flows of a host, in each direction."""
        return min(self.link_bytes_per_s, self.nic_bytes_per_s / flows)


@dataclass(slots=True)
class _Clock:
    """The times at which a rank is free, and at which the data it received last began to arrive."""

    step: int = 0
    is_sent: bool = False
    """Whether the current step's message is under way, so that it waits for what it receives."""
    done: float = 0.0
    """When everything was sent and received in the previous steps."""
    sender_free: float = 0.0
    receiver_free: float = 0.0
    first_came: float = 0.0


def predict(
    schedules: Sequence[Sequence[Step]],
    block_bytes: int | Sequence[int],
    network: Network,
    flows: int = 1,
) -> float:
    """Return the time in seconds after which the last rank has ended its schedule.

    All ranks begin at 0. A message leaves when its step may send. If the step forwards, the first
    byte leaves when the first one arrived (all links are equal, so the others arrive in time). A
    message takes the latency and, at both ends, the time for its bytes, one message at a time in
    each direction. Messages wait on the way until the receiver is in the step for them. Computation
    is included in latency and bandwidth.

    Parameters
    ----------
    schedules : sequence of list of Step
        The steps of each rank, with one rank per host.
    block_bytes : int or sequence of int
        The size of all blocks, or of each.
    network : Network
        The connections between the hosts.
    flows : int
        How many such schedules run at once, each on a separate rank of every host.

    Raises
    ------
    ArgumentError
        A rank waits for ever, or sends another number of bytes than is received.
    """
    clocks = _Clocks(schedules, block_bytes, network.latency_s, 1 / network.rate(flows))
    ready = list(range(len(schedules)))
    while ready:
        ready += clocks.advance(ready.pop())
    return clocks.ended()


class _Clocks:
    """The clocks of all ranks, and the messages between them."""

    def __init__(
        self,
        schedules: Sequence[Sequence[Step]],
        block_bytes: int | Sequence[int],
        latency_s: float,
        seconds_per_byte: float,
    ) -> None:
        self.schedules = schedules
        self.block_bytes = block_bytes
        self.latency_s = latency_s
        self.seconds_per_byte = seconds_per_byte
        self.clocks = [_Clock() for _ in schedules]
        self.under_way: dict[tuple[int, int], deque[tuple[float, float, int]]] = {}
        """For (sender, receiver): when the first and the last byte arrive, and the number of
        bytes."""

    def advance(self, rank: int) -> list[int]:
        """Advance a rank as far as possible; return the ranks that may now advance, too."""
        clock, steps = self.clocks[rank], self.schedules[rank]
        woken = []
        while clock.step < len(steps):
            step = steps[clock.step]
            if step.send_to != NOBODY and not clock.is_sent:
                self._send(rank, step)
                if self._waits_for(step.send_to) == rank:
                    woken.append(step.send_to)
            clock.is_sent = True
            if step.receive_from != NOBODY:
                came = self.under_way.get((step.receive_from, rank))
                if not came:
                    break
                self._receive(clock, step, *came.popleft())
            clock.done = max(clock.sender_free, clock.receiver_free)
            clock.is_sent = False
            clock.step += 1
        return woken

    def ended(self) -> float:
        """Return when the last rank has ended; raise ArgumentError if not all have."""
        for clock, steps in zip(self.clocks, self.schedules, strict=True):
            if clock.step < len(steps):
                raise ArgumentError("schedule: it never ends")
        if any(self.under_way.values()):
            raise ArgumentError("schedule: it sends what nobody receives")
        return max((clock.done for clock in self.clocks), default=0.0)

    def _waits_for(self, rank: int) -> int:
        """Return the rank from which a rank waits to receive, or NOBODY."""
        clock, steps = self.clocks[rank], self.schedules[rank]
        waits = clock.is_sent and clock.step < len(steps)
        return steps[clock.step].receive_from if waits else NOBODY

    def _send(self, rank: int, step: Step) -> None:
        """Note when the first and the last byte of a step's message leave, and so arrive."""
        clock = self.clocks[rank]
        size = span_bytes(step.send, self.block_bytes)
        first = max(clock.sender_free, clock.first_came if step.forwards else clock.done)
        last = first + size * self.seconds_per_byte
        clock.sender_free = last
        message = (first + self.latency_s, last + self.latency_s, size)
        self.under_way.setdefault((rank, step.send_to), deque()).append(message)

    def _receive(self, clock: _Clock, step: Step, first: float, last: float, size: int) -> None:
        """Note when the first and the last byte of what a step receives have arrived."""
        wanted = span_bytes(step.receive, self.block_bytes)
        if wanted != size:
            raise ArgumentError(f"schedule: {size} bytes are sent where {wanted} are received")
        clock.first_came = max(first, clock.receiver_free)
        clock.receiver_free = max(last, clock.receiver_free + size * self.seconds_per_byte)
