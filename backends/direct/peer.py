"""Collectives through memory that the ranks' GPUs share: rounds, put onto streams.

For the ranks of one host, each in a process of its own, of at most 16. What it does not serve, and
where the memory cannot be shared, is for whoever calls it: `PeerPath.prepare` returns None, and
`peer_memory.connect` raises, on all ranks alike.

Checked by reference and by doubles of the drivers only: no GPU has run it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct import rounds
from gpucoll.backends.direct.peer_memory import PeerMemory
from gpucoll.backends.direct.rounds import (
    Combine,
    Copy,
    Identity,
    Part,
    Rounds,
    Say,
    Step,
    Word,
    value_of,
)
from gpucoll.backends.protocol import Request
from gpucoll.devices import Device
from gpucoll.errors import BackendError, GpucollError
from gpucoll.kernels.cpu.identities import identity_of
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.types import Collective, ReduceOp

ONE_SHOT_BYTES: Final = 256 << 10
"""Up to here every rank combines the whole array. By reasoning, not measured: each rank reads
world_size times as much as in two turns, and waits for the others once and not twice."""
MOST_UNSIGNED_ROUNDS: Final = 1 << 30
"""Where the GPU compares words as unsigned numbers, which must not wrap."""
_PAUSE_S: Final = 1e-3
_AHEAD: Final = 1 << 28

Enqueue = Callable[[int, int], None]
"""Puts a step onto a stream: ``(stream, before)``, with the rounds before the call."""


class PeerLaunch(NamedTuple):
    """A collective with its arrays, ready to be enqueued as often as wanted."""

    steps: tuple[Enqueue, ...]
    n_rounds: int


class PeerPath:
    """One rank's calls through shared GPU memory.

    Calls are enqueued by one thread at a time, in the same order on every rank; on whatever stream.

    Parameters
    ----------
    memory : PeerMemory
        Closed with this.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self.device: Device = memory.device
        self._before = 0
        """Rounds of all calls that were enqueued."""
        self._event = self._stream = 0
        self._is_recorded = self._is_ended = False
        self._ending: threading.Thread | None = None
        """Raises words for streams that come to them long after the call was given up."""
        self._closes_after_s: float | None = None
        """How long that thread waits for others when it closes all; None: it does not close."""
        self._ending_lock = threading.Lock()
        self._tried: set[tuple[str, str]] = set()

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> PeerLaunch | None:
        """Return how a collective is enqueued; None: not by this path, on all ranks alike.

        Raises
        ------
        ArgumentTypeError
            The op has no identity, which the call needs.
        """
        made = rounds_of(request, self.memory.exchange)
        if made is None:
            return None
        bind = _Binder(self, request)
        return PeerLaunch(tuple(bind.bound(step) for step in made.steps), made.n_rounds)

    def try_kernel(self, op: ReduceOp, like: Buffer) -> None:
        """Compile and load a kernel that has not run here, before anybody waits for what it does.

        It could fail; in the middle of a call other ranks would wait for it.
        """
        key = op.name, like.dtype
        if key in self._tried:
            return
        if not self._stream:
            self._stream = self.device.create_stream()
        trial = _buffer(self.memory.trial, 1, like)
        prepare_reduce(op, [trial], [trial], divisor=1)(self._stream)
        self._tried.add(key)

    # --- enqueuing --------------------------------------------------------------------------------

    def enqueue(self, launch: PeerLaunch, stream: int) -> None:
        """Put a call onto a stream of the device, which is current."""
        if not launch.n_rounds:
            return
        device = self.device
        if self._is_ended:
            raise BackendError(f"{device.label}: the ranks' shared GPU memory was given up")
        if device.kind == "rocm" and self._before + launch.n_rounds > MOST_UNSIGNED_ROUNDS:
            raise BackendError(
                f"{device.label}: {self._before} rounds through shared GPU memory are as many as "
                "numbers of 32 bits can count on AMD GPUs: make a new communicator"
            )
        if not self._event:
            self._event = device.create_event()
        if self._is_recorded:  # the call before may be on another stream
            device.check(device.stream_wait_event(stream, self._event, 0), "make a stream wait")
        before, self._before = self._before, self._before + launch.n_rounds
        try:
            for step in launch.steps:
                step(stream, before)
        finally:
            code = device.record_event(self._event, stream)
            self._is_recorded = True
        device.check(code, "record an event")

    # --- the end ----------------------------------------------------------------------------------

    def abort(self, limit_s: float) -> bool:
        """End every stream that waits for another rank; return whether all is over.

        What the calls leave in their outputs is undefined. The host writes all words again and
        again: streams that go on write their own numbers in between. For those that do not come to
        it within `limit_s`, being held up by something else, a thread does it as long as needed.
        """
        self._is_ended = True
        code = self._release(limit_s)
        if code == self.device.not_ready:
            with self._ending_lock:
                if self._ending is None:
                    self._ending = threading.Thread(
                        target=self._end_later, name="gpucoll-direct-ending", daemon=True
                    )
                    self._ending.start()
        return code == 0

    def _end_later(self) -> None:
        while True:
            self._release(math.inf)
            with self._ending_lock:
                if self._query() == self.device.not_ready:  # something was enqueued since
                    continue
                if self._closes_after_s is None:
                    self._ending = None
                    return
            self.close(self._closes_after_s)
            return

    def _release(self, limit_s: float) -> int:
        """Raise words until this rank's streams are through, or so long; return what they say."""
        due_s = time.monotonic() + limit_s
        while True:
            for word in Word if self._is_recorded else ():
                self.memory.raise_words(word, self._beyond(word))
            code = self._query()
            if code != self.device.not_ready or time.monotonic() > due_s:
                return code
            time.sleep(_PAUSE_S)

    def _beyond(self, word: Word) -> int:
        """Return a number that no call waits for longer."""
        if self.device.kind == "rocm":
            return (1 << 32) - 1
        return value_of(word, _AHEAD, self._before)

    def _query(self) -> int:
        if not self._is_recorded:
            return 0
        with self.device, self.device.relaxed_capture():
            return self.device.query_event(self._event)

    def give_up(self, limit_s: float) -> bool:
        """Abort, and let go of everything unless a stream still runs; return whether it is gone.

        Waits up to `limit_s` for this rank's streams, and again for others to let go of its memory.
        What a stream still needs is let go of when it is through, by a thread.
        """
        self.abort(limit_s)
        with self._ending_lock:
            ending = self._ending
            if ending is not None:
                self._closes_after_s = limit_s
        if ending is not None:  # the GPU works with all of it, or did a moment ago
            ending.join(limit_s)
            return not ending.is_alive()
        # Streams are through; or the GPU has failed: nothing runs there any more.
        self.close(limit_s)
        return True

    def close(self, limit_s: float) -> None:
        """Let go of everything; nothing of this rank is under way."""
        self._is_ended = True
        device = self.device
        with contextlib.suppress(GpucollError), device:  # one that failed gives nothing back
            if self._stream:
                device.synchronize_stream(self._stream)
                device.destroy_stream(self._stream)
            if self._event:
                device.destroy_event(self._event)
        self._event = self._stream = 0
        self._is_recorded = False
        self.memory.close(limit_s)


