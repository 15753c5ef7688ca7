"""A rank's GPU after the direct backend has connected it."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.arrays.device_array import DeviceArray
from gpucoll.backends.choice import NOT_DIRECT, Found, Wish
from gpucoll.backends.direct import between, peer_memory, word_trial
from gpucoll.backends.direct.backend import DirectBackend
from gpucoll.backends.direct.inner import Inner, meet, new_token, tell
from gpucoll.backends.direct.peer import PeerPath
from gpucoll.backends.direct.schedule import RING
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.backends.gpu.abandoned import end_all, watch_over
from gpucoll.backends.gpu.connected import GIVING_UP_S, ConnectedGpu
from gpucoll.backends.gpu.in_flight import InFlight, StreamCall
from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.gpu.protocol import GpuBackend
from gpucoll.backends.gpu.streams import Streams
from gpucoll.devices import Device, device_count, open_device, open_host
from gpucoll.errors import ArgumentError, BackendUnavailableError, GpucollError, MismatchError
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group
from gpucoll.topology.default_gpu import default_number


class Freed(NamedTuple):
    """A piece of GPU memory whose last array is gone. Freeing it waits for the GPU."""

    device: Device
    address: int

    def end(self) -> None:
        """Return it to the driver."""
        with contextlib.suppress(GpucollError):
            self.device.free(self.address)


class Memory:
    """A piece of GPU memory for arrays; freed after the last of them is gone."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self._size_bytes = size_bytes
        self._address = device.allocate(max(size_bytes, 1))
        watch_over(self, Freed(device, self._address))

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return an array over the beginning of this memory; it keeps the memory alive."""
        assert math.prod(shape) <= max(self._size_bytes, 1)
        return DeviceArray(self._address, shape, dtype, self._device.label, self)


class GpuResources(NamedTuple):
    """Everything that a communicator owns on its GPU. None of it may refer to the communicator."""

    backend: DirectBackend
    streams: Streams
    in_flight: InFlight

    def end(self) -> None:
        """Release it, whatever the other ranks do."""
        device = self.backend.device
        self.backend.abort()
        if not self.backend.let_go(GIVING_UP_S):
            _left_in_use.extend(self.in_flight.arrays)
        self.in_flight.let_go(self.streams)
        with contextlib.suppress(GpucollError), device, device.relaxed_capture():
            self.streams.close()


_left_in_use: list[Any] = []
"""Arrays that a stream may still use after their communicator is gone: they are never freed."""


class Divided(NamedTuple):
    """The result of `Connected.split`."""

    backend: DirectBackend

    def abort(self) -> None:
        """Release it, if no communicator is made of it."""
        self.backend.abort()
        self.backend.let_go(GIVING_UP_S)


class Connected(ConnectedGpu[DirectBackend]):
    """The connected GPU, from the first call on GPU arrays to the communicator's end.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Posts and compares calls.
    backend : DirectBackend
        Enqueues them.
    exits : bool
        Whether a failure that goes unnoticed ends the process.
    """

    def __init__(
        self, group: Group, calls: EnqueuedCalls, backend: DirectBackend, exits: bool
    ) -> None:
        issuer = Issuer(group, calls, backend.device, backend.failure, backend.abort)
        # Not a bound method of the issuer: the backend must not keep the issuer alive.
        resources = GpuResources(backend, issuer.streams, issuer.in_flight)
        super().__init__(group, calls, backend, issuer, resources, exits)

    def issue(self, stream_call: StreamCall) -> Any:
        """Put one call on its stream and return immediately."""
        self.backend.in_driver = self.issuer.in_driver
        try:
            return super().issue(stream_call)
        finally:
            self.backend.in_driver = contextlib.nullcontext

    def issue_group(self, stream_calls: Any) -> Any:
        """Put several calls on their streams; they run in no particular order."""
        self.backend.in_driver = self.issuer.in_driver
        try:
            return super().issue_group(stream_calls)
        finally:
            self.backend.in_driver = contextlib.nullcontext

    def _look_for_capture(self, stream_call: StreamCall) -> None:
        if stream_call.is_on_stream and self.device.is_capturing(stream_call.stream):
            raise ArgumentError(
                f"{stream_call.name}: backend 'direct' cannot be part of a captured graph: the "
                "host has a part in each call, which no replay repeats. Call it outside, or use "
                "the vendor's library"
            )
        stream_call.is_captured = False

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory of this rank's GPU."""
        if not self.backend.has_gpu:
            raise BackendUnavailableError(
                f"rank {self._group.rank} of {self._group.world_size} has no GPU, and takes part "
                "with host arrays: make them by comm.empty without like="
            )
        end_all()
        return Memory(self.device, size_bytes)

    def allocate_window(self, channel: Channel, size_bytes: int, timeout_s: float | None) -> Memory:
        """Return memory of this rank's GPU, once all ranks have requested the same size."""
        made, problem = None, ""
        try:
            made = self.allocate(size_bytes)
        except (MemoryError, GpucollError) as error:
            problem = str(error)
        everyone = exchange(channel, [size_bytes, problem], timeout_s)
        if len({size for size, _ in everyone}) > 1:
            asked = ", ".join(f"rank {rank} {size}" for rank, (size, _) in enumerate(everyone))
            raise MismatchError(
                f"empty(symmetric=True) needs the same number of bytes on every rank; got {asked}"
            )
        for rank, (_, text) in enumerate(everyone):
            if text:
                raise MemoryError(f"empty(symmetric=True): rank {rank}: {text}")
        assert made is not None
        return made

    def register(self, address: int, size_bytes: int) -> None:
        """Return None: staged arrays gain nothing by registration."""

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
        return self.backend.describe()

    def split(
        self, channel: Channel, color: int | None, key: int, timeout_s: float | None
    ) -> Divided | None:
        """Let the ranks of one color meet anew; every rank calls it, after its calls are done."""
        self.issuer.synchronize()
        group = self._group
        everyone = exchange(channel, [color, key, group.rank, new_token()], timeout_s)
        mine = sorted((item for item in everyone if item[0] == color), key=lambda item: item[1:3])
        ranks = [] if color is None else [item[2] for item in mine]
        inner = meet(group, channel, ranks, mine[0][3], timeout_s)
        if inner is None:
            return None
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        made = self.backend
        return Divided(backend_over(self.device, inner, limit_s, made.wish, has_gpu=made.has_gpu))


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
    kind = look_for_gpus().kind
    if kind in NOT_DIRECT:
        kind = ""
    has_gpu = bool(kind) or not wish.mixed
    if has_gpu:
        found, device = look(kind, number, group)
    else:
        found, device = Found(), open_host()
    everyone = exchange(channel, [found.problem, new_token()], timeout_s)
    raise_problems(everyone)
    assert device is not None
    inner = meet(group, channel, range(group.world_size), everyone[0][1], timeout_s)
    assert inner is not None
    limit_s = group.timeout_s if timeout_s is None else timeout_s
    backend = backend_over(device, inner, limit_s, wish, has_gpu=has_gpu)
    return Connected(group, calls, backend, wish.exits)


