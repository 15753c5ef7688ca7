"""Collectives through memory that the ranks' GPUs share: rounds that are put on streams.

Through GPU memory, this path serves at most 16 ranks of one host, each in its own process. Over
`gpucoll.backends.direct.wires` it goes around a ring of hosts. For a call that it does not serve,
`PeerPath.prepare` returns None; if the memory cannot be shared, `peer_memory.connect` raises. Both
happen on all ranks alike, and the caller then uses another path.

By shares executed with up to four ranks on one H100, never with several GPUs; around a ring never
executed on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct import ring, rounds
from gpucoll.backends.direct.rounds import (
    Await,
    Combine,
    Identity,
    Part,
    Role,
    Rounds,
    Say,
    Step,
    Word,
    value_of,
)
from gpucoll.backends.direct.schedule import Schedule
from gpucoll.backends.gpu.steps import Copy
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.devices import Device
from gpucoll.errors import BackendError, GpucollError
from gpucoll.kernels.cpu.identities import identity_of
from gpucoll.kernels.gpu.reduce import prepare_reduce, prepare_ring_step
from gpucoll.types import ReduceOp

ONE_SHOT_BYTES: Final = 256 << 10
"""Up to this size every rank combines the whole array. Chosen by reasoning, not measured: each rank
reads world_size times as much as in two turns, but waits for the others once instead of twice."""
MOST_UNSIGNED_ROUNDS: Final = 1 << 30
"""The limit if the GPU compares words as unsigned numbers, which must not wrap."""
RESTART_AT: Final = MOST_UNSIGNED_ROUNDS // 2
"""The count at which numbers begin again that no other rank knows."""
_PAUSE_S: Final = 1e-3
_AHEAD: Final = 1 << 28
_NARROW: Final = ("float16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes whose range a sum may leave although each operand and the average are within it."""

Enqueue = Callable[[int, int], None]
"""Puts a step on a stream: ``(stream, before)``, with the number of rounds before the call."""


class Memory(Protocol):
    """Exchanges of several ranks, and the words that their streams wait for.

    Attributes
    ----------
    device : Device
        This rank's GPU.
    exchange : Exchange
        The addresses of the exchanges, as this rank's GPU sees them.
    schedule : Schedule
        Whether calls go around a ring.
    reaches_all : bool
        Whether each rank reads every exchange; otherwise only rings are possible, of any size.
    wraps : bool
        Whether words may begin again at 0.
    """

    device: Device
    exchange: rounds.Exchange
    schedule: Schedule
    reaches_all: bool
    wraps: bool

    @property
    def trial(self) -> int:
        """GPU memory in which this rank may try a kernel."""

    def word(self, rank: int, word: Word) -> int:
        """Return the address of a rank's word, as the GPU sees it."""

    def value_of(self, word: Word, number: int, before: int) -> int:
        """Return the value of a call's number, after `before` rounds of earlier calls."""

    def begin(self, made: Rounds, before: int) -> None:
        """Do the host's part of a call that is about to be enqueued."""

    def raise_words(self, word: Word, value: int) -> None:
        """Write a word of every rank from the host, so that no stream waits for it any more."""

    def restart(self) -> None:
        """Set all words to 0, unless the memory `reaches_all`."""

    def close(self, limit_s: float) -> bool:
        """Release everything that no other rank uses, within `limit_s`."""


class PeerLaunch(NamedTuple):
    """A collective with its arrays, ready to be enqueued any number of times."""

    path: PeerPath
    steps: tuple[Enqueue, ...]
    rounds: Rounds


