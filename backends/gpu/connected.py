"""A rank's connected GPU: its backend, the issuer of its calls, and their monitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from gpucoll.backends.gpu.abandoned import Resources, end_all, watch_over
from gpucoll.backends.gpu.compiled_call import CompiledCall
from gpucoll.backends.gpu.deferred_release import settle
from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.gpu.monitor_thread import MonitorThread
from gpucoll.backends.gpu.signature import Signature, Signatures
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.devices import Device
from gpucoll.errors import ArgumentError, DeadlineError
from gpucoll.group.protocol import ENDING_S, EnqueuedCalls, Group
from gpucoll.wording import rank_of

CLOSING_S = 5.0
"""How long the vendor's library may take to close; then it is aborted."""
GIVING_UP_S = 5.0
"""How long `give_up` waits for a thread that is in the driver or in the vendor's library."""


class StreamBackend(Protocol):
    """Puts requests on streams of one rank's GPU.

    The backend turns a request into a launch, which can be enqueued any number of times. Only the
    backend reads its launches.

    Attributes
    ----------
    name : str
        The backend's name.
    device : Device
        This rank's GPU.
    """

    name: str
    device: Device

    def prepare(self, request: Request) -> Any:
        """Return the launch of a collective; ArgumentTypeError if it cannot be enqueued."""

    def prepare_messages(self, requests: Sequence[MessageRequest]) -> Any:
        """Return one launch for all these sends and receives."""

    def outgrows_scratch(self, launch: Any) -> bool:
        """Return whether `reserve` will free memory, which waits for all of the GPU's work."""

    def reserve(self, launch: Any, is_captured: bool) -> None:
        """Allocate a launch's memory before other ranks see the call; MemoryError if it fails."""

    def enqueue(self, launch: Any, stream: int, is_captured: bool) -> Any:
        """Put a launch on a stream of the current device, or into a captured graph.

        The caller keeps the returned object until the work is done; for a graph, for ever.
        """

    def enqueue_together(self, launches: Sequence[tuple[Any, int, bool]]) -> Any:
        """Put launches on their streams, in no particular order; each is as for `enqueue`."""

    def note_capture(self) -> None:
        """Note that calls were captured in a graph."""

    def failure(self) -> Exception | None:
        """Return a failure of earlier work as an error, or None. Does not wait."""

    def abort(self) -> None:
        """End this communicator's work on the GPU."""

    def close(self, limit_s: float) -> None:
        """Release everything; nothing is under way."""


B = TypeVar("B", bound=StreamBackend)


