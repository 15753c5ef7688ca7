"""A ring of GPUs on different hosts: the exchanges of `direct.peer`, in page-locked host memory.

A rank's kernels write what the ring's next rank gets into slots here, and read what the previous
one has sent from others, straight through the bus. The thread that moves messages sends and
receives the chunks in between (`gpucoll.backends.direct.messages`), while other chunks are being
combined. So the steps of `gpucoll.backends.direct.ring` serve here without a change.

The words that another rank's GPU writes on one host are written by this rank's own thread: a chunk
has come (`Word.READY` of the previous rank), or has been sent (`Word.DONE` of the next).
"""

from __future__ import annotations

import contextlib
from typing import Final

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.inner import Inner
from gpucoll.backends.direct.messages import Flow, MessageEngine, WordPair
from gpucoll.backends.direct.pinned import LAST, WORD_BYTES, Slots, Words
from gpucoll.backends.direct.ring import N_SLOTS, slot_bytes
from gpucoll.backends.direct.rounds import Exchange, Rounds, Word
from gpucoll.backends.direct.schedule import Schedule
from gpucoll.backends.protocol import MessageRequest
from gpucoll.devices import Device
from gpucoll.errors import BackendError, GpucollError
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.words import Kind

HALF_BYTES: Final = 4 << 20
"""Half of an exchange: slots of 1 MiB, the size of the pieces of messages."""
TAG: Final = 1 << 30
"""Above the tags of messages: chunks are matched by their order."""
TRIAL_BYTES: Final = 256
_NOTICED_S: Final = 5.0
"""Time limit for a thread that looks each millisecond."""


class Wires:
    """One rank's exchanges, to the ring's next rank and from the previous one.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    inner : Inner
        The group that moves the chunks.
    engine : MessageEngine
        Moves them, in its thread.
    ranks : sequence of int
        The ranks of the ring, as the group numbers them, in its order; at least two.
    """

    reaches_all = False
    wraps = False

    def __init__(
        self, device: Device, inner: Inner, engine: MessageEngine, ranks: tuple[int, ...]
    ) -> None:
        self.device = device
        self._engine, self._ranks = engine, ranks
        place, size = ranks.index(inner.group.rank), len(ranks)
        self._place, self._before, self._next = place, (place - 1) % size, (place + 1) % size
        self.schedule = Schedule(True, tuple(range(size)), "the ranks are on different hosts")
        exchange = Exchange(place, size, (), HALF_BYTES)
        self._trial, self._page = 0, None
        self._slots: list[Slots] = []
        try:
            self._page = Words(device)
            self._trial = device.allocate(TRIAL_BYTES)
            for _ in range(2):
                self._slots.append(Slots(device, inner.backend, 2 * HALF_BYTES))
        except BaseException:
            self._free()
            raise
        addresses = [0] * size
        addresses[self._next], addresses[place] = (each.on_gpu for each in self._slots)
        self.exchange = exchange._replace(addresses=tuple(addresses))
        page = self._page.address
        self._out, self._in = (WordPair(page + at * WORD_BYTES) for at in (0, 2))
        self._spare = page + 4 * WORD_BYTES
        ordering.store(self._spare, LAST)

    @property
    def trial(self) -> int:
        """GPU memory in which this rank may try a kernel."""
        return self._trial

    def word(self, rank: int, word: Word) -> int:
        """Return the address of a rank's word; those that nobody waits for here are beyond all."""
        words = {
            (self._place, Word.READY): self._out.by_gpu,
            (self._next, Word.DONE): self._out.by_host,
            (self._place, Word.DONE): self._in.by_gpu,
            (self._before, Word.READY): self._in.by_host,
        }
        return words.get((rank, word), self._spare)

    def value_of(self, word: Word, number: int, before: int) -> int:
        """Return the value of a call's number: both words count chunks, from the first call on."""
        return before + number

    def begin(self, made: Rounds, before: int) -> None:
        """Have the thread move a call's chunks as they become ready."""
        sent, received = made.traffic
        following, previous = self._ranks[self._next], self._ranks[self._before]
        end = before + made.n_rounds
        width = slot_bytes(self.exchange)
        out, into = self._slots
        self._engine.begin(
            [
                Chunks(Kind.SEND, following, sent, out, self._out, (before, end, width)),
                Chunks(Kind.RECV, previous, received, into, self._in, (before, end, width)),
            ]
        )

    def raise_words(self, word: Word, value: int) -> None:
        """Write the words that streams wait for, so that none waits any more."""
        self._engine.abort()
        for words in (self._out, self._in):
            ordering.store(words.by_host, LAST)

    def restart(self) -> None:
        """Set all words to 0: nothing is under way, once the thread has noticed it."""
        if not self._engine.forget(self._slots, _NOTICED_S):
            raise BackendError(f"{self.device.label}: the thread of GPU messages does not go on")
        for words in (self._out, self._in):
            ordering.store(words.by_gpu, 0)
            ordering.store(words.by_host, 0)

    def close(self, limit_s: float) -> bool:
        """Free the memory, which no stream uses; return whether that is done.

        If the thread still uses it after `limit_s`, it is left until the process ends.
        """
        if not self._engine.forget(self._slots, limit_s):
            _left_in_use.append(self)
            return False
        self._free()
        return True

    def _free(self) -> None:
        for slots in self._slots:
            with contextlib.suppress(GpucollError):  # a GPU that has failed frees nothing
                slots.close()
        with contextlib.suppress(GpucollError):
            if self._trial:
                self.device.free(self._trial)
            if self._page is not None:
                self._page.close()
        self._slots, self._trial, self._page = [], 0, None


class Chunks(Flow):
    """The chunks of one call to the next rank, or from the previous one.

    Parameters
    ----------
    kind : Kind
        Whether they are sent or received.
    peer : int
        The other rank.
    sizes : sequence of int
        Their sizes in bytes.
    slots : Slots
        The slots that they take in turn.
    words : WordPair
        The word by the GPU counts chunks written or taken, that by the host chunks sent or come.
    place : (int, int, int)
        The words' value before and after the call, and the size of a slot.
    """

    is_message = False

    def __init__(
        self,
        kind: Kind,
        peer: int,
        sizes: tuple[int, ...],
        slots: Slots,
        words: WordPair,
        place: tuple[int, int, int],
    ) -> None:
        whole = Buffer(slots.address, (sum(sizes),), "uint8", 1, slots)
        super().__init__(MessageRequest(kind, peer, TAG, whole), TAG, slots, words)
        self.base, self._last, self._slot_bytes = place
        self.count, self._sizes = len(sizes), sizes
        # A stream counts the chunks that it writes, but ends what it takes with the call's end.
        self.end = self.base + self.count if self.sends else self._last

    def value(self, done: int) -> int:
        """Return what the host's word says when so many chunks are over."""
        return self.base + done if done < self.count else self._last

    def part(self, number: int) -> tuple[int, int, int]:
        """Return 0, a chunk's offset in the slots, and its size."""
        return 0, number % N_SLOTS * self._slot_bytes, self._sizes[number]

    def is_ready(self, by_gpu: int) -> bool:
        """Return whether the next chunk was written, or its slot is free."""
        needed = self.started + 1 if self.sends else max(self.started + 1 - N_SLOTS, 0)
        return by_gpu >= self.base + needed

    def let_go(self, engine: MessageEngine) -> None:
        """Keep the memory: it is the ring's."""


_left_in_use: list[Wires] = []
"""Wires whose memory a thread may still use."""
