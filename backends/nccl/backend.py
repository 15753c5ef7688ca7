"""NCCL and RCCL as a backend: requests become calls of the vendor's library on a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from gpucoll.backends.gpu import compressed, fusion, rank_order
from gpucoll.backends.gpu.compiled_call import Function
from gpucoll.backends.gpu.scratch import Scratch
from gpucoll.backends.gpu.steps import Place, Step, enqueue_steps
from gpucoll.backends.nccl.collectives import Launch, launch_of, plain, put_together
from gpucoll.backends.nccl.communicator import NcclCommunicator, Watch
from gpucoll.backends.nccl.elements import BYTES, OPERATION, lack
from gpucoll.backends.nccl.library import IN_PROGRESS, Library
from gpucoll.backends.nccl.memory import Registrations
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.devices import Device
from gpucoll.devices.foreign_library import address_of
from gpucoll.errors import GpucollError
from gpucoll.transport.shared.words import Kind

FLOAT8_CAPABILITY = 9
"""NVIDIA's Hopper: NCCL moves float8 on older GPUs, but does not reduce it there."""
PROMISES = {
    "GPU: same bits on every rank": "yes",
    "GPU: same bits run after run": "yes, but not where NCCL uses NVLS (NCCL_NVLS_ENABLE=0)",
    "GPU: same bits whatever size and placement": "no: the library chooses by size",
    "GPU: half types": "as the library adds them: rounded at every step",
    "GPU: min and max of NaN": "as the library does them: a NaN may be lost",
}

IN_ORDER = {
    "GPU: same bits run after run": "yes: in the order of the ranks, as asked for",
    "GPU: same bits whatever size and placement": "yes",
    "GPU: half types": "accumulated in float32, rounded once",
    "GPU: min and max of NaN": "a NaN is kept",
}
"""The promises that differ with ``deterministic="order"``."""
BY_KERNELS = (
    "by gpucoll's kernels, in rank order (all_to_all, kernel, all_gather): int16, uint16, bitwise "
    "and logical ops, products and extrema of complex numbers, functions of the user's"
)