class _Binder:
    """Makes what enqueues the steps of one request."""

    def __init__(self, path: PeerPath, request: Request) -> None:
        self._path, self._request = path, request
        self._is_scan = request.collective in (Collective.SCAN, Collective.EXCLUSIVE_SCAN)
        if request.op is not None and request.data.count:
            path.try_kernel(request.op, request.data)

    def bound(self, step: Step) -> Enqueue:
        device, memory = self._path.device, self._path.memory
        if isinstance(step, Copy):
            copied = step
            return lambda stream, _: device.copy(*copied, stream)
        if isinstance(step, Combine):
            enqueue = self._combine(step)
            return lambda stream, _: enqueue(stream)
        if isinstance(step, Identity):
            op, like = self._request.op, self._request.data
            assert op is not None
            at, count = step
            element = identity_of(like.dtype, op.name).tobytes()
            return lambda stream, _: device.fill(at, element, count, stream)
        word, number = step.word, step.number
        if isinstance(step, Say):
            address, write = memory.word(memory.exchange.rank, word), device.stream_write_value
            return lambda stream, before: device.check(
                write(stream, address, value_of(word, number, before)), "write a word"
            )
        address, wait = memory.word(step.rank, word), device.stream_wait_value
        return lambda stream, before: device.check(
            wait(stream, address, value_of(word, number, before)), "wait for a word"
        )

    def _combine(self, step: Combine) -> Callable[[int], None]:
        like, op = self._request.data, self._request.op
        assert op is not None
        # An average of a scan is one of the ranks so far.
        n_ranks = self._path.memory.exchange.world_size
        divisor = len(step.sources) if self._is_scan else n_ranks
        written = [_buffer(address, step.n_elements, like) for address in step.destinations]
        given = [_buffer(address, step.n_elements, like) for address in step.sources]
        return prepare_reduce(op, written, given, divisor=divisor)


