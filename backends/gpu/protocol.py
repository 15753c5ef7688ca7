"""The interfaces between a communicator and the backends that move GPU arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a communicator without GPUs does not import these
    from gpucoll.arrays.device_array import DeviceArray
    from gpucoll.backends.choice import Wish
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
    """Memory that another library allocated and that is registered with the backend."""

    @property
    def is_open(self) -> bool:
        """Whether the memory is still registered."""

    def close(self) -> None:
        """Deregister the memory; the GPU is current, and the caller holds the issuer's lock."""


class Divided(Protocol):
    """The result of `GpuBackend.split`, until `GpuBackends.adopt` takes it over."""

    def abort(self) -> object:
        """Release it, if no communicator is made of it."""


class GpuBackend(Protocol):
    """Moves arrays of one rank's GPU: a call enqueues and returns; a monitor watches its end."""

    @property
    def issuer(self) -> Issuer:
        """Puts the calls on streams and finds out how they end."""

    @property
    def device(self) -> Device:
        """This rank's GPU."""

    # --- preparing --------------------------------------------------------------------------------

    def launches(
        self, requests: Sequence[Request], messages: Sequence[MessageRequest]
    ) -> Sequence[Any]:
        """Return what the requests of a call enqueue; ArgumentTypeError if that is impossible."""

    def signatures(self, requests: Sequence[Request]) -> list[Signature]:
        """Return what the ranks compare for the requests of a call."""

    def compiled_call(
        self, name: str, signatures: Sequence[Signature], launches: Sequence[Any]
    ) -> tuple[CompiledCall, tuple[int, int]] | None:
        """Return a compiled call for calls of this kind, and the two addresses of this one.

        Returns None if the call needs more than one compiled step.
        """

    # --- enqueuing --------------------------------------------------------------------------------

    def refuse_capture(self, stream_call: StreamCall) -> None:
        """Raise if this call cannot be part of a graph being captured, before anything joins it."""

    def issue(self, stream_call: StreamCall) -> IssuedCall:
        """Put one call on its stream and return immediately."""

    def issue_group(self, stream_calls: Sequence[StreamCall]) -> list[IssuedCall]:
        """Put several calls on their streams; they run in no particular order."""

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory that is registered on this rank."""

    def allocate_window(self, channel: Channel, size_bytes: int, timeout_s: float | None) -> Memory:
        """Return this rank's part of a symmetric window; every rank must call it."""

    def register(self, address: int, size_bytes: int) -> Registration | None:
        """Register memory on this rank; return None if the backend has no use for that."""

    # --- the rest ---------------------------------------------------------------------------------

    def split(
        self, channel: Channel, color: int | None, key: int, timeout_s: float | None
    ) -> Divided | None:
        """Divide the backend as the ranks are divided; every rank calls it. No color: None."""

    def describe(self) -> Mapping[str, str]:
        """Return facts about this backend for the user: name -> sentence."""

    def note_abort(self) -> None:
        """Give up on the GPU after this rank itself has given up the communicator."""

    def close(self, limit_s: float) -> None:
        """Wait at most `limit_s` for all calls; release everything, raise unreported failures."""

    def give_up(self) -> None:
        """Release everything without waiting for other ranks."""


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
        wish: Wish,
    ) -> GpuBackend:
        """Connect the GPUs of all ranks; every rank must call it.

        Parameters
        ----------
        name : str
            The backend's name: one module may serve several backends.
        number : int or None
            The number of this rank's GPU in this process; None: the GPU at the rank's local
            index.
        wish : Wish
            The user's settings.

        Raises
        ------
        BackendUnavailableError
            The GPUs cannot be connected; all ranks raise the same error.
        """

    def adopt(self, group: Group, calls: EnqueuedCalls, made: Any, *, exits: bool) -> GpuBackend:
        """Take over the result of the parent communicator's `GpuBackend.split`."""
