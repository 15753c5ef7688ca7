"""Ranks with Host devices: a `Gpus` for tests of GPU arrays where nothing is a double."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.calls.gpu.conftest import Gpus, Rank
from tests.calls.gpu.kits import HostDeviceKit

from gpucoll import config

__all__ = ["HostDevices", "gpus_of_host_devices"]


class Control:
    """What tests ask of a double: here, of a rank's own device."""

    communicators = 0
    """Nobody counts them."""

    def __init__(self, number: int) -> None:
        self._number = number

    def held(self) -> AbstractContextManager[None]:
        """Let the current stream not go on within the block."""
        from gpucoll.testing import device_arrays, host_device

        return host_device.held(device_arrays.current_stream(self._number), self._number)

    def count(self, what: str) -> int:
        """Return how many events, or streams, there are."""
        from gpucoll.testing import host_device

        return host_device.counts(self._number)[what]


@dataclass
class HostDevices:
    """In the place of a double: how ranks are set up."""

    numbers: tuple[int, ...] = ()
    """Each rank's device; default: its own."""
    kind: str = "host"
    variables: dict[str, str] = field(
        default_factory=lambda: {config.CPU_ONLY: "0", config.DEVICE: "host"}
    )


def in_rank(seat: Any, devices: HostDevices, function: Any, args: Any) -> Any:
    """Set a rank's device up and call the test's function."""
    from gpucoll.testing import device_arrays

    number = devices.numbers[seat.rank] if devices.numbers else seat.rank
    kit = HostDeviceKit(device_arrays)
    kit.use(number)
    return function(Rank(seat, kit, Control(number)), *args)


class _HostGpus(Gpus):
    """Ranks see no vendor's GPU."""

    @property
    def variables(self) -> dict[str, str]:
        return dict(self.double.variables)


def gpus_of_host_devices(pools: Any, *numbers: int) -> Gpus:
    """Return where tests of GPU arrays run on Host devices, as ``gpus`` is for doubles."""
    return _HostGpus(pools, HostDevices(numbers), in_rank)