def backend_over(
    device: Device, inner: Inner, timeout_s: float, wish: Wish, *, has_gpu: bool
) -> DirectBackend:
    """Return a backend for the inner group's ranks; every rank of that group calls it."""
    backend, problem = None, ""
    try:
        try:
            backend = DirectBackend(device, inner, wish, has_gpu=has_gpu)
        except (MemoryError, GpucollError) as error:
            problem = str(error)
        raise_problems(exchange(inner.channel, [problem], timeout_s))
        assert backend is not None
        if wish.mixed:
            backend.why_staged = "none: other ranks may pass host arrays (mixed=True)"
        else:
            share_memory(backend, timeout_s)
        if wish.schedule == RING and not backend.paths and inner.group.world_size > 1:
            reason = backend.why_staged.removeprefix("none: ")
            raise BackendUnavailableError(
                "direct_schedule='ring' needs GPUs that share memory with those of their host, but "
                f"{reason}: leave direct_schedule (or {config.DIRECT_SCHEDULE}) out"
            )
        return backend
    except BaseException:
        if backend is None:
            inner.close()
        else:
            backend.abort()
            backend.let_go(GIVING_UP_S)
        raise


def share_memory(backend: DirectBackend, timeout_s: float) -> None:
    """Let the ranks' GPUs share memory if they can; every rank calls it."""
    group, channel = backend.inner.group, backend.inner.channel
    if group.over_mpi is not None:
        from gpucoll.backends.direct.through_mpi import slots_on_gpus  # only if MPI is used

        backend.why_staged = "none: arrays go through MPI"
        found = slots_on_gpus(
            backend.device,
            backend.inner,
            timeout_s,
            lambda mine: exchange(channel, mine, timeout_s),
        )
        backend.slots_for_mpi, backend.reduces_on_gpu, backend.by_mpi = found
        if backend.slots_for_mpi is None:
            connect_between(backend, timeout_s)
        return
    if connect_between(backend, timeout_s):
        backend.why_staged = "none: the ranks are on several hosts"
        return
    place = backend.device, group.rank, group.world_size
    try:
        memory = peer_memory.connect(*place, tell(channel, timeout_s), wish=backend.wish.schedule)
        backend.peer = PeerPath(memory, group.keeps_order)
    except BackendUnavailableError as error:
        backend.why_staged = f"none: {error}"