class PeerPath:
    """One rank's calls through the exchanges of a `Memory`.

    One thread at a time enqueues calls, in the same order on every rank, on any stream.

    Parameters
    ----------
    memory : Memory
        Closed together with this object.
    keeps_order : bool
        Whether reductions combine the ranks in their order: those that depend on it by shares.
    """

    def __init__(self, memory: Memory, keeps_order: bool = False) -> None:
        self.memory = memory
        self._keeps_order = keeps_order
        self.device: Device = memory.device
        self._before = 0
        """Number of rounds of all calls that were enqueued."""
        self._event = self._stream = 0
        self._has_begun = self._is_enqueuing = self._is_ended = False
        self._ending: threading.Thread | None = None
        """Raises the words for streams that reach their waits long after the call was given up."""
        self._closes_after_s: float | None = None
        """How long that thread waits for other ranks before it closes; None: it does not close."""
        self._ending_lock = threading.Lock()
        self._tried: set[tuple[str, str]] = set()

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> PeerLaunch | None:
        """Return the launch of a collective; None, on all ranks alike, if it cannot go this way.

        Raises
        ------
        ArgumentTypeError
            The op has no identity, but the call needs one.
        """
        made = self._steps_of(request)
        if made is None:
            return None
        if not self.memory.reaches_all:  # the call is over when its chunks have been sent
            sent = Await(self.memory.exchange.following, Word.DONE, made.n_rounds)
            made = made._replace(steps=(*made.steps, sent) if made.n_rounds else ())
        bind = _Binder(self, request)
        return PeerLaunch(self, tuple(bind.bound(step) for step in made.steps), made)

    def _steps_of(self, request: Request) -> Rounds | None:
        op, memory = request.op, self.memory
        if not memory.reaches_all:
            return ring_of(request, memory.exchange, 0)
        rotates = op is not None and op.depends_on_order(request.data.dtype)
        if (
            memory.schedule.is_ring
            and may_go_around(op, request.data.dtype)
            and not (rotates and self._keeps_order)
        ):
            made = ring_of(request, memory.exchange, ONE_SHOT_BYTES)
            if made is not None:
                return made
        return rounds_of(request, memory.exchange)

    def try_kernel(self, op: ReduceOp, like: Buffer) -> None:
        """Compile, load and run a kernel that has not run here, before any rank waits for it.

        It might fail; in the middle of a call, other ranks would wait for it.
        """
        if op.name in ("avg", "scaled_sum"):  # the steps of a ring add
            self.try_kernel(ReduceOp.SUM, like)
        key = op.name, like.dtype
        if key in self._tried:
            return
        if not self._stream:
            self._stream = self.device.create_stream()
        trial = buffer_at(self.memory.trial, 1, like)
        prepare_reduce(op, [trial], [trial], divisor=1)(self._stream)
        self._tried.add(key)

    # --- enqueuing --------------------------------------------------------------------------------

    def enqueue(self, launch: PeerLaunch, stream: int) -> None:
        """Put a call on a stream of the current device."""
        n_rounds = launch.rounds.n_rounds
        if not n_rounds:
            return
        device = self.device
        if self._is_ended:
            raise BackendError(f"{device.label}: the ranks' shared GPU memory was given up")
        if not self.memory.wraps and self._before + n_rounds > MOST_UNSIGNED_ROUNDS:
            raise BackendError(
                f"{device.label}: {self._before} rounds through shared memory are the most that "
                "numbers of 32 bits can count here: make a new communicator"
            )
        if not self._event:
            self._event = device.create_event()
        if self._has_begun:  # the previous call may be on another stream
            device.check(device.stream_wait_event(stream, self._event, 0), "make a stream wait")
        before, self._before = self._before, self._before + n_rounds
        # An abort must raise words meanwhile: a full stream lets the driver block this thread.
        self._has_begun = self._is_enqueuing = True
        try:
            self.memory.begin(launch.rounds, before)
            for step in launch.steps:
                step(stream, before)
        finally:
            code = device.record_event(self._event, stream)
            self._is_enqueuing = False
        device.check(code, "record an event")

    @property
    def must_restart(self) -> bool:
        """Whether the numbers should begin again, once nothing is under way."""
        return not self.memory.reaches_all and self._before > RESTART_AT

    def restart(self) -> None:
        """Let the numbers begin again, where only this rank's own streams and thread have them."""
        self.memory.restart()
        self._before = 0

    def describe(self) -> dict[str, str]:
        """Return facts about this path for the user: name -> sentence."""
        schedule = self.memory.schedule
        same = "yes, of arrays that fit into one piece"
        if schedule.is_ring:
            same = f"yes, of up to {ONE_SHOT_BYTES} bytes, and of what a ring does not serve"
        return {
            "GPU path through shared GPU memory": "collectives, but all_to_all by counts and with "
            "an op of the user's own",
            "GPU schedule": str(schedule),
            "GPU: same bits as the CPU backend": same,
        }

    # --- the end ----------------------------------------------------------------------------------

    def abort(self, limit_s: float) -> bool:
        """Release every stream that waits for another rank; return whether all work is over.

        The calls leave their outputs undefined. The host writes all words again and again, because
        streams that go on write their own numbers in between. Streams that are held up by something
        else may not reach their waits within `limit_s`; for them a thread goes on writing as long
        as needed.
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
        """Raise words until this rank's streams are through or time is up; return their code."""
        due_s = time.monotonic() + limit_s
        while True:
            for word in Word if self._has_begun else ():
                self.memory.raise_words(word, self._beyond(word))
            code = self._query()
            if code != self.device.not_ready or time.monotonic() > due_s:
                return code
            time.sleep(_PAUSE_S)

    def _beyond(self, word: Word) -> int:
        """Return a number above all that any call waits for."""
        if not self.memory.wraps:
            return (1 << 32) - 1
        return value_of(word, _AHEAD, self._before)

    def _query(self) -> int:
        if self._is_enqueuing:
            return self.device.not_ready
        if not self._has_begun:
            return 0
        with self.device, self.device.relaxed_capture():
            return self.device.query_event(self._event)

    def give_up(self, limit_s: float) -> bool:
        """Abort, and release everything unless a stream still runs; return whether that is done.

        Waits up to `limit_s` for this rank's streams, and as long again for others to release its
        memory. A thread releases what a stream still needs once the stream is through.
        """
        self.abort(limit_s)
        with self._ending_lock:
            ending = self._ending
            if ending is not None:
                self._closes_after_s = limit_s
        if ending is not None:  # the GPU uses all of it, or did a moment ago
            ending.join(limit_s)
            return not ending.is_alive()
        # The streams are through; or the GPU has failed, and nothing runs there any more.
        self.close(limit_s)
        return True

    def close(self, limit_s: float) -> None:
        """Release everything; nothing of this rank is under way."""
        self._is_ended = True
        device = self.device
        with contextlib.suppress(GpucollError), device:  # a GPU that has failed frees nothing
            if self._stream:
                device.synchronize_stream(self._stream)
                device.destroy_stream(self._stream)
            if self._event:
                device.destroy_event(self._event)
        self._event = self._stream = 0
        self._has_begun = False
        self.memory.close(limit_s)


