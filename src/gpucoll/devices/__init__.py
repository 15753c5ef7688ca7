"""GPUs, as far as gpucoll needs them: streams, events, memory, and their identities.

`device.Device` is the protocol. `cuda` and `hip` implement it over the vendors' drivers alone:
without a CUDA toolkit or CuPy. `sycl` needs dpctl. `open_device` loads a driver only when it is
needed.
"""

from __future__ import annotations

import functools
import importlib
from types import MappingProxyType
from typing import cast

from gpucoll import config
from gpucoll.devices.device import DEFAULT_STREAMS, PER_THREAD_STREAM, Device
from gpucoll.errors import BackendUnavailableError

__all__ = [
    "DEFAULT_STREAMS",
    "KINDS",
    "PER_THREAD_STREAM",
    "Device",
    "device_count",
    "device_of",
    "open_device",
    "open_host",
    "unavailable",
]

KINDS = MappingProxyType(
    {
        "cuda": "gpucoll.devices.cuda",
        "rocm": "gpucoll.devices.hip",
        "sycl": "gpucoll.devices.sycl",
        "host": "gpucoll.devices.host.device",
    }
)
"""Kind of device, as in a Buffer's ``device`` -> the module that implements it."""


def open_device(kind: str, number: int) -> Device:
    """Return a GPU of this process; `number` is the one that the array libraries use.

    Returns the same object every time. The first call for a kind loads the vendor's driver and
    initialises it, which takes tens of milliseconds for each GPU of the machine.

    Raises
    ------
    BackendUnavailableError
        No driver, no such GPU, or the process must use only the CPU (`config.CPU_ONLY`).
    """
    if config.cpu_only():
        raise BackendUnavailableError(
            f"{kind}:{number} is not used: {config.CPU_ONLY} keeps this process to the CPU"
        )
    return _open(kind, number)


def open_host() -> Device:
    """Return the Host device with which a rank without a GPU takes part in calls on GPU arrays.

    It does not depend on the environment's settings for GPUs and Host devices, and uses none of
    these.
    """
    return _open("host", 0)


@functools.cache
def _open(kind: str, number: int) -> Device:
    return cast(Device, importlib.import_module(KINDS[kind]).open_device(number))


def device_count(kind: str) -> int:
    """Return how many GPUs of this kind the process sees; 0 without a driver."""
    if unavailable(kind):
        return 0
    return cast(int, importlib.import_module(KINDS[kind]).device_count())


def device_of(kind: str, address: int) -> int | None:
    """Return the number of the GPU that owns this memory; None: unknown, no GPU, or freed.

    This does not enter or retain a device. What the driver can tell depends on the context that the
    array's library has made current in this thread.
    """
    if unavailable(kind):
        return None
    return cast("int | None", importlib.import_module(KINDS[kind]).load().device_of(address))


def unavailable(kind: str) -> str:
    """Return why this process has no GPU of this kind, as a sentence; empty if it has one."""
    if config.cpu_only():
        return f"{config.CPU_ONLY} keeps this process to the CPU"
    try:
        count = importlib.import_module(KINDS[kind]).device_count()
    except BackendUnavailableError as error:
        return str(error)
    return "" if count else "the driver sees no GPU"