def connect_between(backend: DirectBackend, timeout_s: float) -> bool:
    """Let the GPUs of several hosts reduce; return whether there are several."""
    group, channel = backend.inner.group, backend.inner.channel
    hosts = [host for (host,) in exchange(channel, [group.here], timeout_s)]
    if len({*hosts}) == 1:
        return False
    parts = backend.device, backend.inner, backend.messages, backend.wish.schedule
    try:
        backend.between = between.connect(*parts, hosts, timeout_s)
    except BackendUnavailableError as error:
        backend.why_between = str(error)
    return True


def adopt(group: Group, calls: EnqueuedCalls, made: Divided, *, exits: bool) -> GpuBackend:
    """Take over the result of the parent communicator's `Connected.split`."""
    return Connected(group, calls, made.backend, exits)


def look(kind: str, number: int | None, group: Group) -> tuple[Found, Device | None]:
    """Open this rank's GPU; an obstacle becomes a `Found.problem`."""
    try:
        if number is None:  # the GPU at the rank's local index
            local_rank = config.local_rank(group.local_rank)
            number = default_number(local_rank, device_count(kind)) or 0
        device = open_device(kind, number)
        problem = "its driver reports that its streams cannot wait for words"
        if device.can_wait_for_values:
            problem = word_trial.problem_of(device)
    except (GpucollError, MemoryError) as error:
        return Found(str(error)), None
    identity = device.identity
    if problem:
        who = f"{device.label} ({identity.name}, driver {device.driver_version()})"
        return Found(f"{who}: {problem}: use another backend"), None
    return Found("", device.label, identity.uuid, identity.name, host=group.here), device


def raise_problems(everyone: list[Any]) -> None:
    """Raise on every rank if any rank has a problem."""
    problems = [f"rank {rank}: {said[0]}" for rank, said in enumerate(everyone) if said[0]]
    if problems:
        text = "; ".join(problems)
        raise BackendUnavailableError(f"backend 'direct' cannot connect these ranks: {text}")


def exchange(channel: Channel, mine: Any, timeout_s: float | None) -> list[Any]:
    """Return the values of all ranks, by rank; each must be JSON-serialisable."""
    return [json.loads(part) for part in tell(channel, timeout_s)(json.dumps(mine).encode())]
