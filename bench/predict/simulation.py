"""Simulate schedules without processes: when messages leave and arrive, by the model LogGP.

A message costs its sender and its receiver `overhead_s` each, is under way for `latency_s`, and
needs `seconds_per_byte` at both ends, one message at a time in each direction. Messages of a rank
leave at least `gap_s` apart. What is reduced costs `reduce_s_per_byte`. Data is forwarded and
reduced in chunks of `chunk_bytes`, while more of it arrives. There is no contention and no noise.
Source: Alexandrov, Ionescu, Schauser, Scheiman, *LogGP* (1995).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.bench.predict.behaviour import Behaviour, Turn, Turns
from gpucoll.errors import ArgumentError

__all__ = ["PASSED_ON_BYTES", "Network", "Times", "simulate"]

Times = npt.NDArray[np.float64]
"""Seconds: a number, or one number for each set of parameters that is simulated at once."""

PASSED_ON_BYTES: Final = 64 << 10
"""How much of a block must have arrived before gpucoll passes it on: `LEAST_PASSED_ON` of
`gpucoll.transport.tcp.stream_loop`, which a test compares."""


@dataclass(frozen=True)
class Network:
    """The connections between ranks. Each number may be an array: as many networks at once.

    Parameters
    ----------
    latency_s : float or ndarray
        From the departure of a byte to its arrival.
    seconds_per_byte : float or ndarray
        What a byte costs at either end, in each direction.
    overhead_s : float or ndarray
        What a message costs its sender, and again its receiver.
    gap_s : float or ndarray
        The least time between two messages of a rank in one direction.
    reduce_s_per_byte : float or ndarray
        What it costs to reduce a received byte.
    chunk_bytes : float
        How much must have arrived before it is reduced and forwarded; a block that is smaller must
        be complete. 0: byte by byte.
    """

    latency_s: float | Times
    seconds_per_byte: float | Times
    overhead_s: float | Times = 0.0
    gap_s: float | Times = 0.0
    reduce_s_per_byte: float | Times = 0.0
    chunk_bytes: float = PASSED_ON_BYTES

    def __post_init__(self) -> None:
        for field in fields(self):
            values = np.asarray(getattr(self, field.name))
            if not np.all(values >= 0) or (
                field.name != "chunk_bytes" and np.any(np.isinf(values))
            ):
                raise ArgumentError(f"a network with {field.name} = {values}: 0 or more is needed")

    @staticmethod
    def of_rate(latency_s: float, bytes_per_s: float) -> Network:
        """Return a network by its bandwidth, in bytes per second and direction."""
        if not bytes_per_s > 0:
            raise ArgumentError(f"a bandwidth of {bytes_per_s} bytes/s: more than 0 is needed")
        return Network(latency_s, 1 / bytes_per_s)


class _Message(NamedTuple):
    """When the first and the last byte of a message arrive."""

    first: Times
    last: Times


class _Clock:
    """The times at which a rank is free, and at which it has what it received."""

    __slots__ = ("came", "done", "first", "receiver_free", "sender_free")

    def __init__(self) -> None:
        zero = np.float64(0.0)
        self.done: Times = zero  # type: ignore[assignment]
        """When everything was received, and reduced, in the previous turns."""
        self.first = self.done
        """When the first chunk of the last turn was received, and reduced."""
        self.came = self.done
        """When all of it was."""
        self.sender_free = self.done
        self.receiver_free = self.done

    def times(self) -> list[Times]:
        return [self.done, self.first, self.came, self.sender_free, self.receiver_free]

    def shift(self, by: Times) -> None:
        """Let all of it be later."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + by)

    def ended(self) -> Times:
        return np.maximum(self.done, self.sender_free)


def simulate(
    behaviour: Behaviour,
    unit_bytes: float,
    network: Network,
    starts: Sequence[float | Times] = (0.0,),
) -> Times:
    """Return the time in seconds after which the last rank has ended its turns.

    Parameters
    ----------
    behaviour : Behaviour
        What the ranks do.
    unit_bytes : float
        The size of a unit of data.
    network : Network
        The connections.
    starts : sequence of float or ndarray
        The sections of the array: the turns are taken over each of them, one after the other as
        their connections allow. A section's data is there at its time in this sequence.

    Raises
    ------
    ArgumentError
        A rank waits for ever.
    """
    run = _Run(network, unit_bytes)
    if behaviour.is_rotated:
        return run.rotated(behaviour.kinds[0], starts)
    return run.all_kinds(behaviour.kinds, starts)


