"""The direct backend: it stages GPU arrays through host memory, or uses shared GPU memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gpucoll.backends.choice import HOST_ARRAYS, Wish
from gpucoll.backends.direct import between_compressed
from gpucoll.backends.direct.between import BetweenHosts
from gpucoll.backends.direct.between_compressed import Exchanged
from gpucoll.backends.direct.engine import Engine, Job, StagedCall
from gpucoll.backends.direct.host_arrays import is_on_host, number_in_one_piece, on_device
from gpucoll.backends.direct.inner import Inner
from gpucoll.backends.direct.kernel_reductions import composed
from gpucoll.backends.direct.messages import Flow, HostMessages, MessageEngine
from gpucoll.backends.direct.peer import PeerLaunch, PeerPath
from gpucoll.backends.direct.piece_slots import PieceSlots, in_host_memory
from gpucoll.backends.direct.pieces import Copy, pieces_of, slot_bytes_for
from gpucoll.backends.direct.pinned import LAST, WORD_BYTES, Words
from gpucoll.backends.gpu import compressed
from gpucoll.backends.gpu.composed import ComposedLaunch
from gpucoll.backends.gpu.scratch import Scratch
from gpucoll.backends.gpu.steps import Place, Step, enqueue_steps
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.devices import Device
from gpucoll.errors import (
    AbortedError,
    BackendError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)

RESET_AT = 1 << 30
"""The count of words at which they restart from 0, as soon as nothing is under way."""
_TOLD_BY_OTHERS_S = 1.0
"""How long errors that all ranks notice are left to the ranks that can describe them better."""
_PEERS_LET_GO_S = 1.0
"""How long to wait for other ranks before this rank's part of shared memory is left in place."""
_SEEN_BY_ALL = (AbortedError, DeadlineError, MismatchError, PeerLostError, StateError)

CollectiveLaunch = StagedCall | PeerLaunch | ComposedLaunch
Launch = CollectiveLaunch | tuple[MessageRequest, ...] | HostMessages


