"""NCCL and RCCL as a backend: requests become calls of the vendor's library on a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from gpucoll.backends.gpu.compiled_call import Function
from gpucoll.backends.gpu.scratch import Scratch
from gpucoll.backends.nccl.collectives import launch_of
from gpucoll.backends.nccl.communicator import NcclCommunicator, Watch
from gpucoll.backends.nccl.elements import BYTES, OPERATION
from gpucoll.backends.nccl.launch import Copy, Fill, Launch, Place, plain
from gpucoll.backends.nccl.library import IN_PROGRESS, Library
from gpucoll.backends.nccl.memory import Registrations
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.devices import Device
from gpucoll.devices.foreign_library import address_of
from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError
from gpucoll.transport.shared.words import Kind

FLOAT8_CAPABILITY = 9
"""NVIDIA's Hopper: what is older can move float8, but NCCL does not reduce it there."""
PROMISES = {
    "GPU: same bits on every rank": "yes",
    "GPU: same bits run after run": "yes, but not where NCCL uses NVLS (NCCL_NVLS_ENABLE=0)",
    "GPU: same bits whatever size and placement": "no: the library chooses by size",
    "GPU: half types": "as the library adds them: rounded at every step",
    "GPU: min and max of NaN": "as the library does them: a NaN may be lost",
}


