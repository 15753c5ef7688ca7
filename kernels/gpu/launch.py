"""Launching: on which arrays, device and stream, and with how many blocks.

A kernel of this package takes one struct by value. Everything before the launch itself is plain
Python that needs no GPU; the launch is one method of a `Launcher`, one for each kind of device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.libraries import library_of
from gpucoll.arrays.library import AnyArray, AnyStream
from gpucoll.arrays.streams import address_of
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.gpu.launcher import Argument, CompiledKernel, Launcher
from gpucoll.kernels.gpu.source import Kernel

BLOCKS_PER_MULTIPROCESSOR = 32
"""The most blocks of a grid: enough for few multiprocessors to idle at its end, not too small."""


def _driver_launcher(kind: str) -> Launcher:
    # Imported by name: devices depend on the kernels, which otherwise know nothing of devices.
    module = importlib.import_module("gpucoll.devices.kernels.driver_launcher")
    return cast(Launcher, module.DriverLauncher(kind))


def _host_launcher() -> Launcher:
    module = importlib.import_module("gpucoll.devices.host.launcher")
    return cast(Launcher, module.HostLauncher())


LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    kind: functools.partial(_driver_launcher, kind) for kind in ("cuda", "rocm")
}
LAUNCHERS["host"] = _host_launcher
"""Kind of device -> a function that makes its launcher."""


@functools.cache
def launcher_of(kind: str) -> Launcher:
    """Return the launcher for devices of this kind."""
    if kind not in LAUNCHERS:
        raise ArgumentTypeError(f"GPU kernels work on arrays of a GPU; got one on {kind}")
    return LAUNCHERS[kind]()


@dataclass(frozen=True)
class Target:
    """The destination of a launch: a device and a stream."""

    kind: str
    number: int
    stream: int

    @property
    def launcher(self) -> Launcher:
        return launcher_of(self.kind)

    def blocks(self, units: int) -> int:
        """Return the blocks of a grid: one per unit, up to as many as keep the device busy."""
        most = BLOCKS_PER_MULTIPROCESSOR * self.launcher.multiprocessors(self.number)
        return max(1, min(units, most))

    def load(self, kernel: Kernel | CompiledKernel) -> None:
        """Compile and load a kernel, unless that was done before."""
        self.launcher.load(kernel, self.number)

    def prepared(
        self, kernel: Kernel | CompiledKernel, units: int, arguments: Sequence[Argument]
    ) -> Callable[[int], None]:
        """Return a function that launches as many blocks as these units need on a given stream.

        The kernel is compiled and loaded before this returns.
        """
        self.load(kernel)
        return functools.partial(
            self.launcher.launch, kernel, self.blocks(units), arguments, self.number
        )

    def launch(
        self, kernel: Kernel | CompiledKernel, units: int, arguments: Sequence[Argument]
    ) -> None:
        """Launch as many blocks as these units of work need."""
        self.prepared(kernel, units, arguments)(self.stream)


def buffer_of(x: AnyArray, what: str) -> Buffer:
    """Return an array's memory as a `Buffer`; a `Buffer` is returned as it is.

    Raises
    ------
    ArgumentError
        The array is not C-contiguous.
    """
    if isinstance(x, Buffer):
        return x
    view = library_of(x, what).look(x, what)
    if view.strides is not None:
        raise ArgumentError(f"{what} must be C-contiguous; its strides are {view.strides} bytes")
    return view.buffer()


def buffers_of(arrays: Sequence[AnyArray], what: str) -> list[Buffer]:
    """Return the memory of each array."""
    return [buffer_of(x, f"{what}[{place}]") for place, x in enumerate(arrays)]


def target_of(buffers: Sequence[Buffer], stream: AnyStream = None) -> Target:
    """Return the target of a launch on these arrays, which must lie on one device.

    Parameters
    ----------
    buffers : sequence of Buffer
    stream : int or object, optional
        A stream's address, or an object of CuPy, PyTorch or Numba that has one. By default the
        stream on which the first array is used.
    """
    devices = sorted({buffer.device for buffer in buffers})
    if len(devices) > 1:
        raise ArgumentError(f"all arrays must lie on one device; they are on {', '.join(devices)}")
    kind, _, number = devices[0].partition(":")
    address = buffers[0].stream if stream is None else address_of(stream)
    return Target(kind, int(number or 0), address)


def struct(
    dtype: np.dtype[np.generic], **values: int | np.void | Sequence[int]
) -> npt.NDArray[np.generic]:
    """Return a kernel's argument: an array of one element, which launchers pass by value."""
    made = np.zeros(1, dtype)
    for name, value in values.items():
        field = made[name][0]
        if field.shape:
            field[: len(cast("Sequence[int]", value))] = value
        else:
            made[name][0] = value
    return made