class DirectBackend:
    """Moves GPU arrays between the ranks: through host memory, MPI or memory that the GPUs share.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    inner : Inner
        A group of the CPU backend with the same ranks.
    wish : Wish
        The user's settings.
    has_gpu : bool
        Whether the device is a GPU; otherwise it stands for the host memory of a rank without one
        (`mixed`).
    """

    name = "direct"

    def __init__(self, device: Device, inner: Inner, wish: Wish, *, has_gpu: bool = True) -> None:
        self.device = device
        self.wish = wish
        self.has_gpu = has_gpu
        self.inner = inner
        self.in_driver: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Surrounds driver calls that may block: `gpucoll.backends.gpu.issuer`."""
        self._rank, self._world_size = inner.group.rank, inner.group.world_size
        self._slot_bytes = slot_bytes_for(self._world_size)
        self._slots: PieceSlots | None = None
        self._words = Words(device)
        self._drained_word = self._words.address + 2 * WORD_BYTES
        self._issued = 0
        self._tail = 0
        """An event after the last staged call."""
        self._last_stream: int | None = None
        self.engine = Engine(inner, self._words)
        self.messages = MessageEngine(device, inner)
        self.peer: PeerPath | None = None
        """Through memory that the ranks' GPUs share; None: for the reason in `why_staged`."""
        self.why_staged = "their memory was not looked at"
        self.between: BetweenHosts | None = None
        """Reductions between hosts; None: there is one host, or for the reason in `why_between`."""
        self.why_between = ""
        self.slots_for_mpi: PieceSlots | None = None
        """Slots on the GPU that MPI reads and writes directly; None: it does not."""
        self.reduces_on_gpu = False
        """Whether kernels reduce the data that MPI has moved."""
        self.by_mpi = ""
        """How arrays go through MPI, and why; empty if they do not."""
        self.scratch = Scratch(device)
        self._is_open = True

    @property
    def paths(self) -> list[PeerPath]:
        """What has streams that may wait for other ranks, and memory."""
        if self.between is not None:
            return self.between.paths
        return [] if self.peer is None else [self.peer]

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Launch:
        """Return the launch of a collective; ArgumentTypeError if the dtype lacks the op."""
        place = Place(self._rank, self._world_size)
        if request.compression is not None:
            request = on_device(request, self.device, has_gpu=self.has_gpu)
            steps = None
            if self.between is not None:
                steps = between_compressed.compose(self.between, request, self.device.label)
            steps = steps or compressed.compose(request, place, self.device.label)
            return ComposedLaunch(steps, self.prepare)
        if self.peer is not None and (launch := self.peer.prepare(request)) is not None:
            return launch
        if self.between is not None and (steps := self.between.compose(request)) is not None:
            return ComposedLaunch(steps, self.prepare)
        if self.reduces_on_gpu and (found := composed(request, place, self.device.label)):
            return ComposedLaunch(found, self.prepare)
        return self._prepare_staged(request)

    def _prepare_staged(self, request: Request) -> StagedCall:
        slots = self._slots_of(request)
        if request.keeps:
            pieces = number_in_one_piece(request)
        else:
            pieces = pieces_of(request, self._rank, self._world_size, slots.slot_bytes)
        made = StagedCall(pieces, slots, is_on_host(request))
        made.prepared(0)
        return made

    def _slots_of(self, request: Request) -> PieceSlots:
        """Return the slots for the request's pieces; all ranks choose in the same way."""
        # MPI moves data in GPU memory; our kernels reduce on the host.
        if self.slots_for_mpi is not None and not request.collective.reduces:
            return self.slots_for_mpi
        if self._slots is None:
            self._slots = in_host_memory(self.device, self.inner, self._slot_bytes)
        return self._slots

    def prepare_messages(self, requests: Sequence[MessageRequest]) -> Launch:
        """Return one launch for all these sends and receives."""
        if any(each.buffer is not None and each.buffer.device == HOST_ARRAYS for each in requests):
            return HostMessages(self.messages, requests)
        return tuple(requests)

    def outgrows_scratch(self, launch: Launch) -> bool:
        """Return whether words must restart or memory must grow, once nothing is under way."""
        size_bytes = launch.scratch_bytes if isinstance(launch, ComposedLaunch) else 0
        must_restart = any(path.must_restart for path in self.paths)
        outgrows = self.scratch.is_outgrown_by(size_bytes)
        return self._issued > RESET_AT or must_restart or outgrows

    def reserve(self, launch: Launch, is_captured: bool) -> None:
        """Restart the words if it is time, which needs all calls to be over; allocate memory."""
        if isinstance(launch, ComposedLaunch):
            self.scratch.reserve(launch.scratch_bytes)
        for path in self.paths:
            if path.must_restart:
                path.restart()
        if self._issued > RESET_AT:
            engine = self.engine
            for word in (engine.read_word, engine.written_word, self._drained_word):
                self._words.store(word, 0)
            self._issued = 0

    # --- enqueuing --------------------------------------------------------------------------------

    def enqueue(self, launch: Launch, stream: int, is_captured: bool) -> Any:
        """Put a launch on a stream of the current device."""
        if isinstance(launch, CollectiveLaunch):
            return self._enqueue_collective(launch, stream)
        if isinstance(launch, HostMessages):
            self.messages.begin(launch.flows())
        else:
            self._enqueue_messages(launch, stream)
        return None

    def _enqueue_collective(self, launch: CollectiveLaunch, stream: int) -> Any:
        if isinstance(launch, StagedCall):
            self._enqueue_staged(launch, stream)
        elif isinstance(launch, PeerLaunch):
            self._enqueue_peer(launch, stream)
        else:
            return self._enqueue_composed(launch, stream)
        return None

    def enqueue_together(self, launches: Sequence[tuple[Launch, int, bool]]) -> list[Any]:
        """Put launches on their streams: collectives, then the messages of each stream together."""
        messages: dict[int, list[MessageRequest]] = {}
        kept, begun = [], []
        for launch, stream, _ in launches:
            if isinstance(launch, CollectiveLaunch):
                kept.append(self._enqueue_collective(launch, stream))
            elif isinstance(launch, HostMessages):
                begun += launch.flows()
            else:
                messages.setdefault(stream, []).extend(launch)
        # All are started before the first is waited for: a rank may send to itself.
        flows = {stream: self.messages.flows_of(requests) for stream, requests in messages.items()}
        for each in (begun, *flows.values()):
            self.messages.begin(each)
        for stream, each in flows.items():
            self._enqueue_flows(each, stream)
        return kept

    def note_capture(self) -> None:
        """Do nothing: captures are refused in `gpucoll.backends.direct.connected`."""

    def _enqueue_peer(self, launch: PeerLaunch, stream: int) -> None:
        with self.in_driver():
            launch.path.enqueue(launch, stream)

    def _enqueue_composed(self, launch: ComposedLaunch, stream: int) -> Any:
        with self.in_driver():
            scratch = self.scratch.take(stream) if launch.scratch_bytes else 0
        parts = launch.parts(scratch, stream)
        for part in parts:
            if isinstance(part, Exchanged):
                self._enqueue_messages(part.requests, stream, within_call=True)
            elif isinstance(part, Step):
                enqueue_steps([part], self.device, stream, self.in_driver)
            else:
                self._enqueue_collective(part, stream)
        if launch.scratch_bytes:
            with self.in_driver():
                self.scratch.give_back(stream)
        return parts

    def _enqueue_staged(self, call: StagedCall, stream: int) -> None:
        pieces, first = call.pieces, self._issued
        count = pieces.n_pieces
        if not count and not pieces.agrees:
            return
        if first + count >= LAST - 1:
            raise BackendError("too many calls in groups alone: make one outside of a group")
        if self._last_stream not in (None, stream):  # the other stream may still use the slots
            self._do(self.device.stream_wait_event, stream, self._tail, 0)
        self._issued += count + pieces.agrees
        # This comes first, because the driver may block this thread until the streams proceed.
        self.engine.add(Job(call, first))
        try:
            if call.is_on_host:  # the engine's thread copies; it and the stream wait for each other
                self._write_value(stream, self.engine.read_word, first + count)
                self._wait_value(stream, self.engine.written_word, first + count)
            else:
                self._enqueue_pieces(call, first, stream)
            if pieces.agrees:
                self._wait_value(stream, self.engine.written_word, self._issued)
        finally:  # after a failure, too: this word shows when the stream is through
            self._write_value(stream, self._drained_word, self._issued)
        if not self._tail:
            self._tail = self.device.create_event()
        self._do(self.device.record_event, self._tail, stream)
        self._last_stream = stream

    def _enqueue_pieces(self, call: StagedCall, first: int, stream: int) -> None:
        """Put the copies of all pieces on a stream: number i into its slots, then i - 1 back."""
        pieces, slots = call.pieces, call.slots
        count = pieces.n_pieces
        before: tuple[Copy, ...] = ()
        for number in range(count + 1):
            if number < count:
                piece = pieces.piece(number)
                self._read(piece.reads, slots.on_gpu(number, 0), stream)
                self._write_value(stream, self.engine.read_word, first + number + 1)
            if number:
                self._wait_value(stream, self.engine.written_word, first + number)
                self._write(before, slots.on_gpu(number - 1, 1), stream)
            before = piece.writes if count else ()

    def _read(self, copies: Sequence[Copy], slot: int, stream: int) -> None:
        for copy in copies:
            with self.in_driver():
                self.device.copy(slot + copy.offset, copy.address, copy.size_bytes, stream)

    def _write(self, copies: Sequence[Copy], slot: int, stream: int) -> None:
        for copy in copies:
            with self.in_driver():
                self.device.copy(copy.address, slot + copy.offset, copy.size_bytes, stream)

    def _enqueue_messages(
        self, requests: Sequence[MessageRequest], stream: int, *, within_call: bool = False
    ) -> None:
        flows = self.messages.flows_of(requests, within_call=within_call)
        self.messages.begin(flows)
        self._enqueue_flows(flows, stream)

    def _enqueue_flows(self, flows: Sequence[Flow], stream: int) -> None:
        """Put messages on a stream in rounds: one piece of each message, sends first.

        So a round only waits for earlier rounds of the other ranks, or for what they send in the
        same round.
        """
        try:
            self._enqueue_rounds(flows, stream)
        except BaseException:
            # The thread must not send any of it; then the words show when the stream is through.
            self.messages.abort()
            with contextlib.suppress(GpucollError):  # a GPU that has failed does nothing more
                for flow in flows:
                    self._write_value(stream, flow.on_stream.by_gpu, flow.end)
            raise

    def _enqueue_rounds(self, flows: Sequence[Flow], stream: int) -> None:
        sends = [flow for flow in flows if flow.sends]
        receives = [flow for flow in flows if not flow.sends]
        for number in range(max((flow.count for flow in flows), default=0)):
            for flow in sends:
                if number < flow.count:
                    self._send_piece(flow, number, stream)
            for flow in receives:
                if number < flow.count:
                    self._receive_piece(flow, number, stream)
        for flow in sends:
            self._wait_value(stream, flow.on_stream.by_host, flow.base + flow.count)

    def _send_piece(self, flow: Flow, number: int, stream: int) -> None:
        if number >= 2:
            self._wait_value(stream, flow.on_stream.by_host, flow.base + number - 1)
        start, offset, size_bytes = flow.part(number)
        with self.in_driver():
            self.device.copy(flow.slots.on_gpu + offset, flow.address + start, size_bytes, stream)
        self._write_value(stream, flow.on_stream.by_gpu, flow.base + number + 1)

    def _receive_piece(self, flow: Flow, number: int, stream: int) -> None:
        self._wait_value(stream, flow.on_stream.by_host, flow.base + number + 1)
        start, offset, size_bytes = flow.part(number)
        with self.in_driver():
            self.device.copy(flow.address + start, flow.slots.on_gpu + offset, size_bytes, stream)
        self._write_value(stream, flow.on_stream.by_gpu, flow.base + number + 1)

    def _do(self, function: Callable[..., int], *arguments: int) -> None:
        with self.in_driver():
            self.device.check(function(*arguments), "put staged work on a stream")

    def _wait_value(self, stream: int, address: int, value: int) -> None:
        self._do(self.device.stream_wait_value, stream, address, value)

    def _write_value(self, stream: int, address: int, value: int) -> None:
        self._do(self.device.stream_write_value, stream, address, value)

    # --- the rest ---------------------------------------------------------------------------------

    def failure(self) -> GpucollError | None:
        """Return a failure of the host's part, or None."""
        for part in (self.messages, self.engine):
            error = part.error
            if error is None:
                continue
            is_own = part is self.messages and self.messages.is_own_error
            is_new = time.monotonic() - part.failed_at_s < _TOLD_BY_OTHERS_S
            if is_own or not (is_new and isinstance(error, _SEEN_BY_ALL)):
                return error
        return None

    def abort(self) -> None:
        """Release all streams that wait for the host, and all ranks that wait for this one."""
        if self._is_open:
            self.messages.abort()
            self.engine.abort()
            for path in self.paths:
                path.abort(_PEERS_LET_GO_S)

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
        identity = self.device.identity
        gpu = f"{self.device.label}: {identity.name}, {identity.uuid}"
        shared = self._slots is None or self._slots.is_shared
        by_mpi = {"GPU path through MPI": self.by_mpi} if self.by_mpi else {}
        return {
            "GPU": gpu if self.has_gpu else "none: this rank takes part with host arrays",
            "GPU path through shared GPU memory": self.why_staged,
            "GPU path": f"staged through page-locked host memory, in pieces of up to "
            f"{self._slot_bytes} bytes, two at a time; the host's part over the CPU backend"
            + ("" if shared else " with one more copy: its memory could not be page-locked"),
            **by_mpi,
            "GPU: same bits as the CPU backend": "yes, of arrays that fit into one piece",
            "GPU: captured graphs": "no: the host has a part in every call",
            "GPU messages": "match in the order of both ranks' calls; tags are not compared",
            **({} if self.peer is None else self.peer.describe()),
            **({} if self.between is None else self.between.describe()),
            **(
                {"GPU path between hosts": f"staged: {self.why_between}"}
                if self.why_between
                else {}
            ),
        }

    def close(self, limit_s: float) -> None:
        """Release everything; nothing is under way."""
        for path in self.paths:  # not aborted: other ranks may still be in the last call
            path.close(min(limit_s, _PEERS_LET_GO_S))
        self.peer = self.between = None
        self.let_go(limit_s)

    def let_go(self, limit_s: float) -> bool:
        """Release everything whose threads and streams end within `limit_s` seconds.

        Returns whether all of them have ended; otherwise arrays may still be in use.
        """
        if not self._is_open:
            return True
        # While streams still run, freeing memory would wait for them, without a deadline.
        given_up = [path.give_up(min(limit_s, _PEERS_LET_GO_S)) for path in self.paths]
        has_ended = [self.engine.stop(limit_s), self.messages.stop(limit_s)]
        due_s = time.monotonic() + limit_s
        while not self._is_drained and not self._has_failed and time.monotonic() < due_s:
            time.sleep(1e-3)
        is_unused = all(has_ended) and self._is_drained and all(given_up)
        is_unused = is_unused and not self.inner.is_given_up
        self._is_open = False
        if not all(has_ended):
            self.inner.group.is_in_use = True
        if not is_unused:
            _left_in_use.append(self)
            self.inner.abort()
        else:
            with contextlib.suppress(GpucollError):  # a GPU that has failed frees nothing
                self._free()
        self.inner.close()
        return is_unused

    @property
    def _is_drained(self) -> bool:
        if self._words.load(self._drained_word) < self._issued or not self.messages.is_drained:
            return False
        try:
            with self.device, self.device.relaxed_capture():
                return self.scratch.is_idle
        except GpucollError:  # a GPU that has failed does nothing any more
            return True

    @property
    def _has_failed(self) -> bool:
        """Whether the GPU has failed and does nothing any more."""
        try:
            self.device.destroy_event(self.device.create_event())
        except GpucollError:
            return True
        return False

    def _free(self) -> None:
        with self.device, self.device.relaxed_capture():
            if self._tail:
                self.device.destroy_event(self._tail)
            for slots in (self._slots, self.slots_for_mpi):
                if slots is not None:
                    slots.close()
            self.scratch.close()
            self.messages.close()
            self._words.close()


_left_in_use: list[DirectBackend] = []
"""Backends whose memory a thread or a stream may still use: they live until the process ends."""
