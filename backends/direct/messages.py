"""Messages of GPU arrays, in pieces through host memory, by messages of the CPU backend.

A separate thread advances all pending messages that can go on. So a message that no rank receives
holds up neither other messages nor collectives. For GPU arrays, words report how far their streams
are. Host arrays (of a communicator with ``mixed=True``) are copied by the thread itself without a
stream: however many are pending, none waits in a queue of the GPU. Messages between two ranks match
in the order in which they were issued, as in the vendors' libraries.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.direct.engine import PAUSES_S
from gpucoll.backends.direct.inner import NEVER_S, Inner, told
from gpucoll.backends.direct.pinned import LAST, WORD_BYTES, Slots, Words
from gpucoll.backends.protocol import MessageRequest, Transfers
from gpucoll.devices import Device
from gpucoll.errors import GpucollError, MismatchError
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.words import Kind
from gpucoll.wording import rank_of

PIECE_BYTES = 1 << 20
_TAGS = 1 << 29
_WITHIN_CALLS = 1 << 29
"""The first tag of messages within collectives."""
_RENEWED_AT = 1 << 30


class WordPair:
    """The two words of a message: one written by the GPU, one by the host."""

    def __init__(self, address: int) -> None:
        self.by_gpu, self.by_host = address, address + WORD_BYTES
        self.value = 0
        """The value of both while nothing uses them."""


class Flow:
    """A message under way, or other data that goes from one rank to another in pieces.

    Attributes
    ----------
    words : WordPair or None
        None: the array lies in host memory, and no stream is involved.
    base, end : int
        The words' value before its first piece, and the value when no stream uses them any more.
    started, done : int
        How many pieces were given to the CPU backend, and how many are over.
    """

    is_message = True
    """Whether it is a call of its own; otherwise the ranks compare the call that it is part of."""

    def __init__(
        self, request: MessageRequest, tag: int, slots: Slots, words: WordPair | None
    ) -> None:
        assert request.buffer is not None
        self.buffer = request.buffer
        """Keeps a host array alive."""
        self.sends = request.kind == Kind.SEND
        self.kind, self.peer, self.tag = request.kind, request.peer, tag
        self.address, self.size_bytes = request.buffer.address, request.buffer.size_bytes
        self.count = -(-self.size_bytes // PIECE_BYTES)
        self.slots, self.words = slots, words
        self.base = 0 if words is None else words.value
        self.end = self.base + self.count
        self.started = self.done = 0
        self.pending: deque[Transfers] = deque()

    @property
    def on_stream(self) -> WordPair:
        """The words of a message whose array a stream reads or writes."""
        assert self.words is not None
        return self.words

    def value(self, done: int) -> int:
        """Return what the host's word says when so many pieces are over."""
        return self.base + done

    def part(self, number: int) -> tuple[int, int, int]:
        """Return a piece's offset on the GPU, its offset in the slots, and its size."""
        start = number * PIECE_BYTES
        return start, number % 2 * PIECE_BYTES, min(self.size_bytes - start, PIECE_BYTES)

    def next_request(self, by_gpu: int) -> MessageRequest | None:
        """Return the next piece for the CPU backend if its memory is ready."""
        if self.started == self.count:
            return None
        if not self.is_ready(by_gpu):
            return None
        start, offset, size_bytes = self.part(self.started)
        if self.words is None and self.sends:
            ctypes.memmove(self.slots.address + offset, self.address + start, size_bytes)
        buffer = Buffer(self.slots.address + offset, (size_bytes,), "uint8", 1, self.slots)
        return MessageRequest(self.kind, self.peer, self.tag, buffer)

    def is_ready(self, by_gpu: int) -> bool:
        """Return whether the memory of the next piece is ready, by the GPU's word."""
        if self.words is None:  # there are slots for two pieces
            return self.started < self.done + 2
        return by_gpu >= self.base + (self.started + 1 if self.sends else self.started - 1)

    def let_go(self, engine: MessageEngine) -> None:
        """Give its memory back to the engine, whose lock is held."""
        engine.give_back(self)

    def keep_received(self) -> None:
        """Copy the received piece to a host array."""
        start, offset, size_bytes = self.part(self.done)
        ctypes.memmove(self.address + start, self.slots.address + offset, size_bytes)