class ConnectedGpu(Generic[B]):
    """The connected GPU, from the first call on GPU arrays to the communicator's end.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Posts and compares calls.
    backend : StreamBackend
        Enqueues them.
    issuer : Issuer
        Made with the backend's `failure` and `abort`.
    resources : Resources
        Released if the communicator is dropped without `close`.
    exits : bool
        Whether a failure that goes unnoticed ends the process.
    """

    def __init__(
        self,
        group: Group,
        calls: EnqueuedCalls,
        backend: B,
        issuer: Issuer,
        resources: Resources,
        exits: bool,
    ) -> None:
        self._group = group
        self._calls = calls
        self.backend = backend
        self.device = backend.device
        self.issuer = issuer
        self._signatures = Signatures(calls, group.rank, group.world_size)
        self._monitor_thread = MonitorThread(issuer, exits=exits)
        self._resources = resources
        # Works and plans hold the issuer, too: while one of them is alive, its call goes on.
        self._dropped = watch_over(issuer, resources)
        end_all()

    def launches(
        self, requests: Sequence[Request], messages: Sequence[MessageRequest]
    ) -> list[Any]:
        """Return what the requests of a call enqueue; ArgumentTypeError if that is impossible."""
        made = [self.backend.prepare(request) for request in requests]
        return [*made, self.backend.prepare_messages(messages)] if messages else made

    def signatures(self, requests: Sequence[Request]) -> list[Signature]:
        """Return what the ranks compare for the requests of a call."""
        return [self._signatures.of(request) for request in requests]

    def issue(self, stream_call: StreamCall) -> IssuedCall:
        """Put one call on its stream and return immediately."""
        launches = stream_call.launches
        if any(map(self.backend.outgrows_scratch, launches)):
            self._drain(stream_call)
        with self.issuer.lock, self.device:
            self._look_for_capture(stream_call)
            self._reserve(stream_call)

            def enqueue() -> list[Any]:
                stream, is_captured = stream_call.stream, stream_call.is_captured
                return [self.backend.enqueue(each, stream, is_captured) for each in launches]

            return self.issuer.issue((stream_call,), enqueue)[0]

    def _drain(self, stream_call: StreamCall) -> None:
        """Wait until earlier calls are done, before memory is freed for this one.

        Freeing waits for them, too, but without a deadline: while this thread is in the driver and
        holds the lock, the monitor thread cannot end a call that hangs.
        """
        self.refuse_capture(stream_call)
        if not stream_call.is_captured:  # graphs have their own memory
            self.issuer.synchronize()

    def compiled_call(
        self, name: str, signatures: Sequence[Signature], launches: Sequence[Any]
    ) -> tuple[CompiledCall, tuple[int, int]] | None:
        """Return a compiled call for calls of this kind; this class has none."""
        return None

    def issue_group(self, stream_calls: Sequence[StreamCall]) -> list[IssuedCall]:
        """Put several calls on their streams; they run in no particular order."""
        for stream_call in stream_calls:
            if any(map(self.backend.outgrows_scratch, stream_call.launches)):
                self._drain(stream_call)
        with self.issuer.lock, self.device:
            for stream_call in stream_calls:
                self._look_for_capture(stream_call)
                self._reserve(stream_call)
            return self.issuer.issue(
                stream_calls,
                lambda: self.backend.enqueue_together(
                    [
                        (launch, each.stream, each.is_captured)
                        for each in stream_calls
                        for launch in each.launches
                    ]
                ),
            )

    def _reserve(self, stream_call: StreamCall) -> None:
        """Allocate what a call needs, before other ranks see the call."""
        for launch in stream_call.launches:
            self.backend.reserve(launch, stream_call.is_captured)

    def refuse_capture(self, stream_call: StreamCall) -> None:
        """Raise if this call cannot be part of a graph being captured, before anything joins it."""
        with self.device:
            self._look_for_capture(stream_call)

    def _look_for_capture(self, stream_call: StreamCall) -> None:
        """Note whether a graph is being captured; refuse a call that cannot be part of one."""
        stream_call.is_captured = self.device.is_capturing(stream_call.stream)
        if stream_call.is_captured:
            if not stream_call.is_own:
                raise ArgumentError(
                    f"{stream_call.name}: a captured graph uses the same memory at every replay: "
                    "give contiguous arrays, and out="
                )
            self.backend.note_capture()

    def note_abort(self) -> None:
        """Give up on the GPU after this rank itself has given up the communicator."""
        self.issuer.look()
        self._group.was_told = True

    def close(self, limit_s: float) -> None:
        """Wait at most `limit_s` for all calls; release everything, raise unreported failures."""
        issuer, limit_s = self.issuer, round(limit_s, 2)
        if self._group.was_told:
            self.give_up()
            return
        try:
            self._stop_watching(max(limit_s, ENDING_S))  # from here on this thread looks itself
        except DeadlineError as error:
            issuer.end(error)
            raise
        try:
            if issuer.is_busy:  # else all calls succeeded, whatever the other ranks did since
                issuer.synchronize(timeout_s=limit_s, is_last=True)
        except BaseException as error:
            goes_on = isinstance(error, DeadlineError) and issuer.failure is None
            self.give_up()
            if goes_on:
                who = rank_of(self._group.rank, self._group.world_size)
                text = f"{who}: calls on GPU arrays had not ended at close, and were given up"
                raise DeadlineError(text) from None
            raise
        self._dropped.detach()
        settle()
        issuer.end()  # all outcomes are known; the steps below may fail
        end_all()
        self.backend.close(CLOSING_S)
        issuer.close()

    def _stop_watching(self, limit_s: float) -> None:
        """End the monitor thread; DeadlineError if it does not end."""
        group = self._group
        if not self._monitor_thread.stop(limit_s):
            group.is_in_use = True
            raise DeadlineError(
                f"rank {group.rank} of {group.world_size} waited {limit_s:g} s at close "
                f"for the thread that watches {self.device.label}: the driver or "
                f"{self.backend.name.upper()} does not return. The communicator's memory and work "
                "on the GPU cannot be released: end the process"
            )

    def give_up(self) -> None:
        """Release everything without waiting for other ranks."""
        if not self._monitor_thread.stop(GIVING_UP_S) or not self.issuer.lock.acquire(
            timeout=GIVING_UP_S
        ):
            self._group.is_in_use = True
            self.issuer.end()
            return  # a thread hangs in the driver or the library: nothing there can be ended
        self._dropped.detach()
        settle()
        self.issuer.end()
        try:
            self._resources.end()
        finally:
            self.issuer.lock.release()
