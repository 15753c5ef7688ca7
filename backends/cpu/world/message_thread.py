"""The thread that serves message connections while no other thread waits for a message.

It sleeps until data arrives, and then takes it a step further. A thread that waits awake looks at
the connections itself; meanwhile this thread leaves them alone, because it would only be woken in
vain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host import message_step
from gpucoll.backends.cpu.wires import loop
from gpucoll.backends.cpu.wires.words import Wire, Wires, WireState
from gpucoll.backends.cpu.world.message_wires import (
    Carriers,
    MessageWire,
    WireTable,
    first_grant,
    shut,
    wake,
)
from gpucoll.errors import AuthenticationError, SharedMemoryError, StateError
from gpucoll.group.host.segment_room import make_room
from gpucoll.group.world.failures import failure_of
from gpucoll.group.world.group import WorldGroup
from gpucoll.group.world.pairs import Pair, Pairs
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.words import Context, TransferTable

_Words = npt.NDArray[np.int64]
_BUSY_S, _PENDING_S, _IDLE_S = 0.005, 0.02, 0.5
"""Longest sleep: while another thread waits awake, while messages are pending, and otherwise."""
_AGAIN_S = 0.001
_CARRIED_SLICE_NS = 100_000
"""Longest sleep of a wait for data that carriers bring, because nothing wakes such a wait."""
_TELLING_S = 1.0
"""How long, after a connection has ended, others have to report why it did."""
_LOST_S = 0.05
"""How long MPI has to end what a lost communicator has left behind."""
_LEAVING_S = 5.0
"""How long a rank that closes waits until its last messages are on their way."""
_all: weakref.WeakSet[MessageThread] = weakref.WeakSet()


class MessageThread:
    """The thread, and the connections.

    It does not keep the communicator alive: it looks the communicator up each time that it needs
    it.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    pairs : Pairs
        Opens connections.
    table, steps : array
        The words of the table of messages, and of the context for its steps.
    ends : dict
        The number that the table uses for each rank of another host, by rank.
    carriers : Carriers, optional
        Make carriers that replace the connections, on all ranks; this thread owns them.
    """

    def __init__(
        self,
        group: WorldGroup,
        pairs: Pairs,
        table: _Words,
        steps: _Words,
        ends: dict[int, int],
        carriers: Carriers | None = None,
    ) -> None:
        self._find_group = weakref.ref(group)
        self._pairs, self._table, self._steps_context, self._ends = pairs, table, steps, ends
        self._carriers = carriers
        self._table_address = table.ctypes.data
        self._members = group.host.members
        self._rank = group.host.rank
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        n_ends = group.host.members.layout.ends
        self.wires = WireTable(n_ends, self._event_fd)
        self._left_memory = bytearray(8 * n_ends)
        self.left: _Words = np.frombuffer(self._left_memory, np.int64)
        """By the table's number: 1 if a rank of another host sends nothing more."""
        self._wanted: deque[int] = deque()
        self._by_rank: dict[int, MessageWire] = {}
        self._failing: dict[MessageWire, float] = {}
        self._ended: set[MessageWire] = set()
        self._cut: dict[MessageWire, float] = {}
        """Carried connections whose sockets have ended, and until when to wait for the reason."""
        self._is_setting_up = False
        self._looks_at = 0.0
        self._last_steps = self._last_moves = 0
        self._is_stopping = False
        self._context = group.host.context
        self._step: Callable[[int], int] | None = None
        self.post: Callable[[int, int, int], int]
        """`message_step.message_post`, and sending what is ready, once there is a connection."""
        self._thread = threading.Thread(target=self._run, name="gpucoll-message", daemon=True)
        _all.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def want(self, rank: int) -> None:
        """Open a connection to a rank, unless there is one."""
        self._wanted.append(rank)
        wake(self._event_fd)

    def step(self) -> None:
        """Take all messages and connections a step further, once there is a connection."""
        if self._step is not None:
            self._step(self._table_address)

    def _set_up(self) -> None:
        """Make every step of the table serve connections, too: the first one has been opened."""
        self._is_setting_up = True  # loops may have to be compiled
        words, wires = self._table, self.wires.words
        step, post = loop.wires_step.address, loop.wires_post.address
        if self._carriers is not None:
            wires[Wires.carry_away], wires[Wires.carry_here] = self._carriers.functions
            words[TransferTable.longest_slice_ns] = _CARRIED_SLICE_NS
        wires[Wires.host_step] = message_step.message_step.address
        wires[Wires.host_post] = message_step.message_post.address
        self.post = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(post)
        words[TransferTable.fetch] = loop.wires_fetch.address
        ordering.store(self._table_address + 8 * TransferTable.wires, self.wires.address)
        words[TransferTable.post], words[TransferTable.step] = post, step
        self._context[Context.message_step] = step
        self._step = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(step)
        self._is_setting_up = False

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except StateError:  # the segment was closed
            return
        except Exception as error:  # a defect of ours: messages would not be received any more
            if not self._is_stopping and (group := self._find_group()) is not None:
                group.news.go_deaf(error)
                group.state.ring()
                raise

    def _sleepers(self) -> int:
        bell = self._members.layout.bells + self._rank * layout.LINE_BYTES
        return self._members.load(bell) >> 32

    def _is_needed(self) -> bool:
        """Return whether no other thread serves the connections; tell threads that go to sleep."""
        steps = int(self.wires.words[Wires.n_steps])
        is_busy = steps != self._last_steps and bool(self._table[TransferTable.waiters])
        self._last_steps = steps
        place = self.wires.address + 8 * Wires.is_looking
        if is_busy and not self._sleepers():
            ordering.store(place, 0)
            if not self._sleepers():
                return False
        ordering.store(place, 1)
        return True

    def _patience_s(self) -> float:
        """Return the longest sleep while the connections wake this thread when data arrives."""
        if self._carriers is None or not self.wires.wires:
            return _IDLE_S
        words = self._table  # carriers do not wake it, so it looks again and again
        moves, self._last_moves = self._last_moves, int(words[TransferTable.moves])
        is_busy = words[TransferTable.waiters] or words[TransferTable.pending]
        if (
            is_busy
            or moves != self._last_moves
            or any(wire.is_blocked for wire in self._open_wires())
        ):
            return _AGAIN_S
        return _PENDING_S

    def _turn(self) -> None:
        """Sleep until something happens, and handle it."""
        poll, is_looking = select.poll(), self._is_needed()
        poll.register(self._event_fd, select.POLLIN)
        self._pairs.register(poll)
        if is_looking:
            for wire in self._open_wires():
                if wire.carrier is None:
                    poll.register(wire.end, select.POLLIN | (select.POLLOUT * wire.is_blocked))
                elif wire not in self._cut:
                    poll.register(wire.end, select.POLLIN)
        limit_s = self._patience_s() if is_looking else _BUSY_S
        if self._failing or self._pairs.is_connecting or self._table[TransferTable.pending]:
            limit_s = min(limit_s, _PENDING_S)
        if any(wire.is_waiting and not wire.is_blocked for wire in self._open_wires()):
            limit_s = _AGAIN_S  # another thread was just looking
        ready = {fd for fd, _ in poll.poll(1000 * limit_s)}
        if self._event_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        if self._is_stopping:
            return
        while self._wanted:
            self._pairs.want(self._wanted.popleft())
        self._note_cut(ready)
        for pair in self._pairs.handle(ready):
            self._add(pair)
        if is_looking or limit_s == _AGAIN_S:
            self.step()
        self._serve()
        self._look_for_ends()

    def _open_wires(self) -> list[MessageWire]:
        return [wire for wire in self.wires.wires if wire.state == WireState.OPEN]

    def _add(self, pair: Pair) -> None:
        ring_bytes = int(self._steps_context[Context.large_ring_bytes])
        carrier = None if self._carriers is None else self._carriers.to(pair.rank)
        wire = MessageWire(pair, self._ends[pair.rank], first_grant(ring_bytes), carrier)
        if self._step is None:
            self._set_up()
        self.wires.add(wire)
        self._by_rank[pair.rank] = wire  # last: a rank that closes waits for it
        self.step()

    def _serve(self) -> None:
        """Do the work that compiled code leaves to Python."""
        while self.wires.take_need():
            for wire in self._open_wires():
                try:
                    wire.seal_and_open()
                except AuthenticationError as error:
                    self._lose(wire, str(error))
                if wire.needs_room:
                    self._make_room(wire)
            self.step()

    def _make_room(self, wire: MessageWire) -> None:
        try:
            make_room(self._steps_context)
        except SharedMemoryError as error:
            if (group := self._find_group()) is not None:
                group.state.write(failure_of(error, group.rank))
                group.state.ring()
            return
        wire.note_room()

    # --- ends -------------------------------------------------------------------------------------

    def _note_cut(self, ready: set[int]) -> None:
        """Note which sockets that only open and close a carried connection have ended."""
        now = time.monotonic()
        for wire in self._open_wires():
            if wire.carrier is not None and wire.end.fileno() in ready and wire not in self._cut:
                self._cut[wire] = now + _TELLING_S
            if now > self._cut.get(wire, now) and wire.brings_nothing:
                wire.words[Wire.state] = WireState.FAILED

    def _look_for_ends(self) -> None:
        """Handle connections that have ended, and ranks that have closed the communicator."""
        now = time.monotonic()
        for wire in self.wires.wires:
            if wire.state != WireState.OPEN and wire not in self._ended:
                self._ended.add(wire)
                self.wires.forget(wire)
                wire.close()
                if wire.state == WireState.FAILED and not wire.has_said_bye:
                    self._failing[wire] = now + _TELLING_S
        for wire in [wire for wire, moment in self._failing.items() if now >= moment]:
            del self._failing[wire]
            self._lose(wire, wire.reason)
        if self._table[TransferTable.pending] and now >= self._looks_at:
            self._looks_at = now + _PENDING_S
            self._look_for_closed()

    def _lose(self, wire: MessageWire, reason: str) -> None:
        if (group := self._find_group()) is not None and not group.is_aborted:
            group.news.lose_rank(wire.rank, reason)

    def _look_for_closed(self) -> None:
        """Note which ranks send nothing more; those with a connection report it there."""
        group = self._find_group()
        if group is None:
            return
        for rank, end in self._ends.items():
            wire = self._by_rank.get(rank)
            is_over = wire is None or wire.state == WireState.FAILED
            if is_over and not self.left[end] and group.has_closed(rank):
                self.left[end] = 1

    # --- the end ----------------------------------------------------------------------------------

    def say_bye(self, has_sent: list[int]) -> None:
        """Tell all ranks that nothing follows, and wait until they have everything; see `end`.

        Parameters
        ----------
        has_sent : list of int
            The ranks to which something may be under way.
        """
        stop = time.monotonic() + _LEAVING_S
        awaited = {rank for rank in has_sent if not self.left[self._ends[rank]]}
        said: set[MessageWire] = set()
        while time.monotonic() < stop and not self._is_over():
            wires = self._open_wires()
            for wire in wires:
                if not wire.words[Wire.says_bye]:
                    ordering.store(wire.address + 8 * Wire.says_bye, 1)
                elif wire.has_said_bye and wire not in said:
                    if wire.carrier is None:  # a carrier's data might be overtaken
                        shut(wire.end)
                    said.add(wire)
            missing = awaited - self._by_rank.keys()
            if self._is_setting_up and self._thread.is_alive():
                stop = time.monotonic() + _LEAVING_S
            if not wires and not missing:
                return
            self.step()
            poll = select.poll()
            for wire in wires:
                if wire.carrier is None and (fd := wire.end.fileno()) >= 0:  # else it was closed
                    poll.register(fd, select.POLLIN | (select.POLLOUT * (wire not in said)))
            is_slow = not missing and len(said) >= len(wires) and self._carriers is None
            poll.poll(1000 * (_PENDING_S if is_slow else 0.002))

    def _is_over(self) -> bool:
        group = self._find_group()
        return group is None or group.is_aborted or bool(self._table[TransferTable.is_dead])

    def stop(self) -> None:
        """End the thread; return when it has ended."""
        self._is_stopping = True
        wake(self._event_fd)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def end_carriers(self) -> None:
        """End everything that is under way: the table of messages is dead."""
        carriers, self._carriers = self._carriers, None
        if carriers is not None:
            group = self._find_group()
            carriers.close(_LOST_S if group is None or group.is_aborted else _TELLING_S)

    def drop(self) -> None:
        """Close all descriptors: the table of messages is dead, or this is a forked child."""
        for wire in self.wires.wires:
            wire.close()
        self._pairs.close()
        event_fd, self._event_fd = self._event_fd, -1
        if event_fd >= 0:
            os.close(event_fd)


def _after_fork() -> None:
    # A child that outlives its parent would keep the connections open, which hides the parent's
    # death.
    for thread in list(_all):
        thread.drop()


os.register_at_fork(after_in_child=_after_fork)