class NcclBackend:
    """Moves GPU arrays between the ranks through the vendor's library.

    Parameters
    ----------
    connection : NcclCommunicator
        The library's communicator.
    place : Place
        This rank and the communicator's size.
    new_watch : callable
        Returns a function that is called while the library is busy with its first work; it raises
        an error that makes waiting pointless.
    keeps_order : bool
        Whether reductions are to combine the ranks in order: `Group.keeps_order`.
    """

    def __init__(
        self,
        connection: NcclCommunicator,
        place: Place,
        new_watch: Callable[[], Watch],
        keeps_order: bool = False,
    ) -> None:
        self.connection = connection
        self.library: Library = connection.library
        self.device: Device = connection.device
        self.name = self.library.vendor.name.lower()
        self._place = place
        self._new_watch = new_watch
        self._keeps_order = keeps_order
        self._functions = self.library.functions
        self.in_driver: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Surrounds driver calls that may block: `gpucoll.backends.gpu.issuer`."""
        self.scratch = Scratch(self.device)
        self._in_graphs: list[Any] = []
        """Objects that captured graphs use each time they are launched."""
        self.registrations = Registrations(self.library, self.device, connection.handle)
        """The memory that is registered with the library on this communicator."""

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Launch:
        """Return the launch of a collective; ArgumentTypeError if nothing here can do it."""
        place, library, label = self._place, self.library, self.device.label
        if request.compression is not None:
            return put_together(compressed.compose(request, place, label), place, library)
        goes_by_kernels = self._goes_by_kernels(request)
        if request.parts:
            composed = fusion.compose(request, place, label, by_kernels=goes_by_kernels)
            if composed is not None:
                made = put_together(composed, place, library)
                factor = None if goes_by_kernels else launch_of(request, place, library).factor
                return made._replace(factor=factor)
        if goes_by_kernels:
            return put_together(rank_order.compose(request, place, label), place, library)
        return launch_of(request, place, library)

    def _goes_by_kernels(self, request: Request) -> bool:
        """Return whether the library lacks this reduction, or cannot do it in rank order."""
        op, dtype, library = request.op, request.data.dtype, self.library
        if op is None:
            return False
        op.check_dtype(dtype)
        if self._keeps_order and op.depends_on_order(dtype):
            return True
        if op.name == "avg" and request.collective.is_scan:
            return True  # each rank has a different divisor
        if lack(op, dtype, library.vendor.name, library.version, self._place.world_size):
            return True
        if dtype.startswith("float8") and request.collective.excludes_own:
            return True  # the identity may be infinite, which the library makes finite
        # NCCL would return an error that breaks the communicator.
        major = self.device.attribute("compute_capability_major")
        is_older = self.device.kind == "cuda" and major is not None and major < FLOAT8_CAPABILITY
        return dtype.startswith("float8") and is_older

    def prepare_messages(self, requests: Sequence[MessageRequest]) -> Launch:
        """Return one launch for all these sends and receives."""
        calls = []
        for request in requests:
            buffer = request.buffer
            assert buffer is not None
            name = "ncclSend" if request.kind == Kind.SEND else "ncclRecv"
            if buffer.size_bytes:
                calls.append((name, (buffer.address, buffer.size_bytes, BYTES, request.peer)))
        return plain(*calls)

    def outgrows_scratch(self, launch: Launch) -> bool:
        """Return whether `reserve` will free memory, which waits for all of the GPU's work."""
        return self.scratch.is_outgrown_by(launch.scratch_bytes)

    def reserve(self, launch: Launch, is_captured: bool) -> None:
        """Allocate a launch's memory before other ranks see the call; MemoryError if it fails."""
        if is_captured:
            self.scratch.reserve_for_graph(launch.scratch_bytes)
        else:
            self.scratch.reserve(launch.scratch_bytes)

    # --- enqueuing --------------------------------------------------------------------------------

    def enqueue(self, launch: Launch, stream: int, is_captured: bool) -> Any:
        """Put a launch on a stream of the current device, or into a captured graph."""
        if launch.call is not None and launch.factor is None:
            name, arguments = launch.call
            if code := getattr(self._functions, name)(*arguments, self.connection.handle, stream):
                self._check(code, name)
            return None
        operation = self._operation(launch)
        scratch = 0
        if launch.scratch_bytes:
            scratch = self.scratch.of_graphs if is_captured else self.scratch.take(stream)
        phases = launch.phases(scratch, stream)
        for phase in phases:
            self._move(phase.before, stream)
            if len(phase.calls) == 1:
                ((name, arguments),) = phase.calls
                self._check(self._call(name, arguments, operation, stream), name)
            elif phase.calls:
                self._enqueue_group(
                    (name, arguments, operation, stream) for name, arguments in phase.calls
                )
        if launch.scratch_bytes and not is_captured:
            self.scratch.give_back(stream)
        if launch.factor is not None:
            self.connection.forget_old_operations()
        if is_captured:
            self._in_graphs.append(phases)
        return phases

    def function(self, name: str, settings: Sequence[int]) -> Function:
        """Return a function of the library, as compiled code calls it."""
        address = address_of(getattr(self._functions, name))
        poll = address_of(self._functions.ncclCommGetAsyncError)
        return Function(address, settings, poll, IN_PROGRESS, partial(self._check, what=name))

    def enqueue_together(self, launches: Sequence[tuple[Launch, int, bool]]) -> list[Any]:
        """Put launches on their streams: one group of the library, then those with scratch."""
        calls, kept = [], []
        for launch, stream, _ in launches:
            if not launch.scratch_bytes:
                operation = self._operation(launch)
                for phase in launch.phases(0, stream):
                    self._move(phase.before, stream)
                    calls += [(name, given, operation, stream) for name, given in phase.calls]
        if calls:
            self._enqueue_group(calls)
        for launch, stream, is_captured in launches:
            if launch.scratch_bytes:
                kept.append(self.enqueue(launch, stream, is_captured))
        self.connection.forget_old_operations()
        return kept

    def note_capture(self) -> None:
        """Note that calls were captured: the library waits for such graphs when it is closed."""
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
        finally:  # a group left open would swallow all later calls of this thread
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
        """Raise the error for a code, once no call is in progress any more."""
        if code == IN_PROGRESS:
            code = self.connection.settle(code, self._new_watch())
        if code:
            self.library.check(code, what, self.connection.handle)

    def _move(self, steps: Iterable[Step], stream: int) -> None:
        enqueue_steps(steps, self.device, stream, self.in_driver)

    # --- the rest ---------------------------------------------------------------------------------

    def failure(self) -> GpucollError | None:
        """Return the failure that the library reports, or None."""
        return self.connection.failure() if self.connection.handle else None

    def abort(self) -> None:
        """End this communicator's work on the GPU."""
        self.registrations.close(is_aborting=True)
        if not self.connection.abort():
            return  # freeing memory would wait for the GPU, too
        # A GPU that has failed frees nothing; another thread may be capturing a graph.
        with contextlib.suppress(GpucollError), self.device.relaxed_capture():
            self.registrations.collect()

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
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
            **(IN_ORDER if self._keeps_order else {}),
            f"GPU: reductions that {library.vendor.name} lacks": BY_KERNELS,
        }
        if emulated:
            facts["emulated by sends and receives"] = ", ".join(emulated)
        for place, note in enumerate(library.notes(), 1):
            facts[f"note {place}"] = note
        return facts

    def close(self, limit_s: float) -> None:
        """Close the library's communicator; nothing is under way."""
        due_s = time.monotonic() + limit_s

        def watch() -> None:
            if time.monotonic() > due_s:
                raise TimeoutError

        self.registrations.close()
        try:
            self.connection.close(watch)
        except TimeoutError:  # the other ranks are not closing: the communicator was aborted
            pass
        self.scratch.close()
        self.registrations.collect()
