"""How long a schedule takes, by a model of the network: latency, bandwidth of links and of NICs."""

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
    """What connects hosts.

    Parameters
    ----------
    latency_s : float
        From the first byte's leaving to its arrival, the work of both hosts for it included.
    link_bytes_per_s : float
        What one connection carries each way.
    nic_bytes_per_s : float
        What a host carries each way, over all connections; without a limit of its own by default.
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
        """Return the bytes per second of each of `flows` that a host has at once each way."""
        return min(self.link_bytes_per_s, self.nic_bytes_per_s / flows)


@dataclass(slots=True)
class _Clock:
    """When a rank is free, and when what it received last began to come."""

    step: int = 0
    is_sent: bool = False
    """The message of the current step is under way, and the step waits for what it receives."""
    done: float = 0.0
    """All that was sent and received in the steps before has been."""
    sender_free: float = 0.0
    receiver_free: float = 0.0
    first_came: float = 0.0


def predict(
    schedules: Sequence[Sequence[Step]],
    block_bytes: int | Sequence[int],
    network: Network,
    flows: int = 1,
) -> float:
    """Return after how many seconds the last rank has ended its schedule.

    All begin at 0. A message leaves when its step may send; where it forwards, its first byte
    leaves when the first one came (all links are alike, so the others have come in time). It takes
    the latency, and at both ends the time of its bytes, one message at a time each way. Messages
    wait on the way for as long as the receiver is not in the step for them. Computing is in the
    latency, and in the bandwidth.

    Parameters
    ----------
    schedules : sequence of list of Step
        Of each rank, one rank a host.
    block_bytes : int or sequence of int
        The size of every block, or of each.
    network : Network
        What connects the hosts.
    flows : int
        How many such schedules run at once, each on a rank of its own of every host.

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
        """Of (sender, receiver): when the first and the last byte come, how many there are."""

    def advance(self, rank: int) -> list[int]:
        """Take a rank as far as it gets; return who may now get further, too."""
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
        """Return when the last rank has ended, or raise ArgumentError where not all have."""
        for clock, steps in zip(self.clocks, self.schedules, strict=True):
            if clock.step < len(steps):
                raise ArgumentError("schedule: it never ends")
        if any(self.under_way.values()):
            raise ArgumentError("schedule: it sends what nobody receives")
        return max((clock.done for clock in self.clocks), default=0.0)

    def _waits_for(self, rank: int) -> int:
        """Return from whom a rank waits to receive, or NOBODY."""
        clock, steps = self.clocks[rank], self.schedules[rank]
        waits = clock.is_sent and clock.step < len(steps)
        return steps[clock.step].receive_from if waits else NOBODY

    def _send(self, rank: int, step: Step) -> None:
        """Note when the first and the last byte of what a step sends leave, and so come."""
        clock = self.clocks[rank]
        size = span_bytes(step.send, self.block_bytes)
        first = max(clock.sender_free, clock.first_came if step.forwards else clock.done)
        last = first + size * self.seconds_per_byte
        clock.sender_free = last
        message = (first + self.latency_s, last + self.latency_s, size)
        self.under_way.setdefault((rank, step.send_to), deque()).append(message)

    def _receive(self, clock: _Clock, step: Step, first: float, last: float, size: int) -> None:
        """Note when the first and the last byte of what a step receives have come."""
        wanted = span_bytes(step.receive, self.block_bytes)
        if wanted != size:
            raise ArgumentError(f"schedule: {size} bytes are sent where {wanted} are received")
        clock.first_came = max(first, clock.receiver_free)
        clock.receiver_free = max(last, clock.receiver_free + size * self.seconds_per_byte)
