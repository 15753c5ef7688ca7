"""From GPUs that could be connected to what calls on GPU arrays go through, and to its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

from gpucoll import backends, devices
from gpucoll.arrays import streams
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.backends.choice import (
    HOST_ARRAYS,
    Choice,
    ObstacleError,
    Pick,
    Wish,
    instead,
    spelled_kinds,
)
from gpucoll.backends.gpu.deferred_release import settle
from gpucoll.backends.gpu.protocol import Divided, GpuBackend, GpuBackends
from gpucoll.calls.gpu.cache import CallCache
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.runner import Runner
from gpucoll.errors import ArgumentError, BackendUnavailableError, GpucollError, StateError


class Part(NamedTuple):
    """What a communicator hands on of its GPU connection to one that is divided from it."""

    divided: Divided
    pick: Pick

    def abort(self) -> object:
        """Let go of it, where no communicator comes of it."""
        return self.divided.abort()


class GpuConnection:
    """The ranks' GPUs as one communicator sees them: to be connected, connected, or refused.

    Parameters
    ----------
    runner : Runner
        Of the ranks' calls on the host, and the channel over which they agree.
    choice : Choice
        What they agreed on when they met.
    wish : Wish
        What this rank's user asked for.
    """

    def __init__(self, runner: Runner, choice: Choice, wish: Wish) -> None:
        self._runner = runner
        self._group = runner.group
        self.pick = choice.gpu
        self._wish = wish
        self.refusal = "" if choice.gpu.backend else choice.gpu.reason
        """Why GPU arrays cannot be moved."""
        self._connected: GpuBackend | None = None
        self._entering = threading.Lock()
        self.call_cache = CallCache()
        """Of what is connected."""

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way."""
        return self._connected is not None and bool(self._connected.issuer.is_busy)

    @property
    def is_running(self) -> bool:
        """Whether some thread is making a call at this moment."""
        return self._entering.locked()

    # --- connecting -------------------------------------------------------------------------------

    def connect(self, number: int | None, timeout_s: float | None = None) -> None:
        """Connect all ranks' GPUs; every rank calls it.

        Parameters
        ----------
        number : int or None
            This rank's, as this process numbers it; None: the one of its place on the host.
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
        """Connect by what was agreed on, or by what all ranks then take in its place."""
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
            group,
            self._runner.channel,
            calls,
            pick.backend,
            number,
            timeout_s,
            exits=self._wish.exits,
            mixed=self._wish.mixed,
        )
        self.pick = pick
        return connected

    def _ready(self, call: GpuCall) -> GpuBackend:
        """Return what is connected; connect it where all ranks make this call."""
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
        """Raise unless arrays on this kind of device go this way, on this rank."""
        served = self.pick.kinds[self._group.rank]
        if kind == served or (self._wish.mixed and kind == HOST_ARRAYS):
            return
        if served == HOST_ARRAYS:
            raise BackendUnavailableError(
                f"x lies on {device}, but this rank saw no GPU when it met the others, and takes "
                "part with host arrays: copy it to the host first, or see why by gpucoll-doctor"
            )
        raise BackendUnavailableError(
            f"x lies on {device}, but this communicator's backend for GPU arrays is "
            f"{self.pick.backend}, for {served} devices ({self.pick.reason}): copy it to the "
            "host first"
        )

    def _check_arrays(
        self, connected: GpuBackend, name: str, template: Template, buffers: Sequence[Buffer]
    ) -> None:
        """Raise unless all memory is on this communicator's GPU, and is there."""
        device = connected.device
        asks = streams.forgets_freed_memory(template.library)
        for buffer in buffers:
            if not buffer.size_bytes:
                continue
            if not buffer.address:
                raise ArgumentError(f"{name}: an array has no memory: was it freed?")
            label = buffer.device
            if label == HOST_ARRAYS:
                continue  # with mixed=True: `_check_kind` has let it in
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
            settle()

    def close(self, limit_s: float) -> None:
        """Wait for all calls, so long at most; raise what went wrong, let go of the GPU."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self.call_cache = CallCache()
            self.refusal = "the communicator is closed"
            connected.close(limit_s)

    def note_abort(self) -> None:
        """End on the GPU what this rank has just given up."""
        if self._connected is not None:
            self._connected.note_abort()

    def give_up(self) -> None:
        """Let go of everything without waiting: at the end of the process, or after an error."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self.call_cache = CallCache()
            if self._group.is_forked:
                return  # the GPU is its parent's
            with contextlib.suppress(GpucollError):
                connected.give_up()

    # --- the rest ---------------------------------------------------------------------------------

    def split(self, color: int | None, key: int, timeout_s: float | None) -> Part | None:
        """Divide what is connected, as the ranks are; None where nothing is, or for no color."""
        if self._connected is None:
            return None
        divided = self._connected.split(self._runner.channel, color, key, timeout_s)
        return None if divided is None else Part(divided, self.pick)

    def adopt(self, part: Part | None, ranks: Sequence[int]) -> None:
        """Take over what `split` of the communicator that this one comes from returned.

        With the backend that connected it, which alone by itself this one might not have chosen.

        Parameters
        ----------
        part : Part or None
        ranks : sequence of int
            Those of this communicator, as that one numbers them.
        """
        if part is not None:
            calls, exits = self._group.enqueued_calls(), self._wish.exits
            kinds = tuple(part.pick.kinds[rank] for rank in ranks)
            self.pick, self.refusal = part.pick._replace(kinds=kinds), ""
            module: GpuBackends = backends.load(self.pick.backend)
            self._connected = module.adopt(self._group, calls, part.divided, exits=exits)

    def wish_again(self) -> Wish:
        """Return what to ask of a communicator in this one's place: the same GPU, if it is known.

        The place on the host, by which a rank takes one, may be another after losses.
        """
        if self._wish.mixed and self._connected is not None:
            return self._wish._replace(device=self._connected.device.number)
        return self._wish

    def describe(self) -> dict[str, str]:
        """Return what is worth knowing."""
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
    """Return which GPU the first of these arrays lies on, where the arrays do not say it."""
    addresses = (buffer.address for buffer in buffers if buffer.size_bytes)
    found = (devices.device_of(kind, address) for address in addresses)
    return next((number for number in found if number is not None), None)


def _log(text: str) -> None:
    """Tell the program's log what it could not know before."""
    import logging  # most programs never come here

    logging.getLogger("gpucoll").info(text)
