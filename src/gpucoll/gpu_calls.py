"""A communicator's calls on GPU arrays: connected when first needed, issued on streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from gpucoll import devices, gpu_memory
from gpucoll.arrays import streams
from gpucoll.arrays.arguments import source_of
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.backends.choice import KINDS, Choice, Wish
from gpucoll.backends.gpu.flight import Departure, Flight
from gpucoll.config import check_timeout_s
from gpucoll.control.channel import ControlChannel
from gpucoll.control.enqueued import EnqueuedCalls
from gpucoll.control.group import HostGroup
from gpucoll.errors import (
    ArgumentError,
    BackendUnavailableError,
    GpucollError,
    StateError,
)
from gpucoll.gpu_call import GpuCall
from gpucoll.gpu_recipes import Recipes
from gpucoll.gpu_work import GpuWork
from gpucoll.postman import Collected, check_in_group
from gpucoll.preparation import Prepared
from gpucoll.types import Collective

CLOSING_S = 5.0
"""How long the vendor's library may take to let go; then it is ended by force."""


class GpuCalls:
    """The part of a communicator that moves GPU arrays.

    Parameters
    ----------
    group : HostGroup
        The ranks.
    channel : ControlChannel
        Over which they agree.
    choice : Choice
        What they agreed on when they met.
    wish : Wish
        What this rank's user asked for.
    run : callable
        ``Communicator._run``: runs a task on the host in its turn.
    """

    def __init__(
        self,
        group: HostGroup,
        channel: ControlChannel,
        choice: Choice,
        wish: Wish,
        run: Callable[..., Any],
    ) -> None:
        self._group = group
        self._channel = channel
        self.pick = choice.gpu
        self._wish = wish
        self._run = run
        self.refusal = "" if choice.gpu.backend else choice.gpu.reason
        """Why GPU arrays cannot be moved."""
        self._connected: Any = None
        self._entering = threading.Lock()
        self.recipes = Recipes()
        self.grouped: Collected[GpuCall] | None = None
        """What is collected while a group is open."""

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way."""
        return self._connected is not None and bool(self._connected.issuer.is_busy)

    # --- connecting -------------------------------------------------------------------------------

    def connect(self, number: int | None, timeout_s: float | None = None) -> None:
        """Connect all ranks' GPUs; every rank calls it.

        Parameters
        ----------
        number : int or None
            This rank's, as this process numbers it; None: the one of its place on the host.
        """
        from gpucoll.backends.nccl import connecting
        from gpucoll.backends.nccl.connected import Connected

        if self._wish.device is not None:
            number = self._wish.device

        def task(timeout_s: float | None) -> None:
            calls = EnqueuedCalls(self._group)
            try:
                connection = connecting.connect(
                    self._group, self._channel, calls, self.pick.backend, number, timeout_s
                )
            except BackendUnavailableError as error:
                self.refusal = str(error)
                raise
            self._connected = Connected(self._group, calls, connection, self._wish.exits)

        self._run("connect", task, _nothing, timeout_s=timeout_s)

    def _ready(self, call: GpuCall) -> Any:
        """Return what is connected; connect it where all ranks make this call."""
        template = call.template
        if self.refusal:
            raise BackendUnavailableError(
                f"x lies on {template.device}, but this communicator has no backend for GPU "
                f"arrays: {self.refusal}"
            )
        kind, _, number = template.device.partition(":")
        if kind != KINDS[self.pick.backend]:
            raise BackendUnavailableError(
                f"x lies on {template.device}, but this communicator's backend for GPU arrays is "
                f"{self.pick.backend}, for {KINDS[self.pick.backend]} devices ({self.pick.reason})"
            )
        if self._connected is None:
            if not call.requests:
                raise StateError(
                    f"{call.name}: the ranks' GPUs are not connected yet, and only two ranks make "
                    "this call. Make a collective call on GPU arrays first, or pass device= to "
                    "init, which connects them at once"
                )
            own = int(number) if number else _device_of(kind, call.buffers)
            self.connect(own, call.timeout_s)
        return self._connected

    def _check_arrays(
        self, connected: Any, name: str, template: Template, buffers: Sequence[Buffer]
    ) -> None:
        """Raise unless all memory is on this communicator's GPU, and is there."""
        device = connected.backend.device
        asks = streams.forgets_freed_memory(template.library)
        for buffer in buffers:
            if not buffer.size_bytes:
                continue
            if not buffer.address:
                raise ArgumentError(f"{name}: an array has no memory: was it freed?")
            label = buffer.device
            if asks or ":" not in label:
                number = device.device_of(buffer.address)
                if number is None:
                    raise ArgumentError(
                        f"{name}: {buffer.address:#x} is not memory of a GPU of this process: "
                        "was the array freed?"
                    )
                label = f"{device.kind}:{number}"
            if label != device.label:
                raise ArgumentError(
                    f"{name}: an array lies on {label}, but this communicator's GPU is "
                    f"{device.label}: one device per communicator. Copy it there, or make another "
                    "communicator (duplicate)"
                )

    # --- calling ----------------------------------------------------------------------------------

    def call(self, call: GpuCall, async_op: bool = False, lasting: Any = None) -> Any:
        """Make a call now, or keep it for the end of the group; return what the user gets."""
        check_timeout_s(call.timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, call.name, async_op, lasting)
            self.grouped.append(call)
            return lasting
        with self._alone():
            connected = self._prepared(call)
            launches = connected.launches(call.requests, call.messages)
            if async_op:
                return self._issue_beside(connected, call, launches)
            flight = self._issue(connected, call, launches, call.address)
            if not streams.is_stream_ordered(call.template.library):
                connected.issuer.synchronize(flight)
            elif not call.is_own:  # the result is looked at, or filled in, on the current stream
                connected.issuer.follow(call.template.stream, call.address)
            return call.finish()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread."""
        if not self._entering.acquire(blocking=False):
            self._refuse_second_thread()
        try:
            yield
        finally:
            self._entering.release()

    def _refuse_second_thread(self) -> NoReturn:
        raise StateError(
            f"another thread of rank {self._group.rank} of {self._group.world_size} is in a call "
            "on this communicator: one thread at a time, or one communicator per thread (duplicate)"
        )

    def _prepared(self, call: GpuCall) -> Any:
        """Return what is connected, once this rank's part of a call is checked."""
        self._group.check_open()
        connected = self._ready(call)
        connected.issuer.raise_failure()
        self._check_arrays(connected, call.name, call.template, call.buffers)
        return connected

    def _issue_beside(self, connected: Any, call: GpuCall, launches: Any) -> GpuWork:
        """Issue on the communicator's own stream, after what is on the caller's now."""
        issuer = connected.issuer
        issuer.follow(issuer.own_stream, call.address)
        flight = self._issue(connected, call, launches, issuer.own_stream)
        return _work(connected, flight, call.finish, call.template)

    def _issue(self, connected: Any, call: GpuCall, launches: Any, stream: int) -> Any:
        """Issue one call on a stream, behind what its memory was made on."""
        if not call.is_own:
            connected.issuer.follow(stream, call.template.stream)
        return connected.issue(_departure(connected, call, launches, stream))

    def run_group(self, calls: Sequence[GpuCall], timeout_s: float | None) -> None:
        """Make the calls of a group as one group of the library's."""
        if not calls:
            return
        with self._alone():
            self._run_group(calls, timeout_s)

    def _run_group(self, calls: Sequence[GpuCall], timeout_s: float | None) -> None:
        # A message cannot connect the ranks, a collective can.
        connected = self._prepared(next((call for call in calls if call.requests), calls[0]))
        departures = []
        for call in calls:
            self._prepared(call)
            if call.timeout_s is None:
                call.timeout_s = timeout_s
            launches = connected.launches(call.requests, call.messages)
            departures.append(_departure(connected, call, launches, call.address))
        for call in calls:
            if not call.is_own:
                connected.issuer.follow(call.address, call.template.stream)
        flights = connected.issue_group(departures)
        for call, flight in zip(calls, flights, strict=True):
            if not streams.is_stream_ordered(call.template.library):
                connected.issuer.synchronize(flight)
            elif not call.is_own:
                connected.issuer.follow(call.template.stream, call.address)
            call.finish()

    def prepare_plan(self, call: GpuCall) -> Callable[[], int]:
        """Return what makes a call again and again on the current stream; returns 0."""
        connected = self._prepared(call)
        launches = connected.launches(call.requests, ())
        synchronizes = not streams.is_stream_ordered(call.template.library)
        departure = _departure(connected, call, launches, call.address)
        found = connected.express(departure.signatures, launches)
        current_stream = streams.current_stream_of(call.template)
        entering = self._entering

        def run() -> int:
            if self.grouped is not None:
                check_in_group(self.grouped, call.name, False, None)
                self.grouped.append(replace(call, stream=current_stream()))
                return 0
            if not entering.acquire(blocking=False):
                self._refuse_second_thread()
            try:
                self._group.check_open()
                departure.stream = current_stream()
                flight = connected.issue_express(departure, *found) if found else None
                if flight is None:
                    flight = connected.issue(departure)
            finally:
                entering.release()
            if synchronizes:
                connected.issuer.synchronize(flight)
            return 0

        return run

    # --- calling again ----------------------------------------------------------------------------

    def repeat(
        self,
        collective: Collective,
        x: Any,
        given: dict[str, Any],
        async_op: bool,
        timeout_s: float | None,
    ) -> Any:
        """Make a call of a kind that was made before; None: nothing was done, it is for `call`.

        `x` is of a type in `recipes.libraries`; the call is for its current stream.
        """
        connected = self._connected
        if connected is None or self.grouped is not None:
            return None
        check_timeout_s(timeout_s)
        if not self._entering.acquire(blocking=False):
            self._refuse_second_thread()
        try:
            self._group.check_open()
            ready = self.recipes.find(collective, x, given)
            if ready is None:
                return None
            name, express, addresses, template, keep, finish = ready
            stream = template.stream
            if async_op:
                stream = connected.issuer.own_stream
                connected.issuer.follow(stream, template.stream)
            departure = Departure(name, (), (), stream, keep, True, timeout_s)
            flight = connected.issue_express(departure, express, addresses)
            if flight is None:
                return None
            if async_op:
                return _work(connected, flight, finish, template)
            return finish()
        finally:
            self._entering.release()

    def learn(self, collective: Collective, x: Any, given: dict[str, Any], made: Prepared) -> None:
        """Make calls of this kind faster from now on, where that is possible."""
        if self._connected is not None and self.grouped is None:
            self.recipes.learn(collective, x, given, made, self._connected)

    # --- memory -----------------------------------------------------------------------------------

    def empty(
        self, shape: tuple[int, ...], dtype: Any, template: Template | None, symmetric: bool
    ) -> Any:
        """Return a new array in registered memory, of the template's library."""
        connected = self._open("empty")
        if not symmetric:
            return gpu_memory.empty(connected, shape, dtype, template)
        from gpucoll.backends.nccl import windows

        made: list[Any] = []

        def task(timeout_s: float | None) -> None:
            parts = connected.backend, connected.issuer, self._channel
            allocate = partial(windows.allocate, *parts, timeout_s=timeout_s)
            made.append(gpu_memory.empty(connected, shape, dtype, template, allocate))

        self._run("empty", task, _nothing)
        return made[0]

    def register(self, array: Any) -> gpu_memory.Registration:
        """Register an array's memory."""
        source = source_of(array, "array")
        if source.template.device == "cpu":
            raise BackendUnavailableError(
                "array lies in host memory, which cannot be registered: make it with comm.empty, "
                "or inside comm.shared_arrays()"
            )
        if source.is_packed:
            raise ArgumentError("array is not contiguous: register the array that it is a part of")
        connected = self._open("register")
        self._check_arrays(connected, "register", source.template, [source.buffer])
        return gpu_memory.Registration(connected, source.buffer)

    def _open(self, name: str) -> Any:
        """Return what is connected, for what only this rank does."""
        if self.refusal:
            raise BackendUnavailableError(
                f"{name}: this communicator has no backend for GPU arrays: {self.refusal}"
            )
        if self._connected is None:
            raise StateError(
                f"{name}: the ranks' GPUs are not connected yet. Pass device= to init, which "
                "connects them at once, or make a collective call on GPU arrays first"
            )
        return self._connected

    # --- certainty, the end -----------------------------------------------------------------------

    def check(self) -> None:
        """Wait for all calls on GPU arrays, and raise what went wrong."""
        if self._connected is not None:
            self._connected.issuer.synchronize()

    def close(self) -> None:
        """Wait for all calls, raise what went wrong, let go of the GPU."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self.refusal = "the communicator is closed"
            connected.close(CLOSING_S)

    def note_abort(self) -> None:
        """End on the GPU what this rank has just given up."""
        if self._connected is not None:
            self._connected.note_abort()

    def give_up(self) -> None:
        """Let go of everything without waiting: at the end of the process, or after an error."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            if self._group.is_forked:
                return  # the GPU is its parent's
            with contextlib.suppress(GpucollError):
                connected.give_up()

    # --- the rest ---------------------------------------------------------------------------------

    def split(self, color: int | None, key: int, timeout_s: float | None) -> Any:
        """Divide what is connected, as the ranks are; None where nothing is, or for no color."""
        if self._connected is None:
            return None
        return self._connected.split(self._channel, color, key, timeout_s)

    def adopt(self, connection: Any) -> None:
        """Take over what `split` of the communicator that this one comes from returned."""
        from gpucoll.backends.nccl.connected import Connected

        if connection is not None:
            calls = EnqueuedCalls(self._group)
            self._connected = Connected(self._group, calls, connection, self._wish.exits)

    def describe(self) -> dict[str, str]:
        """Return what is worth knowing."""
        if self._connected is not None:
            facts = {"GPU arrays": f"backend {self.pick.backend}: {self.pick.reason}"}
            return {**facts, **self._connected.backend.describe()}
        if self.refusal:
            return {"GPU arrays": f"none: {self.refusal}"}
        when = "to be connected at the first call on GPU arrays"
        return {"GPU arrays": f"backend {self.pick.backend}: {self.pick.reason}; {when}"}


def _work(connected: Any, flight: Flight, finish: Callable[[], Any], template: Template) -> GpuWork:
    return GpuWork(
        connected.issuer,
        flight,
        finish,
        streams.current_stream_of(template),
        must_complete=not streams.is_stream_ordered(template.library),
    )


def _departure(connected: Any, call: GpuCall, launches: Any, stream: int) -> Departure:
    signatures = connected.signatures(call.requests)
    keep, limit_s = call.buffers, call.timeout_s
    return Departure(call.name, signatures, launches, stream, keep, call.is_own, limit_s)


def _device_of(kind: str, buffers: Sequence[Buffer]) -> int | None:
    """Return which GPU the first of these arrays lies on, where the arrays do not say it."""
    addresses = (buffer.address for buffer in buffers if buffer.size_bytes)
    found = (devices.device_of(kind, address) for address in addresses)
    return next((number for number in found if number is not None), None)


def _nothing() -> None:
    """Return nothing: connecting has no result."""