def _buffer(address: int, count: int, like: Buffer) -> Buffer:
    return Buffer(address, (count,), like.dtype, like.item_bytes, None, like.device, like.stream)


# --- requests -------------------------------------------------------------------------------------


def rounds_of(request: Request, exchange: rounds.Exchange) -> Rounds | None:
    """Return a request's steps; None: not by this path, on all ranks alike."""
    if request.op is not None and request.op.function is not None:
        return None  # a user's own operation
    if request.sources or request.destinations:
        return None
    maker = _MAKERS.get(request.collective)
    return None if maker is None else maker(request, exchange)


def _pairs(request: Request) -> Sequence[tuple[Buffer, Buffer | None]]:
    return request.parts or ((request.data, request.destination),)


def _all_reduce(request: Request, exchange: rounds.Exchange) -> Rounds:
    pairs = _pairs(request)
    parts = [Part(x.address, out.address if out else 0, x.count) for x, out in pairs]
    shares = sum(x.size_bytes for x, _ in pairs) > ONE_SHOT_BYTES and exchange.world_size > 2
    return rounds.reduction(exchange, parts, request.data.item_bytes, shares=shares)


def _reduce(request: Request, exchange: rounds.Exchange) -> Rounds:
    is_root = exchange.rank == request.root
    parts = [
        Part(x.address, out.address if is_root and out is not None else 0, x.count)
        for x, out in _pairs(request)
    ]
    item_bytes = request.data.item_bytes
    return rounds.reduction(exchange, parts, item_bytes, shares=False, root=request.root)


def _broadcast(request: Request, exchange: rounds.Exchange) -> Rounds:
    parts = [
        (x.address, out.address if out is not None else 0, x.size_bytes)
        for x, out in _pairs(request)
    ]
    return rounds.broadcast(exchange, parts, request.root)


def _starts(request: Request, block_bytes: int, world_size: int) -> list[int]:
    """Return where each rank's block begins, in bytes, and where the last one ends."""
    if request.counts is None:
        return [rank * block_bytes for rank in range(world_size + 1)]
    row_bytes = request.row_count * request.data.item_bytes
    return [0, *accumulate(row_bytes * count for count in request.counts)]


def _gathering(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert x is not None
    starts = _starts(request, x.size_bytes, exchange.world_size)
    root = request.root if request.collective == Collective.GATHER else None
    return rounds.gathering(exchange, x.address, out.address if out else 0, starts, root)


def _scatter(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert out is not None
    starts = _starts(request, out.size_bytes, exchange.world_size)
    return rounds.scatter(exchange, x.address if x else 0, out.address, starts, request.root)


def _all_to_all(request: Request, exchange: rounds.Exchange) -> Rounds | None:
    x, out = request.source, request.destination
    assert x is not None
    assert out is not None
    if request.counts is not None:
        return None  # how many rounds it takes is not known to all ranks
    block_bytes = x.size_bytes // exchange.world_size
    return rounds.all_to_all(exchange, x.address, out.address, block_bytes)


def _reduce_scatter(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert x is not None
    assert out is not None
    starts = [
        start // x.item_bytes for start in _starts(request, out.size_bytes, exchange.world_size)
    ]
    return rounds.reduce_scatter(exchange, x.address, out.address, starts, x.item_bytes)


def _scan(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert x is not None
    assert out is not None
    is_exclusive = request.collective == Collective.EXCLUSIVE_SCAN
    if is_exclusive and request.op is not None:
        identity_of(x.dtype, request.op.name)  # on all ranks alike: ArgumentTypeError
    part = Part(x.address, out.address, x.count)
    return rounds.scan(exchange, part, x.item_bytes, is_exclusive=is_exclusive)


_MAKERS: dict[Collective, Callable[[Request, rounds.Exchange], Rounds | None]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_REDUCE_LIST: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _gathering,
    Collective.GATHER: _gathering,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
