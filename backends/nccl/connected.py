"""A rank's GPU, connected with those of the other ranks by NCCL or RCCL.

Each rank finds its GPU and library (`look`). All exchange the results over the control channel,
decide in the same way whether they can be connected (`gpucoll.backends.choice.obstacle`), and join.
A rank that fails reports it, so that the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.backends.choice import KINDS, LIBRARY_NAMES, Found, ObstacleError, Wish, obstacle
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
from gpucoll.backends.nccl import library
from gpucoll.backends.nccl.backend import NcclBackend
from gpucoll.backends.nccl.collectives import Launch
from gpucoll.backends.nccl.communicator import NcclCommunicator, Watch
from gpucoll.backends.nccl.memory import Memory, Registration, Registrations
from gpucoll.collectives import Collective
from gpucoll.devices import Device, device_count, open_device
from gpucoll.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineError,
    GpucollError,
    MismatchError,
)
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group
from gpucoll.topology.default_gpu import default_number
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status
from gpucoll.wording import list_ranks

_ID_KEY, _FOUND_KEY, _ERROR_KEY = "id", "found", "error"
_LOOK_FOR_PEERS_S = 0.02


class Way(NamedTuple):
    """How GPUs are connected through a vendor's library."""

    backend: str
    """The backend's name."""
    kind: str
    """The kind of devices."""
    load: Callable[[], library.Library]
    join: Callable[[library.Library, Device, bytes, int, int, Watch], NcclCommunicator]
    """Makes the library's communicator: `NcclCommunicator.join`."""
    may_share: Callable[[], bool]
    """Returns whether the library takes several ranks on one device."""

    @property
    def name(self) -> str:
        """The library's name, for errors."""
        return LIBRARY_NAMES[self.backend]


def _way_of(backend: str) -> Way:
    return Way(
        backend,
        KINDS[backend],
        partial(library.load, backend),
        NcclCommunicator.join,
        lambda: config.variable(config.NCCL_MULTI_RANK_GPU_ENABLE) == "1",
    )


def look(way: Way, number: int | None, group: Group) -> Found:
    """Load what this rank needs; a missing part becomes a `Found.problem`."""
    kind, copy, problem = way.kind, None, ""
    try:
        copy = way.load()
    except (BackendUnavailableError, ImportError) as error:
        problem = _said(kind, error)
    try:  # even without the library: another backend may serve the rank's GPU
        if number is None:  # the GPU at the rank's local index
            local_rank = config.local_rank(group.local_rank)
            number = default_number(local_rank, device_count(kind)) or 0
        device = open_device(kind, number)
    except (BackendUnavailableError, ImportError) as error:
        return Found(problem or _said(kind, error))
    if copy is None:
        return Found(problem, device.label)
    return Found(
        "",
        device.label,
        device.identity.uuid,
        device.identity.name,
        copy.version,
        way.may_share(),
        group.here,
    )


def _said(kind: str, error: Exception) -> str:
    if isinstance(error, BackendUnavailableError):
        return str(error)
    return f"the support for {kind} GPUs cannot be loaded: {error}"


def join(
    group: Group,
    channel: Channel,
    calls: EnqueuedCalls,
    way: Way,
    number: int | None,
    timeout_s: float | None,
) -> NcclCommunicator:
    """Join the GPUs of all ranks. Every rank must call it.

    Parameters
    ----------
    way : Way
        The library.
    number : int or None
        The number of this rank's GPU in this process; None: the GPU at the rank's local index.
    timeout_s : float or None
        Deadline for all ranks to arrive, and for the library to connect them.

    Raises
    ------
    BackendUnavailableError
        The GPUs cannot be connected; all ranks raise the same error. It is an ObstacleError if this
        was known before any rank began to join.
    """
    found = look(way, number, group)
    mine: dict[str, Any] = {_FOUND_KEY: found}
    if group.rank == 0 and not found.problem:
        try:
            mine[_ID_KEY] = way.load().unique_id().hex()
        except BackendUnavailableError as problem:
            mine[_FOUND_KEY] = found._replace(problem=str(problem))
    everyone = exchange(channel, mine, timeout_s)
    all_found = [Found(*item[_FOUND_KEY]) for item in everyone]
    all_found = [item._replace(version=tuple(item.version)) for item in all_found]
    if reason := obstacle(way.backend, all_found):
        text = f"{way.name} cannot connect these ranks: {reason}"
        raise ObstacleError(text, has_gpus=all(item.device for item in all_found))
    device = open_device(way.kind, int(found.device.partition(":")[2]))
    watch = watch_of(group, calls, "connecting the GPUs", timeout_s)
    connection, error = None, ""
    try:
        connection = way.join(
            way.load(),
            device,
            bytes.fromhex(everyone[0][_ID_KEY]),
            group.world_size,
            group.rank,
            watch,
        )
    except BackendUnavailableError as problem:
        error = str(problem)
        calls.say_failed()
    agree(channel, way.name, connection, error, timeout_s)
    assert connection is not None
    return connection