class _Binder:
    """Makes the functions that enqueue the steps of one request."""

    def __init__(self, path: PeerPath, request: Request) -> None:
        self._path, self._request = path, request
        self._is_scan = request.collective.is_scan
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
                write(stream, address, memory.value_of(word, number, before)), "write a word"
            )
        address, wait = memory.word(step.rank, word), device.stream_wait_value
        return lambda stream, before: device.check(
            wait(stream, address, memory.value_of(word, number, before)), "wait for a word"
        )

    def _combine(self, step: Combine) -> Callable[[int], None]:
        like, op = self._request.data, self._request.op
        assert op is not None
        # In a scan, an average is over the ranks up to this one.
        n_ranks = self._path.memory.exchange.world_size
        divisor = len(step.sources) if self._is_scan else n_ranks
        written = [buffer_at(address, step.n_elements, like) for address in step.destinations]
        given = [buffer_at(address, step.n_elements, like) for address in step.sources]
        if step.role is Role.ALONE:
            return prepare_reduce(op, written, given, divisor=divisor)
        is_last = step.role is Role.LAST
        return prepare_ring_step(op, written, *given, is_last=is_last, divisor=divisor)


def buffer_at(address: int, count: int, like: Buffer) -> Buffer:
    """Return a buffer of `count` elements at an address, of the dtype and device of another."""
    return Buffer(address, (count,), like.dtype, like.item_bytes, None, like.device, like.stream)


# --- requests -------------------------------------------------------------------------------------


def may_go_around(op: ReduceOp | None, dtype: str) -> bool:
    """Return whether partial results of an operation can be held in the dtype.

    An average of float16 or float8 may be within its range although the sum is beyond.
    """
    return op is None or op.name != "avg" or dtype not in _NARROW


