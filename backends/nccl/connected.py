"""A rank's GPU once it is connected: the backend, what issues its calls, and what watches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpucoll.backends.gpu.compiled_call import CompiledCall
from gpucoll.backends.gpu.enqueue_words import MOST_ARGUMENTS
from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.gpu.monitor_thread import MonitorThread
from gpucoll.backends.gpu.protocol import GpuBackend
from gpucoll.backends.gpu.signature import Signature, Signatures
from gpucoll.backends.nccl import bootstrap, windows
from gpucoll.backends.nccl.abandoned import GpuResources, end_all, watch_over
from gpucoll.backends.nccl.backend import NcclBackend
from gpucoll.backends.nccl.communicator import NcclCommunicator
from gpucoll.backends.nccl.launch import Launch, Place
from gpucoll.backends.nccl.memory import Memory, Registration
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.errors import (
    ArgumentError,
    BackendUnavailableError,
    DeadlineError,
)
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group

GIVING_UP_S = 5.0
"""How long giving up waits for a thread that is in the driver or in the vendor's library."""


class Connected:
    """What exists from the first call on GPU arrays to the communicator's end.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Where calls are posted and compared.
    connection : NcclCommunicator
        The vendor library's communicator.
    exits : bool
        Whether a failure that nobody asks for ends the process.
    """

    def __init__(
        self, group: Group, calls: EnqueuedCalls, connection: NcclCommunicator, exits: bool
    ) -> None:
        self._group = group
        self._calls = calls
        place = Place(group.rank, group.world_size)
        new_watch = partial(
            bootstrap.watch_of, group, calls, "a call of the vendor's library", None
        )
        self.backend = NcclBackend(connection, place, new_watch)
        self.device = connection.device
        self.issuer = Issuer(
            group, calls, connection.device, self.backend.failure, self.backend.abort
        )
        self.backend.in_driver = self.issuer.in_driver
        self._signatures = Signatures(calls, *place)
        self._monitor_thread = MonitorThread(self.issuer, exits=exits)
        backend, issuer = self.backend, self.issuer
        self._resources = GpuResources(
            connection, backend.registrations, backend.scratch, issuer.streams, issuer.in_flight
        )
        # Works and plans have the issuer, too: as long as somebody has one, its call goes on.
        self._dropped = watch_over(issuer, self._resources)
        end_all()

    def launches(
        self, requests: Sequence[Request], messages: Sequence[MessageRequest]
    ) -> list[Launch]:
        """Return what a call's requests enqueue; ArgumentTypeError where the library cannot."""
        made = [self.backend.prepare(request) for request in requests]
        return [*made, self.backend.prepare_messages(messages)] if messages else made

    def signatures(self, requests: Sequence[Request]) -> list[Signature]:
        """Return what ranks compare of a call's requests."""
        return [self._signatures.of(request) for request in requests]

    def issue(self, stream_call: StreamCall) -> IssuedCall:
        """Put one call on its stream, and return at once."""
        launches = stream_call.launches
        if len(launches) == 1 and self.backend.outgrows_scratch(launches[0]):
            self._drain(stream_call)
        with self.issuer.lock, self.device:
            self._look_for_capture(stream_call)
            if len(launches) == 1:
                self.backend.reserve(launches[0])
                enqueue: Callable[[], None] = partial(
                    self.backend.enqueue, launches[0], stream_call.stream
                )
            else:
                enqueue = self._together((stream_call,))
            return self.issuer.issue((stream_call,), enqueue)[0]

    def _drain(self, stream_call: StreamCall) -> None:
        """Wait until earlier calls are done, before memory is given back for this one.

        The driver waits for them, too, but without a deadline: the monitor thread could not end
        what hangs there while this thread is in the driver and holds the lock.
        """
        self.refuse_capture(stream_call)  # where nothing may be asked for
        self.issuer.synchronize()

    def compiled_call(
        self, name: str, signatures: Sequence[Signature], launches: Sequence[Launch]
    ) -> tuple[CompiledCall, tuple[int, int]] | None:
        """Return what makes such a call in one compiled step, where there is no more to it.

        And the addresses that this one is given.
        """
        if len(signatures) != 1 or len(launches) != 1:
            return None
        launch = launches[0]
        if launch.call is None or launch.factor is not None:
            return None
        symbol, arguments = launch.call
        if len(arguments) + 2 > MOST_ARGUMENTS:  # communicator and stream come behind them
            return None
        source, destination, *settings = (int(argument or 0) for argument in arguments)
        function = self.backend.function(symbol, settings)
        made = CompiledCall(self.issuer, name, signatures[0], function, self.backend.connection)
        return made, (source, destination)

    def issue_group(self, stream_calls: Sequence[StreamCall]) -> list[IssuedCall]:
        """Put several calls on their streams as one group of the library's."""
        with self.issuer.lock, self.device:
            enqueue = self._together(stream_calls)
            for stream_call in stream_calls:
                self._look_for_capture(stream_call)
            return self.issuer.issue(stream_calls, enqueue)

    def _together(self, stream_calls: Sequence[StreamCall]) -> Callable[[], None]:
        for stream_call in stream_calls:
            self._check_groupable(stream_call)
        pairs = [(launch, each.stream) for each in stream_calls for launch in each.launches]
        return partial(self.backend.enqueue_together, pairs)

    def _check_groupable(self, stream_call: StreamCall) -> None:
        for launch in stream_call.launches:
            self.backend.check_groupable(launch, stream_call.name)

    def refuse_capture(self, stream_call: StreamCall) -> None:
        """Raise where a graph is captured that this cannot be part of: before anything joins it."""
        with self.device:
            self._look_for_capture(stream_call)

    def _look_for_capture(self, stream_call: StreamCall) -> None:
        """Note whether a graph is being captured; refuse what cannot be part of one."""
        stream_call.is_captured = self.device.is_capturing(stream_call.stream)
        if stream_call.is_captured:
            self._check_groupable(stream_call)
            if not stream_call.is_own:
                raise ArgumentError(
                    f"{stream_call.name}: a captured graph uses the same memory at every replay: "
                    "give contiguous arrays, and out="
                )
            self.backend.connection.is_in_graphs = True

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory that the library knows on this rank."""
        registrations = self.backend.registrations
        registrations.collect(self.issuer.lock)
        with self.issuer.lock, self.device:
            return registrations.allocate(size_bytes)

    def allocate_window(self, channel: Channel, size_bytes: int, timeout_s: float | None) -> Memory:
        """Return this rank's part of a symmetric window; every rank calls it."""
        return windows.allocate(self.backend, self.issuer, channel, size_bytes, timeout_s)

    def register(self, address: int, size_bytes: int) -> Registration | None:
        """Make the library know memory; None where it has no use for that."""
        return self.backend.registrations.register(address, size_bytes)

    def describe(self) -> dict[str, str]:
        """Return what is worth knowing: name -> sentence."""
        facts = self.backend.describe()
        if interface := self._group.interface:
            from gpucoll.backends.nccl import network  # of use between hosts only

            facts |= network.describe(interface, self.device.identity.pci_bus_id)
        return facts

    def split(
        self, channel: Channel, color: int | None, key: int, timeout_s: float | None
    ) -> NcclCommunicator | None:
        """Divide the library's communicator; every rank calls it, after its calls are done."""
        self.issuer.synchronize()
        watch = bootstrap.watch_of(self._group, self._calls, "splitting", timeout_s)
        made, error = None, ""
        try:
            with self.issuer.lock:
                made = self.backend.connection.split(color, key, watch)
        except BackendUnavailableError as problem:
            error = str(problem)
            self._calls.say_failed()
        bootstrap.agree(channel, self.backend.name, made, error, timeout_s)
        return made

    def close(self, limit_s: float) -> None:
        """Wait for all calls, let go of everything, raise what went wrong and nobody was told."""
        issuer = self.issuer
        if self._group.was_told:
            self.give_up()
            return
        try:
            self._stop_watching()  # from here on this thread looks itself
        except DeadlineError as error:
            issuer.end(error)
            raise
        try:
            if issuer.is_busy:  # else all is known to be well, whatever the others did since
                issuer.synchronize()
        except BaseException:
            self.give_up()
            raise
        self._dropped.detach()
        issuer.end()  # all is known; the rest may fail
        end_all()
        self.backend.close(limit_s)
        issuer.close()

    def _stop_watching(self) -> None:
        """End the monitor thread; DeadlineError where it does not end."""
        group = self._group
        if not self._monitor_thread.stop(group.timeout_s):
            group.is_in_use = True
            raise DeadlineError(
                f"rank {group.rank} of {group.world_size} waited {group.timeout_s:g} s at close "
                f"for the thread that watches {self.device.label}: the driver or "
                f"{self.backend.name.upper()} does not return. What the communicator has on the "
                "GPU stays there: end the process"
            )

    def note_abort(self) -> None:
        """Give up on the GPU what this rank itself has just given up."""
        self.issuer.look()
        self._group.was_told = True

    def give_up(self) -> None:
        """Let go of everything without waiting for other ranks."""
        if not self._monitor_thread.stop(GIVING_UP_S) or not self.issuer.lock.acquire(
            timeout=GIVING_UP_S
        ):
            self._group.is_in_use = True
            self.issuer.end()
            return  # a thread hangs in the driver or the library: nothing there can be ended
        self._dropped.detach()
        self.issuer.end()
        try:
            self._resources.end()
        finally:
            self.issuer.lock.release()


def connect(
    group: Group,
    channel: Channel,
    calls: EnqueuedCalls,
    name: str,
    number: int | None,
    timeout_s: float | None,
    *,
    exits: bool,
) -> GpuBackend:
    """Connect all ranks' GPUs: `gpucoll.backends.gpu.protocol.GpuBackends`."""
    made = bootstrap.connect(group, channel, calls, name, number, timeout_s)
    return Connected(group, calls, made, exits)


def adopt(group: Group, calls: EnqueuedCalls, made: NcclCommunicator, *, exits: bool) -> GpuBackend:
    """Take over what `Connected.split` of the communicator before returned."""
    return Connected(group, calls, made, exits)