class _Run:
    """One simulation."""

    def __init__(self, network: Network, unit_bytes: float) -> None:
        self.network = network
        self.unit_bytes = unit_bytes

    def rotated(self, turns: Turns, starts: Sequence[float | Times]) -> Times:
        """Return the time of ranks that all do the same: each gets what it sends itself."""
        clock = _Clock()
        for start in starts:
            clock.done = np.maximum(start, 0.0)
            for turn, count in turns:
                self._repeat(clock, turn, count)
        return clock.ended()

    def _repeat(self, clock: _Clock, turn: Turn, count: int) -> None:
        """Take a turn `count` times.

        If all times of a clock have become later by the same amount in a turn, they do so in each
        further one: maxima and sums do not depend on where time begins.
        """
        left = count
        while left:
            before = clock.times()
            self._receive(clock, turn, self._send(clock, turn))
            left -= 1
            later = [after - was for after, was in zip(clock.times(), before, strict=True)]
            by = later[0]
            rounding = 1e-9 * by + 1e-15 * clock.sender_free
            if left and all(np.all(np.abs(one - by) <= rounding) for one in later):
                clock.shift(by * left)
                return

    def all_kinds(self, kinds: Sequence[Turns], starts: Sequence[float | Times]) -> Times:
        """Return the time of ranks of several kinds."""
        rows = [
            [(section, number, turn) for section in range(len(starts)) for number, (turn, _) in
             enumerate(turns)]
            for turns in kinds
        ]  # fmt: skip
        clocks, at = [_Clock() for _ in kinds], [0] * len(kinds)
        messages: dict[tuple[int, int, int], _Message] = {}
        waiting: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        ready = list(range(len(kinds)))
        while ready:
            kind = ready.pop()
            clock = clocks[kind]
            while at[kind] < len(rows[kind]):
                section, number, turn = rows[kind][at[kind]]
                key = (kind, section, number)
                if key not in messages:
                    if number == 0:
                        clock.done = np.maximum(starts[section], 0.0)
                    messages[key] = self._send(clock, turn)
                    ready += waiting.pop(key, ())
                if turn.source is not None:
                    wanted = (turn.source[0], section, turn.source[1])
                    if wanted not in messages:
                        waiting[wanted].append(kind)
                        break
                    self._receive(clock, turn, messages[wanted])
                at[kind] += 1
        if any(at[kind] < len(rows[kind]) for kind in range(len(kinds))):
            raise ArgumentError("schedule: it never ends")
        last: Times = np.max([clock.ended() for clock in clocks], axis=0, initial=0.0)
        return last

    def _send(self, clock: _Clock, turn: Turn) -> _Message:
        """Note when the first and the last byte of a turn's message leave, and so arrive."""
        net = self.network
        if turn.sends < 0:
            return _Message(clock.done, clock.done)
        size = turn.sends * self.unit_bytes
        ready = clock.first if turn.forwards else clock.done if turn.waits else np.float64(0.0)
        first = np.maximum(ready + net.overhead_s, clock.sender_free)
        last = first + size * net.seconds_per_byte
        if turn.forwards:
            chunk = min(size, net.chunk_bytes)
            last = np.maximum(last, clock.came + chunk * net.seconds_per_byte)
        clock.sender_free = np.maximum(last, first + net.gap_s)
        return _Message(first + net.latency_s, last + net.latency_s)

    def _receive(self, clock: _Clock, turn: Turn, message: _Message) -> None:
        """Note when a turn has received, and reduced, its first chunk and all of its data."""
        if turn.receives < 0:
            return
        net, size = self.network, turn.receives * self.unit_bytes
        chunk = min(size, net.chunk_bytes)
        begun = np.maximum(message.first, clock.receiver_free)
        last = np.maximum(message.last, begun + size * net.seconds_per_byte)
        clock.receiver_free = np.maximum(last, begun + net.gap_s)
        clock.first = begun + chunk * net.seconds_per_byte + net.overhead_s
        clock.came = last + net.overhead_s
        if turn.reduces:
            clock.first = clock.first + chunk * net.reduce_s_per_byte
            clock.came = np.maximum(
                clock.came + chunk * net.reduce_s_per_byte,
                clock.first + (size - chunk) * net.reduce_s_per_byte,
            )
        clock.done = np.maximum(clock.done, clock.came)
