"""A rank's GPU after NCCL or RCCL has connected it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from gpucoll.backends.gpu.abandoned import end_all
from gpucoll.backends.gpu.compiled_call import CompiledCall
from gpucoll.backends.gpu.connected import ConnectedGpu
from gpucoll.backends.gpu.deferred_release import let_go_later
from gpucoll.backends.gpu.enqueue_words import MOST_ARGUMENTS
from gpucoll.backends.gpu.in_flight import InFlight
from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.gpu.monitor import lost_ranks
from gpucoll.backends.gpu.protocol import GpuBackend
from gpucoll.backends.gpu.scratch import Scratch
from gpucoll.backends.gpu.signature import Signature
from gpucoll.backends.gpu.steps import Place
from gpucoll.backends.gpu.streams import Streams
from gpucoll.backends.nccl import bootstrap, windows
from gpucoll.backends.nccl.backend import NcclBackend
from gpucoll.backends.nccl.communicator import NcclCommunicator
from gpucoll.backends.nccl.launch import Launch
from gpucoll.backends.nccl.memory import Memory, Registration, Registrations
from gpucoll.errors import BackendUnavailableError, GpucollError
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group


class GpuResources(NamedTuple):
    """Everything that a communicator owns on its GPU. None of it may refer to the communicator."""

    connection: NcclCommunicator
    registrations: Registrations
    scratch: Scratch
    streams: Streams
    in_flight: InFlight

    def end(self) -> None:
        """Release it, whatever the other ranks do."""
        self.registrations.close(is_aborting=True)
        has_ended, device = self.connection.abort(), self.connection.device
        if not has_ended:
            let_go_later(device, self.in_flight.arrays)
        self.in_flight.let_go(self.streams)
        # A GPU that has failed frees nothing; another thread may be capturing a graph.
        with contextlib.suppress(GpucollError), device, device.relaxed_capture():
            self.streams.close()
            if has_ended:  # else freeing memory would wait for the GPU, too
                self.scratch.abandon()
                self.registrations.collect()


class Connected(ConnectedGpu[NcclBackend]):
    """The connected GPU, from the first call on GPU arrays to the communicator's end.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Posts and compares calls.
    connection : NcclCommunicator
        The vendor library's communicator.
    exits : bool
        Whether a failure that goes unnoticed ends the process.
    """

    def __init__(
        self, group: Group, calls: EnqueuedCalls, connection: NcclCommunicator, exits: bool
    ) -> None:
        what = "a call of the vendor's library"
        lost = partial(lost_ranks, group, calls)
        new_watch = partial(bootstrap.watch_of, group, calls, what, None, lost)
        place = Place(group.rank, group.world_size)
        backend = NcclBackend(connection, place, new_watch, group.keeps_order)
        issuer = Issuer(group, calls, connection.device, backend.failure, backend.abort)
        backend.in_driver = issuer.in_driver
        resources = GpuResources(
            connection, backend.registrations, backend.scratch, issuer.streams, issuer.in_flight
        )
        super().__init__(group, calls, backend, issuer, resources, exits)

    def compiled_call(
        self, name: str, signatures: Sequence[Signature], launches: Sequence[Launch]
    ) -> tuple[CompiledCall, tuple[int, int]] | None:
        """Return a compiled call for calls of this kind, and the two addresses of this one.

        Returns None if the call needs more than one compiled step.
        """
        if len(signatures) != 1 or len(launches) != 1:
            return None
        launch = launches[0]
        if launch.call is None or launch.factor is not None:
            return None
        symbol, arguments = launch.call
        if len(arguments) + 2 > MOST_ARGUMENTS:  # communicator and stream follow them
            return None
        source, destination, *settings = (int(argument or 0) for argument in arguments)
        function = self.backend.function(symbol, settings)
        made = CompiledCall(self.issuer, name, signatures[0], function, self.backend.connection)
        return made, (source, destination)

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory that is registered with the library on this rank."""
        registrations = self.backend.registrations
        end_all()
        registrations.collect(self.issuer.lock)
        with self.issuer.lock, self.device:
            return registrations.allocate(size_bytes)

    def allocate_window(self, channel: Channel, size_bytes: int, timeout_s: float | None) -> Memory:
        """Return this rank's part of a symmetric window; every rank must call it."""
        return windows.allocate(self.backend, self.issuer, channel, size_bytes, timeout_s)

    def register(self, address: int, size_bytes: int) -> Registration | None:
        """Register memory with the library; return None if it has no use for that."""
        return self.backend.registrations.register(address, size_bytes)

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
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


def connect(
    group: Group,
    channel: Channel,
    calls: EnqueuedCalls,
    name: str,
    number: int | None,
    timeout_s: float | None,
    *,
    exits: bool,
    mixed: bool = False,
) -> GpuBackend:
    """Connect all ranks' GPUs: `gpucoll.backends.gpu.protocol.GpuBackends`."""
    assert not mixed, "a vendor's library moves GPU arrays only"
    made = bootstrap.connect(group, channel, calls, name, number, timeout_s)
    return Connected(group, calls, made, exits)


def adopt(group: Group, calls: EnqueuedCalls, made: NcclCommunicator, *, exits: bool) -> GpuBackend:
    """Take over the result of the parent communicator's `Connected.split`."""
    return Connected(group, calls, made, exits)