class HostMessages:
    """Messages of host arrays that are made together.

    Parameters
    ----------
    engine : MessageEngine
        Moves them.
    requests : sequence of MessageRequest
    """

    def __init__(self, engine: MessageEngine, requests: Sequence[MessageRequest]) -> None:
        self._engine, self.requests = engine, requests
        self._flows: list[Flow] = []

    def flows(self) -> list[Flow]:
        """Return new flows that move them, to be started by the caller."""
        self._flows = self._engine.flows_of(self.requests)
        return self._flows

    def is_over(self) -> bool:
        """Return whether they are over; to be called only after they were started."""
        return self._engine.is_over(self._flows)


class MessageEngine:
    """All messages of one communicator's GPU arrays.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    inner : Inner
        A group of the CPU backend with the same ranks.
    """

    def __init__(self, device: Device, inner: Inner) -> None:
        self._device = device
        self._inner = inner
        self._pages: list[Words] = []
        self._free_words: list[WordPair] = []
        self._free_slots: dict[int, list[Slots]] = {}
        self._all_slots: list[Slots] = []
        self._sequences: dict[tuple[Kind, int, bool], int] = {}
        self._flows: list[Flow] = []
        self._lock = threading.RLock()  # not the condition: an interrupt can leave that locked
        self._changed = threading.Condition(self._lock)
        self._is_stopping = self._is_aborted = False
        self._thread: threading.Thread | None = None
        self.error: GpucollError | None = None
        """The error that ended it."""
        self.failed_at_s = 0.0
        self.is_own_error = False
        """Whether that error belongs to one message, instead of being seen by all ranks."""

    # --- enqueuing --------------------------------------------------------------------------------

    def flows_of(
        self, requests: Iterable[MessageRequest], *, within_call: bool = False
    ) -> list[Flow]:
        """Return flows for messages, with memory for each; `begin` starts them.

        Those `within_call` are parts of a collective, and never match messages of the user.
        """
        made = []
        for request in requests:
            if request.buffer is None or not request.buffer.size_bytes:
                continue
            key = request.kind, request.peer, within_call
            tag = self._sequences.get(key, 0)
            size_bytes = min(request.buffer.size_bytes, 2 * PIECE_BYTES)
            is_on_host = request.buffer.device == HOST_ARRAYS
            slots, words = self._take_slots(size_bytes), None if is_on_host else self._take_words()
            self._sequences[key] = (tag + 1) % _TAGS
            flow = Flow(request, tag + within_call * _WITHIN_CALLS, slots, words)
            flow.is_message = not within_call
            made.append(flow)
        return made

    def begin(self, flows: Sequence[Flow]) -> None:
        """Have the thread do the host's part; call this before anything is on a stream."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gpucoll-direct-messages", daemon=True
                )
                self._thread.start()
            self._flows += flows
            if self._is_aborted:
                self._release_streams()
            self._changed.notify_all()

    def _take_slots(self, size_bytes: int) -> Slots:
        size_bytes = 1 << max(size_bytes - 1, 4095).bit_length()
        with self._lock:
            if free := self._free_slots.setdefault(size_bytes, []):
                return free.pop()
        # Without the lock, which the thread needs: the driver may wait for the GPU here.
        made = Slots(self._device, self._inner.backend, size_bytes)
        self._all_slots.append(made)
        return made

    def _take_words(self) -> WordPair:
        with self._lock:
            if self._free_words:
                return self._free_words.pop()
        page = Words(self._device)
        self._pages.append(page)
        starts = range(0, page.count * WORD_BYTES, 2 * WORD_BYTES)
        made = [WordPair(page.address + start) for start in starts]
        with self._lock:
            self._free_words += made[1:]
        return made[0]

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while True:
            with self._lock:
                while not self._flows and not self._is_stopping and not self._is_aborted:
                    self._changed.wait()
                if self._is_aborted or (self._is_stopping and not self._flows):
                    return
                flows = list(self._flows)
            try:
                has_moved = self._step(flows)
            except BaseException as error:
                self._note(error)
                return
            pause_s = PAUSES_S[0] if has_moved else min(1.5 * pause_s, PAUSES_S[1])
            if not has_moved:
                time.sleep(pause_s)

    def _step(self, flows: Sequence[Flow]) -> bool:
        """Advance every message as far as possible now; return whether any has moved."""
        has_moved, has_looked = False, False
        for flow in flows:
            by_gpu = 0 if flow.words is None else ordering.load(flow.words.by_gpu)
            if self._is_aborted:  # the words now only show that the streams were released
                return False
            while (request := flow.next_request(by_gpu)) is not None:
                flow.pending.append(self._inner.backend.messages.start([request], NEVER_S))
                flow.started += 1
                has_moved = True
            if flow.pending and not has_looked:
                flow.pending[0].look()  # advances all of them
                has_looked = True
            while flow.pending and flow.pending[0].is_over():
                self._settle(flow, flow.pending.popleft())
                has_moved = True
            if flow.done == flow.count and (flow.words is None or by_gpu >= flow.end):
                self._let_go(flow)
                has_moved = True
        return has_moved

    def _settle(self, flow: Flow, transfers: Transfers) -> None:
        transfers.settle()
        (request,) = transfers.requests
        if request.error is not None:
            raise request.error
        _, _, size_bytes = flow.part(flow.done)
        if request.is_misfit or (not flow.sends and request.found_bytes != size_bytes):
            group = self._inner.group
            self.is_own_error = flow.is_message
            raise MismatchError(
                f"{rank_of(group.rank, group.world_size)} receives a message of another size from "
                f"rank {flow.peer} than was sent: expected {flow.size_bytes} bytes. Both ranks "
                "must give arrays of the same size; messages of GPU arrays match in order. The "
                "communicator is broken: close it"
            )
        with self._lock:
            if not self._is_aborted:  # else the array belongs to its user again
                if flow.words is None and not flow.sends:
                    flow.keep_received()
                flow.done += 1
                if flow.words is not None:
                    ordering.store(flow.words.by_host, flow.value(flow.done))

    def _let_go(self, flow: Flow) -> None:
        with self._lock:
            self._flows.remove(flow)
            flow.let_go(self)

    def give_back(self, flow: Flow) -> None:
        """Keep a message's words and slots for later ones, until the end."""
        if flow.words is not None:
            flow.words.value = flow.end
            if flow.end < _RENEWED_AT:
                self._free_words.append(flow.words)
        # Freeing it would wait for the GPU, which waits for this thread.
        self._free_slots[flow.slots.size_bytes].append(flow.slots)

    def _note(self, error: BaseException) -> None:
        if self._is_aborted:
            return
        self.failed_at_s = time.monotonic()
        self.error = told(error, "a GPU message")

    # --- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Release the streams that wait for messages."""
        with self._lock:
            self._is_aborted = True
            self._release_streams()
            self._changed.notify_all()

    def _release_streams(self) -> None:
        for flow in self._flows:
            if flow.words is not None:
                ordering.store(flow.words.by_host, LAST)

    def is_over(self, flows: Sequence[Flow]) -> bool:
        """Return whether messages are done, or never will be."""
        return self._is_aborted or all(flow.done == flow.count for flow in flows)

    @property
    def is_drained(self) -> bool:
        """Whether no stream uses this memory any more."""
        on_streams = [(flow.words, flow.end) for flow in self._flows]
        return all(words is None or ordering.load(words.by_gpu) >= end for words, end in on_streams)

    def stop(self, limit_s: float) -> bool:
        """End the thread, once its messages are over or aborted; return whether it has ended."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        if self._thread is threading.current_thread():
            return False
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def forget(self, slots: Sequence[Slots], limit_s: float) -> bool:
        """Wait until nothing here uses these slots any more; return whether that is so.

        No stream uses them: what goes through them is over, or the engine was aborted.
        """
        due_s = time.monotonic() + limit_s
        while any(flow.slots in slots for flow in list(self._flows)):
            if self._is_aborted:
                if not self.stop(limit_s):
                    return False
                self._flows = [flow for flow in self._flows if flow.slots not in slots]
            elif time.monotonic() > due_s:
                return False
            else:
                time.sleep(PAUSES_S[0])
        return True

    def close(self) -> None:
        """Free the memory; nothing uses it."""
        for slots in self._all_slots:
            slots.close()
        for page in self._pages:
            page.close()
        self._all_slots, self._pages, self._flows = [], [], []