def agree(
    channel: Channel,
    name: str,
    connection: NcclCommunicator | None,
    error: str,
    timeout_s: float | None,
) -> None:
    """Raise on every rank if any rank could not be connected."""
    try:
        everyone = exchange(channel, {_ERROR_KEY: error}, timeout_s)
    except BaseException:
        if connection is not None:
            connection.abort()
        raise
    failed = [(rank, item[_ERROR_KEY]) for rank, item in enumerate(everyone) if item[_ERROR_KEY]]
    if failed:
        if connection is not None:
            connection.abort()
        # A rank that only heard of another's failure says so; the original cause is more useful.
        rank, text = min(failed, key=lambda item: item[1].startswith(_HEARD))
        raise BackendUnavailableError(f"{name} cannot connect these ranks: rank {rank}: {text}")


_HEARD = "another rank failed"


def watch_of(
    group: Group,
    calls: EnqueuedCalls,
    doing: str,
    timeout_s: float | None,
    lost_ranks: Callable[[], Collection[int]] | None = None,
) -> Callable[[], None]:
    """Return a function that checks, while the library is busy, whether to go on waiting.

    `lost_ranks` returns the ranks whose loss makes waiting pointless. The default includes ranks
    that have closed the communicator, for steps that no rank completes before all ranks take part.
    """
    lost_ranks = group.gone_ranks if lost_ranks is None else lost_ranks
    limit_s = group.timeout_s if timeout_s is None else timeout_s
    begun_s = looked_s = time.monotonic()

    def watch() -> None:
        nonlocal looked_s
        if calls.compare() == Status.MISMATCH:  # ranks that make different calls may never meet
            group.abort(Abort.ENQUEUED_MISMATCH, group.rank, calls.compared + 1)
        group.raise_if_aborted()
        if failed := calls.failed_ranks():
            raise BackendUnavailableError(f"{_HEARD} ({list_ranks(failed)})")
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_FOR_PEERS_S:
            looked_s = now_s
            if lost := lost_ranks():
                group.break_with(Abort.LOST, min(lost))
        if now_s - begun_s > limit_s:
            group.abort(Abort.DEADLINE)
            raise group.fail(
                DeadlineError(
                    f"rank {group.rank} of {group.world_size} waited {limit_s:g} s in {doing}: the "
                    "vendor's library does not get on. The communicator is broken: close it"
                )
            )

    return watch


def exchange(channel: Channel, mine: Any, timeout_s: float | None) -> list[Any]:
    """Return the values of all ranks, by rank; each must be JSON-serialisable."""
    data = json.dumps(mine).encode()
    everyone = channel.all_gather_bytes(data, Collective.CONNECT, timeout_s=timeout_s)
    return [json.loads(part) for part in everyone]


# --- memory of all ranks together -----------------------------------------------------------------

# NCCL's fastest kernels need a symmetric window. Registering one is collective. So the ranks first
# agree over the control channel: if a rank has too little memory or requests another size, all
# learn of it before the library is called.
#
# Ending a window is not collective. But each rank's NCCL places the next window according to those
# that it has ended so far, and a window must have the same place on all ranks (``ncclSpaceAlloc``
# in NCCL's ``dev_runtime.cc``: multicast finds it by its place). Arrays die whenever each rank's
# garbage collector runs. So the ranks end windows together, before they make the next one, and only
# windows that are dead on all ranks.