def ring_of(request: Request, exchange: rounds.Exchange, most_bytes: int) -> Rounds | None:
    """Return a request's steps around a ring; None, on all ranks alike, if it goes by rounds.

    Those of up to `most_bytes` do.
    """
    op, collective = request.op, request.collective
    if op is not None and op.function is not None:
        return None
    if request.sources or request.destinations or exchange.world_size < 2:
        return None
    scales, item_bytes = op is not None and op.name == "scaled_sum", request.data.item_bytes
    if collective in (Collective.ALL_REDUCE, Collective.ALL_REDUCE_LIST):
        if sum(x.size_bytes for x, _ in request.pairs) <= most_bytes:
            return None
        parts = [Part(x.address, out.address if out else 0, x.count) for x, out in request.pairs]
        return ring.all_reduce(exchange, parts, item_bytes, scales=scales)
    if collective not in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        return None
    x, out = request.both
    block_bytes = min(x.size_bytes, out.size_bytes)
    edges = request.edges(block_bytes, exchange.world_size)
    if edges[-1] <= most_bytes:
        return None
    if collective is Collective.ALL_GATHER:
        return ring.all_gather(exchange, x.address, out.address, edges)
    edges = [edge // item_bytes for edge in edges]
    places = x.address, out.address, edges, item_bytes
    return ring.reduce_scatter(exchange, *places, scales=scales)


def rounds_of(request: Request, exchange: rounds.Exchange) -> Rounds | None:
    """Return a request's steps; None, on all ranks alike, if this path cannot serve it."""
    if request.op is not None and request.op.function is not None:
        return None  # an operation of the user
    if request.sources or request.destinations:
        return None
    maker = _MAKERS.get(request.collective)
    return None if maker is None else maker(request, exchange)


def _reduction(request: Request, exchange: rounds.Exchange) -> Rounds:
    has_root, item_bytes = request.collective.has_root, request.data.item_bytes
    gets = request.collective.gets(exchange.rank, request.root)
    parts = [
        Part(x.address, out.address if gets and out else 0, x.count) for x, out in request.pairs
    ]
    size_bytes = sum(x.size_bytes for x, _ in request.pairs)
    shares = size_bytes > ONE_SHOT_BYTES and exchange.world_size > 2 and not has_root
    root = request.root if has_root else None
    return rounds.reduction(exchange, parts, item_bytes, shares=shares, root=root)


def _broadcast(request: Request, exchange: rounds.Exchange) -> Rounds:
    parts = [Part(x.address, out.address if out else 0, x.size_bytes) for x, out in request.pairs]
    return rounds.broadcast(exchange, parts, request.root)


def _gathering(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert x is not None
    edges = request.edges(x.size_bytes, exchange.world_size)
    root = request.root if request.collective.has_root else None
    return rounds.gathering(exchange, x.address, out.address if out else 0, edges, root)


def _scatter(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.source, request.destination
    assert out is not None
    edges = request.edges(out.size_bytes, exchange.world_size)
    return rounds.scatter(exchange, x.address if x else 0, out.address, edges, request.root)


def _all_to_all(request: Request, exchange: rounds.Exchange) -> Rounds | None:
    x, out = request.both
    if request.counts is not None:
        return None  # not all ranks know how many rounds it takes
    block_bytes = x.size_bytes // exchange.world_size
    return rounds.all_to_all(exchange, x.address, out.address, block_bytes)


def _reduce_scatter(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.both
    edges = [edge // x.item_bytes for edge in request.edges(out.size_bytes, exchange.world_size)]
    return rounds.reduce_scatter(exchange, x.address, out.address, edges, x.item_bytes)


def _scan(request: Request, exchange: rounds.Exchange) -> Rounds:
    x, out = request.both
    is_exclusive = request.collective.excludes_own
    if is_exclusive and request.op is not None:
        identity_of(x.dtype, request.op.name)  # raises ArgumentTypeError, on all ranks alike
    part = Part(x.address, out.address, x.count)
    return rounds.scan(exchange, part, x.item_bytes, is_exclusive=is_exclusive)


_MAKERS: dict[Collective, Callable[[Request, rounds.Exchange], Rounds | None]] = {
    Collective.ALL_REDUCE: _reduction,
    Collective.ALL_REDUCE_LIST: _reduction,
    Collective.REDUCE: _reduction,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _gathering,
    Collective.GATHER: _gathering,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.SCAN: _scan,
    Collective.EXCLUSIVE_SCAN: _scan,
}
