"""The connection of the ranks' GPUs: made when it is needed, used by calls, released at the end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpucoll import backends
from gpucoll.arrays import streams
from gpucoll.backends.choice import (
    HOST_ARRAYS,
    Choice,
    ObstacleError,
    Pick,
    Wish,
    instead,
    spelled_kinds,
)
from gpucoll.calls.runner import Runner
from gpucoll.errors import ArgumentError, BackendUnavailableError, GpucollError, StateError

if TYPE_CHECKING:  # a communicator without GPUs needs none of it
    from gpucoll.arrays.buffer import Buffer
    from gpucoll.arrays.library import Template
    from gpucoll.backends.gpu.protocol import Divided, GpuBackend, GpuBackends
    from gpucoll.calls.gpu.cache import CachedCalls
    from gpucoll.calls.gpu.call import GpuCall


class Part(NamedTuple):
    """The GPU connection that a communicator hands on to one that `split` or `duplicate` makes."""

    divided: Divided
    pick: Pick

    def abort(self) -> object:
        """Release it, if no communicator is made with it."""
        return self.divided.abort()


class GpuConnection:
    """The ranks' GPUs in one communicator: not connected yet, connected, or refused.

    Parameters
    ----------
    runner : Runner
        Runs the ranks' calls on the host, and has the channel over which they agree.
    choice : Choice
        What the ranks agreed on during the rendezvous.
    wish : Wish
        What this rank's user asked for.
    """

    def __init__(self, runner: Runner, choice: Choice, wish: Wish) -> None:
        self._runner = runner
        self._group = runner.group
        self.pick = choice.gpu
        self._wish = wish
        self.refusal = "" if choice.gpu.backend else choice.gpu.reason
        """The reason why GPU arrays cannot be moved; empty if they can."""
        self._connected: GpuBackend | None = None
        self._entering = threading.Lock()
        self.call_cache: dict[type, CachedCalls] = {}
        """The cached calls of this connection, by the type of the input array."""

    @property
    def is_busy(self) -> bool:
        """Whether calls are in flight."""
        return self._connected is not None and bool(self._connected.issuer.is_busy)

    @property
    def is_running(self) -> bool:
        """Whether a thread is making a call at this moment."""
        return self._entering.locked()

    # --- connecting -------------------------------------------------------------------------------

    def connect(self, number: int | None, timeout_s: float | None = None) -> None:
        """Connect the GPUs of all ranks. Every rank calls it.

        Parameters
        ----------
        number : int or None
            This rank's GPU, by the number that this process uses; None: by its place on the host.
        """
        if self._wish.device is not None:
            number = self._wish.device

        def task(timeout_s: float | None) -> None:
            try:
                self._connected = self._join(number, timeout_s)
            except BackendUnavailableError as error:
                self.refusal = str(error)
                raise

        self._runner.run("connect", task, timeout_s=timeout_s)

    def _join(self, number: int | None, timeout_s: float | None) -> GpuBackend:
        """Connect with the backend agreed on, or with one that all ranks take instead."""
        try:
            return self._join_by(self.pick, number, timeout_s)
        except ObstacleError as error:
            other = instead(self._wish.backend, error, self.pick)
            if other is None:
                raise BackendUnavailableError(str(error)) from None
        connected = self._join_by(other, number, timeout_s)
        _log(f"rank {self._group.rank}: GPU arrays: backend {other.backend}, {other.reason}")
        return connected

    def _join_by(self, pick: Pick, number: int | None, timeout_s: float | None) -> GpuBackend:
        module: GpuBackends = backends.load(pick.backend)
        group, calls = self._group, self._group.enqueued_calls()
        connected = module.connect(
            group, self._runner.channel, calls, pick.backend, number, timeout_s, self._wish
        )
        self.pick = pick
        return connected

    def _ready(self, call: GpuCall) -> GpuBackend:
        """Return the backend, connecting it first if all ranks make this call."""
        template = call.template
        if self.refusal:
            raise BackendUnavailableError(
                f"x lies on {template.device}, but this communicator has no backend for GPU "
                f"arrays: {self.refusal}"
            )
        kind, _, number = template.device.partition(":")
        self._check_kind(kind, template.device)
        if self._connected is None:
            if not call.requests:
                raise StateError(
                    f"{call.name}: the ranks' GPUs are not connected yet, and only two ranks make "
                    "this call. Make a collective call on GPU arrays first, or pass device= to "
                    "init, which connects them at once"
                )
            own = None
            if not call.is_on_host:
                own = int(number) if number else _device_of(kind, call.buffers)
            self.connect(own, call.timeout_s)
        assert self._connected is not None
        return self._connected

    def _check_kind(self, kind: str, device: str) -> None:
        """Raise unless this communicator moves arrays of this kind of device on this rank."""
        served = self.pick.kinds[self._group.rank]
        if kind == served or (self._wish.mixed and kind == HOST_ARRAYS):
            return
        if served == HOST_ARRAYS:
            raise BackendUnavailableError(
                f"x lies on {device}, but this rank saw no GPU when it met the others, and takes "
                "part with host arrays: copy it to the host first; gpucoll-doctor says why"
            )
        raise BackendUnavailableError(
            f"x lies on {device}, but this communicator's backend for GPU arrays is "
            f"{self.pick.backend}, for {served} devices ({self.pick.reason}): copy it to the "
            "host first"
        )

    def _check_arrays(
        self, connected: GpuBackend, name: str, template: Template, buffers: Sequence[Buffer]
    ) -> None:
        """Raise unless all memory exists and is on this communicator's GPU."""
        device = connected.device
        asks = streams.forgets_freed_memory(template.library)
        for buffer in buffers:
            if not buffer.size_bytes:
                continue
            if not buffer.address:
                raise ArgumentError(f"{name}: an array has no memory: was it freed?")
            label = buffer.device
            if label == HOST_ARRAYS:
                continue  # with mixed=True, which `_check_kind` has accepted
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
                    f"{device.label}: one device per communicator. Copy it there, or make a "
                    "communicator for it (gpucoll.init(device=...), on every rank)"
                )

    def _open(self, name: str) -> GpuBackend:
        """Return the connected backend, for a call of this rank alone."""
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
            from gpucoll.backends.gpu.deferred_release import settle

            self._connected.issuer.synchronize()
            settle()

    def close(self, limit_s: float) -> None:
        """Wait at most `limit_s` for all calls; raise their failures and release the GPU."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self.call_cache = {}
            self.refusal = "the communicator is closed"
            connected.close(limit_s)

    def note_abort(self) -> None:
        """End, on the GPU, the calls of a communicator that this rank has just given up."""
        if self._connected is not None:
            self._connected.note_abort()

    def give_up(self) -> None:
        """Release everything without waiting: at the end of the process, or after an error."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self.call_cache = {}
            if self._group.is_forked:
                return  # the GPU belongs to the parent process
            with contextlib.suppress(GpucollError):
                connected.give_up()

    # --- the rest ---------------------------------------------------------------------------------

    def split(self, color: int | None, key: int, timeout_s: float | None) -> Part | None:
        """Divide the connection like the ranks; None if there is none, or for color None."""
        if self._connected is None:
            return None
        divided = self._connected.split(self._runner.channel, color, key, timeout_s)
        return None if divided is None else Part(divided, self.pick)

    def adopt(self, part: Part | None, ranks: Sequence[int]) -> None:
        """Take over the connection that `split` of the original communicator returned.

        Its backend is kept, even if this communicator by itself would have chosen another.

        Parameters
        ----------
        part : Part or None
        ranks : sequence of int
            The ranks of this communicator, by their numbers in the original one.
        """
        if part is not None:
            calls, exits = self._group.enqueued_calls(), self._wish.exits
            kinds = tuple(part.pick.kinds[rank] for rank in ranks)
            self.pick, self.refusal = part.pick._replace(kinds=kinds), ""
            module: GpuBackends = backends.load(self.pick.backend)
            self._connected = module.adopt(self._group, calls, part.divided, exits=exits)

    def wish_again(self) -> Wish:
        """Return the wish for a communicator that replaces this one: the same GPU, if it is known.

        A rank otherwise chooses a GPU by its place on the host, which may differ after losses.
        """
        if self._wish.mixed and self._connected is not None:
            return self._wish._replace(device=self._connected.device.number)
        return self._wish

    def describe(self) -> dict[str, str]:
        """Return facts about the connection, by name."""
        if self._connected is not None:
            facts = {"GPU arrays": f"backend {self.pick.backend}: {self.pick.reason}"}
            if self._wish.mixed:
                facts["mixed"] = f"yes: {spelled_kinds(self.pick.kinds)}"
            return {**facts, **self._connected.describe()}
        if self.refusal:
            return {"GPU arrays": f"none: {self.refusal}"}
        when = "to be connected at the first call on GPU arrays"
        return {"GPU arrays": f"backend {self.pick.backend}: {self.pick.reason}; {when}"}


def _device_of(kind: str, buffers: Sequence[Buffer]) -> int | None:
    """Return the GPU of the first of these arrays, if the arrays themselves do not name it."""
    from gpucoll import devices

    addresses = (buffer.address for buffer in buffers if buffer.size_bytes)
    found = (devices.device_of(kind, address) for address in addresses)
    return next((number for number in found if number is not None), None)


def _log(text: str) -> None:
    """Log a fact that the program could not know before."""
    import logging  # most programs never come here

    logging.getLogger("gpucoll").info(text)