def _allocate_window(
    backend: NcclBackend, issuer: Issuer, channel: Channel, size_bytes: int, timeout_s: float | None
) -> Memory:
    """Return this rank's part of a new window; every rank must call it.

    If any rank's library has no windows (before NCCL 2.27), all ranks get registered memory
    instead.

    Raises
    ------
    MemoryError
        A rank's GPU has too little free memory; all ranks raise the same error.
    MismatchError
        The ranks request different sizes. Nothing was allocated.
    BackendError
        The library failed to make the window; the communicator is broken.
    """
    registrations, group = backend.registrations, issuer.group
    issuer.synchronize()
    registrations.collect(issuer.lock, _dead_on_all(channel, registrations.dead_windows, timeout_s))
    memory, problem = None, ""
    try:
        with issuer.lock, backend.device:
            memory = registrations.allocate(size_bytes, is_registered=False)
    except (MemoryError, BackendError) as error:
        problem = str(error)
    has_windows = _agree_on_window(
        channel, size_bytes, problem, backend.library.has("ncclCommWindowRegister"), timeout_s
    )
    assert memory is not None
    watch = watch_of(group, issuer.calls, "registering a window", timeout_s)
    try:
        with issuer.lock:
            if has_windows:
                settle = backend.connection.settle
                registrations.register_window(memory, lambda code: settle(code, watch))
            else:
                registrations.register_memory(memory)
    except BackendError as error:
        group.abort(Abort.BACKEND)  # so that the others stop waiting for this rank
        raise group.fail(error) from None
    return memory


def _dead_on_all(channel: Channel, mine: list[int], timeout_s: float | None) -> frozenset[int]:
    """Return the windows that no rank uses any more."""
    return frozenset(mine).intersection(*exchange(channel, mine, timeout_s))


def _agree_on_window(
    channel: Channel, size_bytes: int, problem: str, has_windows: bool, timeout_s: float | None
) -> bool:
    """Return whether every rank has windows; raise on all ranks if one of them has a problem."""
    everyone = exchange(channel, [size_bytes, problem, has_windows], timeout_s)
    sizes = [size for size, _, _ in everyone]
    if len(set(sizes)) > 1:
        asked = ", ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
        raise MismatchError(
            f"empty(symmetric=True) needs the same number of bytes on every rank; got {asked}"
        )
    for rank, (_, text, _) in enumerate(everyone):
        if text:
            raise MemoryError(f"empty(symmetric=True): rank {rank}: {text}")
    return all(has for _, _, has in everyone)


# --- the backend ----------------------------------------------------------------------------------


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
        new_watch = partial(watch_of, group, calls, what, None, lost)
        place = Place(group.rank, group.world_size)
        backend = self.new_backend(connection, place, new_watch, group.keeps_order)
        issuer = Issuer(group, calls, connection.device, backend.failure, backend.abort)
        backend.in_driver = issuer.in_driver
        resources = GpuResources(
            connection, backend.registrations, backend.scratch, issuer.streams, issuer.in_flight
        )
        super().__init__(group, calls, backend, issuer, resources, exits)

    def new_backend(
        self,
        connection: NcclCommunicator,
        place: Place,
        new_watch: Callable[[], Watch],
        keeps_order: bool,
    ) -> NcclBackend:
        """Return the backend that this class puts calls through."""
        return NcclBackend(connection, place, new_watch, keeps_order)

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
        return _allocate_window(self.backend, self.issuer, channel, size_bytes, timeout_s)

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
        watch = watch_of(self._group, self._calls, "splitting", timeout_s)
        made, error = None, ""
        try:
            with self.issuer.lock:
                made = self.backend.connection.split(color, key, watch)
        except BackendUnavailableError as problem:
            error = str(problem)
            self._calls.say_failed()
        agree(channel, self.backend.library.vendor.name, made, error, timeout_s)
        return made


def connect(
    group: Group,
    channel: Channel,
    calls: EnqueuedCalls,
    name: str,
    number: int | None,
    timeout_s: float | None,
    wish: Wish,
) -> GpuBackend:
    """Connect all ranks' GPUs: `gpucoll.backends.gpu.protocol.GpuBackends`."""
    assert not wish.mixed, "a vendor's library moves GPU arrays only"
    if interface := group.interface:
        from gpucoll.backends.nccl import network  # of use between hosts only

        network.choose_interface(interface)
    made = join(group, channel, calls, _way_of(name), number, timeout_s)
    return Connected(group, calls, made, wish.exits)


def adopt(group: Group, calls: EnqueuedCalls, made: NcclCommunicator, *, exits: bool) -> GpuBackend:
    """Take over the result of the parent communicator's `Connected.split`."""
    return Connected(group, calls, made, exits)