class NcclBackend:
    """GPU arrays of the ranks, moved by the vendor's library.

    Parameters
    ----------
    connection : NcclCommunicator
        The library's communicator.
    place : Place
        Who this rank is.
    new_watch : callable
        Returns what is called while the library is busy with what it does first, and raises what
        makes that vain.
    """

    def __init__(
        self, connection: NcclCommunicator, place: Place, new_watch: Callable[[], Watch]
    ) -> None:
        self.connection = connection
        self.library: Library = connection.library
        self.device: Device = connection.device
        self.name = self.library.vendor.name.lower()
        self._place = place
        self._new_watch = new_watch
        self._functions = self.library.functions
        self.in_driver: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Around calls of the driver that may be kept there: `gpucoll.backends.gpu.issuer`."""
        self.scratch = Scratch(self.device)
        self.registrations = Registrations(self.library, self.device, connection.handle)
        """What the library knows of memory on this communicator."""

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Launch:
        """Return how a collective is enqueued; ArgumentTypeError where the library cannot."""
        if request.op is not None and request.data.dtype.startswith("float8"):
            self._check_float8(request.data.dtype)
        return launch_of(request, self._place, self.library)

    def _check_float8(self, dtype: str) -> None:
        """Refuse what NCCL would answer with an error that ends the communicator."""
        major = self.device.attribute("compute_capability_major")
        if self.device.kind == "cuda" and major is not None and major < FLOAT8_CAPABILITY:
            raise ArgumentTypeError(
                f"{self.library.vendor.name} reduces {dtype} on GPUs of compute capability "
                f"{FLOAT8_CAPABILITY}.0 and newer only; {self.device.label} "
                f"({self.device.identity.name}) has {major}.x: convert to float16 first"
            )

    def prepare_messages(self, requests: Sequence[MessageRequest]) -> Launch:
        """Return how sends and receives are enqueued, all at once."""
        calls = []
        for request in requests:
            buffer = request.buffer
            assert buffer is not None
            name = "ncclSend" if request.kind == Kind.SEND else "ncclRecv"
            if buffer.size_bytes:
                calls.append((name, (buffer.address, buffer.size_bytes, BYTES, request.peer)))
        return plain(*calls)

    def outgrows_scratch(self, launch: Launch) -> bool:
        """Return whether `reserve` will give memory back, which waits for all of the GPU's work."""
        return self.scratch.is_outgrown_by(launch.scratch_bytes)

    def reserve(self, launch: Launch) -> None:
        """Allocate what a launch needs, before anybody is told of it; MemoryError."""
        self.scratch.reserve(launch.scratch_bytes)

    # --- enqueuing --------------------------------------------------------------------------------

    def enqueue(self, launch: Launch, stream: int) -> None:
        """Put a launch on a stream of the device, which is current."""
        if launch.call is not None and launch.factor is None:
            name, arguments = launch.call
            if code := getattr(self._functions, name)(*arguments, self.connection.handle, stream):
                self._check(code, name)
            return
        operation = self._operation(launch)
        scratch = self.scratch.take(stream) if launch.scratch_bytes else 0
        for phase in launch.phases(scratch):
            self._move(phase.before, stream)
            if len(phase.calls) == 1:
                ((name, arguments),) = phase.calls
                self._check(self._call(name, arguments, operation, stream), name)
            elif phase.calls:
                self._enqueue_group(
                    (name, arguments, operation, stream) for name, arguments in phase.calls
                )
            self._move(phase.after, stream)
        if launch.scratch_bytes:
            self.scratch.give_back(stream)
        if launch.factor is not None:
            self.connection.forget_old_operations()

    def function(self, name: str, settings: Sequence[int]) -> Function:
        """Return a function of the library's as compiled code calls it."""
        address = address_of(getattr(self._functions, name))
        poll = address_of(self._functions.ncclCommGetAsyncError)
        return Function(address, settings, poll, IN_PROGRESS, partial(self._check, what=name))

    def enqueue_together(self, launches: Sequence[tuple[Launch, int]]) -> None:
        """Put launches on their streams as one group of the library's; none needs scratch."""
        calls = []
        for launch, stream in launches:
            operation = self._operation(launch)
            for phase in launch.phases(0):
                self._move((*phase.before, *phase.after), stream)
                calls += [(name, arguments, operation, stream) for name, arguments in phase.calls]
        if calls:
            self._enqueue_group(calls)
        self.connection.forget_old_operations()

    def check_groupable(self, launch: Launch, name: str) -> None:
        """Raise ArgumentError unless a launch can be part of a group, or of a captured graph."""
        if launch.scratch_bytes:
            raise ArgumentError(
                f"{name} of GPU arrays like this needs scratch memory and several steps: it cannot "
                "be part of group() or of a captured graph. Call it outside"
            )

    def note_capture(self) -> None:
        """Note that calls were captured: the library waits for such graphs at its end."""
        self.connection.is_in_graphs = True

    def _operation(self, launch: Launch) -> int:
        if launch.factor is None:
            return 0
        return self.connection.premultiplied_sum(*launch.factor)

    def _enqueue_group(self, calls: Iterable[tuple[str, tuple[int | None, ...], int, int]]) -> None:
        functions = self._functions
        self._check(functions.ncclGroupStart(), "ncclGroupStart")
        failed, what = 0, ""
        try:
            for name, arguments, operation, stream in calls:
                code = self._call(name, arguments, operation, stream)
                if code and code != IN_PROGRESS and not failed:
                    failed, what = code, name
        finally:  # a group that stays open swallows whatever this thread asks for next
            ended = functions.ncclGroupEnd()
        self._check(failed or ended, what or "ncclGroupEnd")

    def _call(
        self, name: str, arguments: tuple[int | None, ...], operation: int, stream: int
    ) -> int:
        if operation and OPERATION in arguments:
            arguments = tuple(operation if item == OPERATION else item for item in arguments)
        code: int = getattr(self._functions, name)(*arguments, self.connection.handle, stream)
        return code

    def _check(self, code: int, what: str) -> None:
        """Raise what a code means, once nothing is in progress any more."""
        if code == IN_PROGRESS:
            code = self.connection.settle(code, self._new_watch())
        if code:
            self.library.check(code, what, self.connection.handle)

    def _move(self, steps: Iterable[Copy | Fill], stream: int) -> None:
        for step in steps:
            with self.in_driver():
                if isinstance(step, Copy):
                    self.device.copy(*step, stream)
                else:
                    self.device.fill(*step, stream)

    # --- the rest ---------------------------------------------------------------------------------

    def failure(self) -> GpucollError | None:
        """Return what the library reports; None: nothing."""
        return self.connection.failure() if self.connection.handle else None

    def abort(self) -> None:
        """End what runs for this communicator on the GPU."""
        self.registrations.close(is_aborting=True)
        if not self.connection.abort():
            return  # giving memory back would wait for the GPU, too
        # A GPU that has failed keeps its memory; another thread may be capturing a graph.
        with contextlib.suppress(GpucollError), self.device.relaxed_capture():
            self.registrations.collect()

    def describe(self) -> dict[str, str]:
        """Return what is worth knowing."""
        library, identity = self.library, self.device.identity
        emulated = [
            name.removeprefix("nccl")
            for name in ("ncclAlltoAll", "ncclGather", "ncclScatter")
            if not library.has(name)
        ]
        facts = {
            "GPU": f"{self.device.label}: {identity.name}, {identity.uuid}",
            "GPU library": f"{library} ({library.reason})",
            **PROMISES,
        }
        if emulated:
            facts["emulated by sends and receives"] = ", ".join(emulated)
        for place, note in enumerate(library.notes(), 1):
            facts[f"note {place}"] = note
        return facts

    def close(self, limit_s: float) -> None:
        """Let go of the library's communicator; nothing is under way."""
        due_s = time.monotonic() + limit_s

        def watch() -> None:
            if time.monotonic() > due_s:
                raise TimeoutError

        self.registrations.close()
        try:
            self.connection.close(watch)
        except TimeoutError:  # the other ranks are not closing: it was ended by force
            pass
        self.scratch.close()
        self.registrations.collect()
