"""What a communicator asks of whatever moves GPU arrays, once the ranks' GPUs are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a communicator without GPUs needs none of it
    from gpucoll.arrays.device_array import DeviceArray
    from gpucoll.backends.gpu.compiled_call import CompiledCall
    from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
    from gpucoll.backends.gpu.issuer import Issuer
    from gpucoll.backends.gpu.signature import Signature
    from gpucoll.backends.protocol import MessageRequest, Request
    from gpucoll.devices import Device
    from gpucoll.group.protocol import Channel, EnqueuedCalls, Group


class Memory(Protocol):
    """A piece of GPU memory that the backend can use without a copy."""

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return an array over the beginning of this memory; it keeps the memory alive."""


class Registration(Protocol):
    """Memory of somebody else's that the backend has been told of."""

    @property
    def is_open(self) -> bool:
        """Whether the backend still knows it."""

    def close(self) -> None:
        """Make the backend forget it; the GPU is current, and the issuer's lock is held."""


class Divided(Protocol):
    """What `GpuBackend.split` made, until `GpuBackends.adopt` takes it over."""

    def abort(self) -> object:
        """Let go of it, where no communicator comes of it."""


class GpuBackend(Protocol):
    """Moves GPU arrays of one rank's GPU: enqueues and returns, and is watched from beside."""

    @property
    def issuer(self) -> Issuer:
        """What puts its calls on streams, and looks what becomes of them."""

    @property
    def device(self) -> Device:
        """This rank's GPU."""

    # --- preparing --------------------------------------------------------------------------------

    def launches(
        self, requests: Sequence[Request], messages: Sequence[MessageRequest]
    ) -> Sequence[Any]:
        """Return what a call's requests enqueue; ArgumentTypeError where that cannot be."""

    def signatures(self, requests: Sequence[Request]) -> list[Signature]:
        """Return what ranks compare of a call's requests."""

    def compiled_call(
        self, name: str, signatures: Sequence[Signature], launches: Sequence[Any]
    ) -> tuple[CompiledCall, tuple[int, int]] | None:
        """Return what makes such a call in one compiled step, and the addresses of this one.

        None where there is more to it.
        """

    # --- enqueuing --------------------------------------------------------------------------------

    def refuse_capture(self, stream_call: StreamCall) -> None:
        """Raise where a graph is captured that this cannot be part of: before anything joins it."""

    def issue(self, stream_call: StreamCall) -> IssuedCall:
        """Put one call on its stream, and return at once."""

    def issue_group(self, stream_calls: Sequence[StreamCall]) -> list[IssuedCall]:
        """Put several calls on their streams, in no order."""

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory that is known on this rank."""

    def allocate_window(self, channel: Channel, size_bytes: int, timeout_s: float | None) -> Memory:
        """Return this rank's part of a symmetric window; every rank calls it."""

    def register(self, address: int, size_bytes: int) -> Registration | None:
        """Make memory known on this rank; None where there is no use for that."""

    # --- the rest ---------------------------------------------------------------------------------

    def split(
        self, channel: Channel, color: int | None, key: int, timeout_s: float | None
    ) -> Divided | None:
        """Divide it, as the ranks are; every rank calls it. None for no color."""

    def describe(self) -> Mapping[str, str]:
        """Return what is worth knowing: name -> sentence."""

    def note_abort(self) -> None:
        """Give up on the GPU what this rank itself has just given up."""

    def close(self, limit_s: float) -> None:
        """Wait for all calls, so long at most; let go of everything, raise what nobody was told."""

    def give_up(self) -> None:
        """Let go of everything without waiting for other ranks."""


class GpuBackends(Protocol):
    """The module of a backend of GPU arrays (`gpucoll.backends.load`)."""

    def connect(
        self,
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
        """Connect all ranks' GPUs; every rank calls it.

        Parameters
        ----------
        name : str
            Of the backend: a module may serve several.
        number : int or None
            This rank's GPU, as this process numbers it; None: the one of its place on the host.
        exits : bool
            Whether a failure that nobody asks for ends the process.
        mixed : bool
            Whether ranks may pass host arrays, and some have no GPU: for ``"direct"`` alone.

        Raises
        ------
        BackendUnavailableError
            They cannot be connected: the same on every rank.
        """

    def adopt(self, group: Group, calls: EnqueuedCalls, made: Any, *, exits: bool) -> GpuBackend:
        """Take over what `GpuBackend.split` of the communicator before returned."""
