"""A communicator's calls on GPU arrays, issued on streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpucoll.arrays import streams
from gpucoll.arrays.library import AnyArray, AnyDtype, Template
from gpucoll.arrays.operands import source_of
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.calls.collected import Collected, check_in_group
from gpucoll.calls.given import AnyInput, AnyResult, Given
from gpucoll.calls.gpu.connection import GpuConnection
from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.wording import another_thread

if TYPE_CHECKING:  # a communicator without GPUs needs none of it
    from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
    from gpucoll.backends.gpu.protocol import GpuBackend
    from gpucoll.calls.gpu.cache import CachedCalls
    from gpucoll.calls.gpu.call import GpuCall
    from gpucoll.calls.gpu.memory import Registration
    from gpucoll.calls.gpu.work import GpuWork
    from gpucoll.calls.preparation import Prepared
    from gpucoll.collectives import Collective


class GpuRunner(GpuConnection):
    """The part of a communicator that moves GPU arrays. It is a `GpuConnection`."""

    grouped: Collected[GpuCall] | None = None
    """The calls collected while a group is open."""

    # --- calling ----------------------------------------------------------------------------------

    def call(self, call: GpuCall, async_op: bool = False, lasting: AnyResult = None) -> AnyResult:
        """Make a call now, or keep it for the end of the group; return the user's result."""
        check_timeout_s(call.timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, call.name, async_op, lasting)
            if async_op:
                lasting = call.work = self._awaiting_its_group(call)
            self.grouped.append(call)
            return lasting
        with self._alone():
            connected = self._prepared(call)
            call = _placed(connected, call)
            launches = connected.launches(call.requests, call.messages)
            if async_op or not call.is_own:  # the call then involves other streams
                connected.refuse_capture(_stream_call(connected, call, launches, call.address))
            if async_op:
                return self._issue_beside(connected, call, launches)
            issued = self._issue(connected, call, launches, call.address)
            if call.must_complete:
                _complete(connected, call, issued)
            elif not call.is_own:  # the current stream reads the result, or fills it in
                connected.issuer.follow(call.template.stream, call.address)
            return call.finish()

    def _awaiting_its_group(self, call: GpuCall) -> GpuWork:
        """Return the Work of a call that starts at the end of its group."""
        from gpucoll.backends.gpu.in_flight import IssuedCall

        with self._alone():
            connected = self._prepared(call)
        placeholder = IssuedCall(None, call.name, call.address, 0.0, None)
        return _work(connected, placeholder, call, is_issued=False)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse calls of a second thread."""
        # Not acquire() and try: an interrupt between the two would leave the lock locked.
        if self._entering.locked():
            raise another_thread(self._group.rank, self._group.world_size)
        with self._entering:
            yield

    def _prepared(self, call: GpuCall) -> GpuBackend:
        """Check this rank's part of a call, and return the connected backend."""
        self._group.check_open()
        connected = self._ready(call)
        connected.issuer.raise_failure()
        self._check_arrays(connected, call.name, call.template, call.buffers)
        return connected

    def _issue_beside(
        self, connected: GpuBackend, call: GpuCall, launches: Sequence[object]
    ) -> GpuWork:
        """Issue a call on the communicator's own stream, after the work on the caller's stream."""
        issuer = connected.issuer
        stream = call.address if call.is_on_host else issuer.own_stream
        issuer.follow(stream, call.address)
        issued = self._issue(connected, call, launches, stream, is_awaited=True)
        return _work(connected, issued, call)

    def _issue(
        self,
        connected: GpuBackend,
        call: GpuCall,
        launches: Sequence[object],
        stream: int,
        *,
        is_awaited: bool = False,
    ) -> IssuedCall:
        """Issue one call on a stream, after the work with which its memory was made."""
        if not call.is_own:
            connected.issuer.follow(stream, call.template.stream)
        stream_call = _stream_call(connected, call, launches, stream)
        stream_call.is_awaited = is_awaited
        return connected.issue(stream_call)

    def run_group(self, calls: Sequence[GpuCall], timeout_s: float | None) -> None:
        """Make the calls of a group as one group of the vendor's library."""
        if not calls:
            return
        with self._alone():
            self._run_group(calls, timeout_s)

    def _run_group(self, calls: Sequence[GpuCall], timeout_s: float | None) -> None:
        # A message cannot connect the ranks, but a collective can.
        connected = self._prepared(next((call for call in calls if call.requests), calls[0]))
        stream_calls = []
        calls = [_placed(connected, call) for call in calls]
        for call in calls:
            self._prepared(call)
            if call.timeout_s is None:
                call.timeout_s = timeout_s
            launches = connected.launches(call.requests, call.messages)
            stream_call = _stream_call(connected, call, launches, call.address)
            if call.work is not None:
                connected.refuse_capture(stream_call)
                stream_call.is_awaited = True
                if not call.is_on_host:
                    stream_call.stream = connected.issuer.own_stream
            stream_calls.append(stream_call)
        for call, stream_call in zip(calls, stream_calls, strict=True):
            connected.issuer.follow(stream_call.stream, call.address)
            if not call.is_own:
                connected.issuer.follow(stream_call.stream, call.template.stream)
        in_flight = connected.issue_group(stream_calls)
        for call, issued in zip(calls, in_flight, strict=True):
            if call.work is not None:
                call.work.begin(issued)
                continue
            if call.must_complete:
                _complete(connected, call, issued)
            elif not call.is_own:
                connected.issuer.follow(call.template.stream, call.address)
            call.finish()

    def prepare_plan(self, call: GpuCall) -> Callable[[], int]:
        """Return a function that repeats a call on the current stream, and returns 0."""
        connected = self._prepared(call)
        call = _placed(connected, call)
        enqueue = self._enqueuing(connected, call)
        current_stream = streams.current_stream_of(call.template)
        if call.is_on_host:
            current_stream = partial(int, call.address)

        def run() -> int:
            if self.grouped is not None:
                if self.grouped.is_async:
                    raise ArgumentError(
                        f"{call.name}: a plan returns no Work, so it cannot be called inside "
                        "group(async_op=True)"
                    )
                check_in_group(self.grouped, call.name, False, None)
                self.grouped.append(replace(call, stream=current_stream()))
                return 0
            if not self._entering.acquire(False):
                raise another_thread(self._group.rank, self._group.world_size)
            try:
                self._group.check_open()
                issued = enqueue(current_stream())
            finally:
                self._entering.release()
            if call.must_complete:
                _complete(connected, call, issued)
            return 0

        return run

    def _enqueuing(self, connected: GpuBackend, call: GpuCall) -> Callable[[int], IssuedCall]:
        """Return a function that repeats a call on the stream that it is given."""
        launches = connected.launches(call.requests, ())
        stream_call = _stream_call(connected, call, launches, call.address)
        found = connected.compiled_call(call.name, stream_call.signatures, launches)
        compiled_call, (source, destination) = found or (None, (0, 0))
        keep, limit_s, issuer = stream_call.keep, stream_call.timeout_s, connected.issuer
        made = None if call.is_own else issuer.mark(call.template.stream)
        """A mark after the work that was on its stream when the plan's memory was made there."""

        def enqueue(stream: int) -> IssuedCall:
            stream_call.stream = stream
            if made is not None and made.is_pending:
                connected.refuse_capture(stream_call)
                issuer.follow_mark(stream, made)
            issued: IssuedCall | None = None
            if compiled_call is not None:
                issued = compiled_call.issue(source, destination, stream, stream, keep, limit_s)
            return connected.issue(stream_call) if issued is None else issued

        return enqueue

    # --- calling again ----------------------------------------------------------------------------

    def repeat(
        self,
        cached_calls: CachedCalls,
        collective: Collective,
        x: AnyInput,
        given: Given,
        async_op: bool,
        timeout_s: float | None,
    ) -> AnyResult:
        """Repeat a call of a known kind; None: nothing was done, and `call` must make it.

        `cached_calls` are those of arrays of x's type. The call runs on its current stream.
        """
        if self.grouped is not None:
            return None
        check_timeout_s(timeout_s)
        if not self._entering.acquire(False):
            raise another_thread(self._group.rank, self._group.world_size)
        try:
            self._group.check_open()
            return cached_calls.repeat(collective, x, given, async_op, timeout_s)
        finally:
            self._entering.release()

    def learn(self, collective: Collective, x: AnyInput, given: Given, made: Prepared) -> None:
        """Make calls of this kind faster from now on, if that is possible."""
        is_on_host = made.template.device == HOST_ARRAYS
        if self._connected is not None and self.grouped is None and not is_on_host:
            from gpucoll.calls.gpu.cache import learn

            learn(self.call_cache, collective, x, given, made, self._connected)

    # --- memory -----------------------------------------------------------------------------------

    def empty(
        self, shape: tuple[int, ...], dtype: AnyDtype, template: Template | None, symmetric: bool
    ) -> AnyArray:
        """Return a new array of the template's library in registered memory."""
        from gpucoll.calls.gpu import memory

        connected = self._open("empty")
        if not symmetric:
            return memory.empty(connected.allocate, shape, dtype, template)
        made: list[Any] = []

        def task(timeout_s: float | None) -> None:
            allocate = partial(connected.allocate_window, self._runner.channel, timeout_s=timeout_s)
            made.append(memory.empty(allocate, shape, dtype, template))

        self._runner.run("empty", task)
        return made[0]

    def register(self, array: AnyArray) -> Registration:
        """Register an array's memory."""
        from gpucoll.calls.gpu.memory import Registration

        source = source_of(array, "array")
        if source.template.device == HOST_ARRAYS:
            raise BackendUnavailableError(
                "array lies in host memory, which cannot be registered: make it with comm.empty, "
                "or inside comm.shared_arrays()"
            )
        if source.is_packed:
            raise ArgumentError("array is not contiguous: register the array that it is a part of")
        connected = self._open("register")
        self._check_arrays(connected, "register", source.template, [source.buffer])
        return Registration(connected, source.buffer)


