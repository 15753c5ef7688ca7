"""A rank's GPU, connected with those of the other ranks by oneCCL.

With Host devices in the place of GPUs (``GPUCOLL_DEVICE=host``), oneCCL's CPU plug-in moves their
memory: that is how this backend is tested.
"""

from __future__ import annotations

from collections.abc import Callable

from gpucoll import config
from gpucoll.backends.choice import HOST_DEVICE, KINDS, Wish
from gpucoll.backends.gpu.protocol import GpuBackend
from gpucoll.backends.gpu.steps import Place
from gpucoll.backends.nccl.communicator import NcclCommunicator, Watch
from gpucoll.backends.nccl.connected import Connected, Way, agree, exchange, join, watch_of
from gpucoll.backends.oneccl import library
from gpucoll.backends.oneccl.backend import OneCclBackend
from gpucoll.backends.oneccl.communicator import OneCclCommunicator
from gpucoll.errors import BackendUnavailableError
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group

_BACKEND = "oneccl"


def _way() -> Way:
    is_on_host = config.uses_host_devices()
    kind = HOST_DEVICE if is_on_host else KINDS[_BACKEND]
    return Way(_BACKEND, kind, library.load, OneCclCommunicator.join, lambda: is_on_host)


class OneCclConnected(Connected):
    """The connected GPU, as `Connected`; each part of a split connects anew."""

    def new_backend(
        self,
        connection: NcclCommunicator,
        place: Place,
        new_watch: Callable[[], Watch],
        keeps_order: bool,
    ) -> OneCclBackend:
        """Return the backend that this class puts calls through."""
        assert isinstance(connection, OneCclCommunicator)
        return OneCclBackend(connection, place, new_watch, keeps_order)

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
        return self.backend.describe()

    def split(
        self, channel: Channel, color: int | None, key: int, timeout_s: float | None
    ) -> OneCclCommunicator | None:
        """Connect the ranks of each color by an id of their own; every rank calls it.

        The first rank of a color makes the id.
        """
        self.issuer.synchronize()
        way, rank, error = _way(), self._group.rank, ""
        everyone = exchange(channel, [color, key], timeout_s)
        members = [at for at, (its, _) in enumerate(everyone) if its == color and color is not None]
        members.sort(key=lambda at: (everyone[at][1], at))
        unique_id, made = "", None
        try:
            if members[:1] == [rank]:
                unique_id = way.load().unique_id().hex()
        except BackendUnavailableError as problem:
            error = str(problem)
        ids = exchange(channel, unique_id, timeout_s)
        watch = watch_of(self._group, self._calls, "splitting", timeout_s)
        try:
            if members and (id_ := ids[members[0]]):
                place = len(members), members.index(rank)
                given = bytes.fromhex(id_), *place
                made = OneCclCommunicator.join(way.load(), self.device, *given, watch)
        except BackendUnavailableError as problem:
            error = str(problem)
            self._calls.say_failed()
        agree(channel, way.name, made, error, timeout_s)
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
    library.set_environment(group.interface, is_on_host=config.uses_host_devices())
    made = join(group, channel, calls, _way(), number, timeout_s)
    assert isinstance(made, OneCclCommunicator)
    return _connected(group, calls, made, wish.exits)


def adopt(
    group: Group, calls: EnqueuedCalls, made: OneCclCommunicator, *, exits: bool
) -> GpuBackend:
    """Take over the result of the parent communicator's `OneCclConnected.split`."""
    return _connected(group, calls, made, exits)


def _connected(
    group: Group, calls: EnqueuedCalls, made: OneCclCommunicator, exits: bool
) -> OneCclConnected:
    connected = OneCclConnected(group, calls, made, exits)
    in_flight = connected.issuer.in_flight
    made.held = lambda: in_flight.arrays
    return connected
