"""What tests have Host devices do: be late, fail, be full (docs/host_device.md).

    from gpucoll.testing import host_device

    with host_device.failing("copy", at=3):
        ...  # the third copy to be enqueued from here on raises BackendError
    with host_device.delayed("launch", 0.1), host_device.held(stream):
        ...

All of it is of one device in this process, by default number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, cast

from gpucoll import devices
from gpucoll.arrays.streams import address_of
from gpucoll.devices.host.device import HostDevice
from gpucoll.devices.host.faults import KINDS
from gpucoll.errors import ArgumentError

__all__ = ["KINDS", "counts", "delayed", "device", "failing", "filled", "held", "reset"]


def device(number: int = 0) -> HostDevice:
    """Return a Host device; the same object that gpucoll uses."""
    return cast(HostDevice, devices.open_device("host", number))


@contextlib.contextmanager
def failing(kind: str, at: int = 1, number: int = 0) -> Iterator[None]:
    """Let the `at`-th attempt of a kind fail in the block: once, counted from 1.

    Parameters
    ----------
    kind : str
        "launch", "copy" (fills too), "allocation" or "ipc" (exporting or opening memory): the call
        raises; "run": the call of that kernel returns, and the device fails when it comes to it.
    at : int
    number : int
        The device's.
    """
    if kind not in KINDS or at < 1:
        raise ArgumentError(f"kind must be one of {', '.join(KINDS)}, at 1 or more: {kind!r}, {at}")
    failing = device(number).faults.failing
    failing[kind] = at - 1
    try:
        yield
    finally:
        failing.pop(kind, None)


@contextlib.contextmanager
def delayed(kind: str, seconds: float, number: int = 0) -> Iterator[None]:
    """Let what is enqueued in the block begin later: "launch" or "copy"."""
    if kind not in ("launch", "copy") or seconds < 0:
        raise ArgumentError(
            f"kind must be launch or copy, seconds not below 0: {kind!r}, {seconds}"
        )
    delays = device(number).faults.delays_ns
    delays[kind] = int(seconds * 1e9)
    try:
        yield
    finally:
        delays.pop(kind, None)


@contextlib.contextmanager
def held(stream: Any = 0, number: int = 0) -> Iterator[None]:
    """Let nothing that comes on a stream run before the block ends."""
    owner, handle = device(number), address_of(stream)
    word = owner.allocate_pinned(4)
    value = ctypes.c_uint32.from_address(word)
    try:
        with owner:
            owner.check(owner.stream_wait_value(handle, word, 1), "hold a stream")
        yield
    finally:
        value.value = 1
        with owner:
            owner.synchronize_stream(handle)
        owner.free_pinned(word)


@contextlib.contextmanager
def filled(but_bytes: int = 0, number: int = 0) -> Iterator[None]:
    """Take all of a device's memory within the block, but for so many bytes."""
    owner, taken = device(number), []
    free, _ = owner.memory_bytes()
    size_bytes = free - but_bytes
    while size_bytes >= 512:
        try:
            taken.append(owner.allocate(size_bytes))
            size_bytes = owner.memory_bytes()[0] - but_bytes
        except MemoryError:
            size_bytes //= 2
    try:
        yield
    finally:
        for address in taken:
            owner.free_unused(address)


def reset(number: int = 0) -> None:
    """Let a device work again after a kernel has failed, which a GPU would never do."""
    device(number).reset_failure()


def counts(number: int = 0) -> dict[str, int]:
    """Return how much there is: of the device streams and bytes, of the process the rest."""
    return device(number).counts()