def _placed(connected: GpuBackend, call: GpuCall) -> GpuCall:
    """Return a call with its stream. Calls on host arrays get a stream of the communicator.

    Messages of host arrays wait for no earlier call, and no call waits for them: their stream is
    ordered with no other.
    """
    if not call.is_on_host:
        return call
    issuer = connected.issuer
    return call.on_stream(issuer.beside_streams() if call.messages else issuer.own_stream)


def _complete(connected: GpuBackend, call: GpuCall, issued: IssuedCall) -> None:
    """Wait until a call is done whose arrays are not ordered by a stream."""
    connected.issuer.synchronize(issued, others_s=call.timeout_s if call.is_on_host else None)


def _work(
    connected: GpuBackend, issued: IssuedCall, call: GpuCall, *, is_issued: bool = True
) -> GpuWork:
    from gpucoll.calls.gpu.work import GpuWork

    current_stream = streams.current_stream_of(call.template)
    return GpuWork(
        connected.issuer,
        issued,
        call.finish,
        current_stream,
        must_complete=call.must_complete,
        is_issued=is_issued,
    )


def _stream_call(
    connected: GpuBackend, call: GpuCall, launches: Sequence[object], stream: int
) -> StreamCall:
    from gpucoll.backends.gpu.in_flight import StreamCall

    signatures = connected.signatures(call.requests)
    keep, limit_s = call.buffers, call.timeout_s
    return StreamCall(call.name, signatures, launches, stream, keep, call.is_own, limit_s)
