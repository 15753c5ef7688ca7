"""Ranks whose streams go on in an order drawn at random, over NumPy's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np

from gpucoll.backends.direct import rounds
from gpucoll.backends.direct.rounds import Await, Combine, Exchange, Identity, Role, Say, Word
from gpucoll.backends.gpu.steps import Copy
from gpucoll.kernels import reference

HALF_BYTES = 256
FACTOR = 0.5
"""Of a scaled_sum."""
POISON = 0x5A
BASE = 1 << 20
"""Of addresses: 0 is none."""


class Memory:
    """All ranks' memory, as every one of them sees it."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)

    def place(self, size_bytes: int, values: np.ndarray | None = None) -> int:
        """Return the address of new memory, behind a gap that nobody may touch."""
        start = -(-(len(self.bytes) + 64) // 64) * 64
        grown = np.full(start + size_bytes, POISON, np.uint8)
        grown[: len(self.bytes)] = self.bytes
        if values is not None:
            grown[start:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.bytes = grown
        return BASE + start

    def at(self, address: int, size_bytes: int) -> np.ndarray:
        start = address - BASE
        assert 0 <= start <= start + size_bytes <= len(self.bytes)
        return self.bytes[start : start + size_bytes]


@dataclass
class Stream:
    """One rank's stream: what is to come, and what it is doing."""

    rank: int
    steps: list = field(default_factory=list)
    running: tuple | None = None
    """What a step has read when it began, where from, and where it will write."""


class World:
    """Ranks whose streams go on in an order drawn at random.

    A step reads when it begins and writes when it ends; what it reads must not change in between.
    """

    def __init__(self, world_size: int, seed: int, dtype: str = "int32", op: str = "sum") -> None:
        self.random = Random(seed)
        self.world_size, self.dtype, self.op = world_size, np.dtype(dtype), op
        self.memory = Memory()
        self.half_bytes = HALF_BYTES
        self.exchanges = tuple(self.memory.place(2 * HALF_BYTES) for _ in range(world_size))
        self.before = (1 << 31) - 3  # numbers wrap, and become negative as signed ones
        self.words = {
            (rank, word): rounds.value_of(word, 0, self.before)
            for rank in range(world_size)
            for word in Word
        }
        self.streams = [Stream(rank) for rank in range(world_size)]

    def seen_by(self, rank: int) -> Exchange:
        return Exchange(rank, self.world_size, self.exchanges, self.half_bytes)

    def enqueue(self, calls: list[rounds.Rounds]) -> None:
        """Put a call on every stream."""
        assert len({call.n_rounds for call in calls}) == 1, "ranks disagree on the rounds"
        assert calls[0].n_rounds % 2 == 0
        for stream, call in zip(self.streams, calls, strict=True):
            stream.steps += [(step, self.before) for step in call.steps]
        self.before += calls[0].n_rounds

    def run(self) -> None:
        while any(stream.steps for stream in self.streams):
            able = [stream for stream in self.streams if stream.steps and self._can_go_on(stream)]
            assert able, f"all ranks wait: {[stream.steps[:1] for stream in self.streams]}"
            self._go_on(self.random.choice(able))

    def _can_go_on(self, stream: Stream) -> bool:
        step, before = stream.steps[0]
        if not isinstance(step, Await):
            return True
        assert step.rank != stream.rank
        wanted = rounds.value_of(step.word, step.number, before)
        return (self.words[step.rank, step.word] - wanted) % (1 << 32) < 1 << 31

    def _go_on(self, stream: Stream) -> None:
        step, before = stream.steps[0]
        if isinstance(step, Say):
            value = rounds.value_of(step.word, step.number, before)
            passed = (value - self.words[stream.rank, step.word]) % (1 << 32)
            assert 0 < passed < 1 << 31, f"{step}: numbers go up"
            self.words[stream.rank, step.word] = value
        elif not isinstance(step, Await):
            if stream.running is None:
                stream.running = self._begin(step)
                return
            read, result, destinations = stream.running
            for address, values in read:
                now = self.memory.at(address, len(values))
                assert (now == values).all(), f"rank {stream.rank}, {step}: read memory has changed"
            for destination in destinations:
                self.memory.at(destination, len(result))[:] = result
            stream.running = None
        stream.steps.pop(0)

    def _begin(self, step) -> tuple:
        item_bytes = self.dtype.itemsize
        sources: tuple[int, ...]
        destinations: tuple[int, ...]
        if isinstance(step, Copy):
            sources, size_bytes, destinations = (step.source,), step.size_bytes, (step.destination,)
        elif isinstance(step, Combine):
            sources, size_bytes = step.sources, step.n_elements * item_bytes
            destinations = step.destinations
        else:
            assert isinstance(step, Identity)
            element = reference.identity(self.op, self.dtype)
            return [], np.full(step.n_elements, element).view(np.uint8), (step.destination,)
        assert size_bytes > 0
        read = [(address, self.memory.at(address, size_bytes).copy()) for address in sources]
        result = read[0][1]
        if isinstance(step, Combine):
            values = [each.view(self.dtype) for _, each in read]
            op, parameter = self._op_of(step.role)
            result = reference.reduce(op, values, parameter).view(np.uint8)
        overwritten = [pair for pair in read if pair[0] not in destinations]
        return overwritten, result, destinations

    def _op_of(self, role: Role) -> tuple[str, float]:
        if self.op == "avg" and role is not Role.MIDDLE:
            return "avg", self.world_size
        if self.op == "scaled_sum" and role is Role.ALONE:
            return "scaled_sum", FACTOR
        return ("sum" if self.op in ("avg", "scaled_sum") else self.op), 1


def arrays(world: World, count: int, seed: int) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    made = [numbers.integers(-50, 50, count) for _ in range(world.world_size)]
    return [(x / 7 if world.dtype.kind not in "iu" else x).astype(world.dtype) for x in made]


def put(world: World, inputs: list[np.ndarray]) -> list[int]:
    return [world.memory.place(x.nbytes, x) for x in inputs]


def got(world: World, address: int, like: np.ndarray) -> np.ndarray:
    return world.memory.at(address, like.nbytes).view(like.dtype)


def check(world: World, addresses: list[int], expected: Sequence[np.ndarray | None]) -> None:
    for rank, (address, values) in enumerate(zip(addresses, expected, strict=True)):
        if values is not None:
            found = got(world, address, values)
            assert found.tobytes() == values.tobytes(), f"rank {rank}: {found} is not {values}"


def counts_of(world_size: int, count: int, random: Random) -> list[int]:
    return [random.choice((0, 1, count, 2 * count)) for _ in range(world_size)]


def starts_of(counts: list[int], item_bytes: int) -> list[int]:
    return [0, *np.cumsum(np.array(counts, int) * item_bytes).tolist()]


def own_blocks(
    world: World, inputs: list[np.ndarray], starts: list[int], is_in_place: bool
) -> tuple[list[int], list[int]]:
    """Return where each rank's block lies, and where all blocks go; or it lies there already."""
    outs = [world.memory.place(starts[-1]) for _ in inputs]
    if not is_in_place:
        return put(world, inputs), outs
    sources = [out + start for out, start in zip(outs, starts, strict=False)]
    for source, x in zip(sources, inputs, strict=True):
        world.memory.at(source, x.nbytes)[:] = x.view(np.uint8)
    return sources, outs


def outs_of_blocks(
    world: World, sources: list[int], starts: list[int], is_in_place: bool
) -> list[int]:
    """Return where each rank's block of the results goes: into its input, or elsewhere."""
    if is_in_place:
        return [x + start for x, start in zip(sources, starts, strict=False)]
    return [world.memory.place(size) for size in np.diff(starts).tolist()]
