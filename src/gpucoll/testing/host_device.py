"""Faults of Host devices for tests: delays, failures, full memory (docs/host_device.md).

::

    from gpucoll.testing import host_device

    with host_device.failing("copy", at=3):
        ··...  # the third copy that is enqueued from here on raises BackendError
    with host_device.delayed("launch", 0.1), host_device.held(stream):
        ...

Everything applies to one device in this process, by default number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from gpucoll import devices
from gpucoll.arrays.streams import address_of
from gpucoll.devices.host.device import HostDevice
from gpucoll.devices.host.faults import KINDS
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyStream

__all__ = ["KINDS", "counts", "delayed", "device", "failing", "filled", "held", "reset"]


def device(number: int = 0) -> HostDevice:
    """Return a Host device: the same object that gpucoll uses."""
    return cast(HostDevice, devices.open_device("host", number))


@contextlib.contextmanager
def failing(kind: str, at: int = 1, number: int = 0) -> Iterator[None]:
    """Make the `at`-th operation of a kind in the block fail, counted from 1, once.

    Parameters
    ----------
    kind : str
        "launch", "copy" (and fill), "allocation" or "ipc" (exporting or opening memory): the call
        raises. "run": the kernel's launch returns, and the device fails when it runs the kernel.
    at : int
    number : int
        The device's number.
    """
    if kind not in KINDS or at < 1:
        raise ArgumentError(
            f"kind must be one of {', '.join(KINDS)}, and at must be at least 1; got {kind!r}, {at}"
        )
    failing = device(number).faults.failing
    failing[kind] = at - 1
    try:
        yield
    finally:
        failing.pop(kind, None)


@contextlib.contextmanager
def delayed(kind: str, seconds: float, number: int = 0) -> Iterator[None]:
    """Delay the start of "launch" or "copy" operations that are enqueued in the block."""
    if kind not in ("launch", "copy") or seconds < 0:
        raise ArgumentError(
            f"kind must be launch or copy, and seconds at least 0; got {kind!r}, {seconds}"
        )
    delays = device(number).faults.delays_ns
    delays[kind] = int(seconds * 1e9)
    try:
        yield
    finally:
        delays.pop(kind, None)


@contextlib.contextmanager
def held(stream: AnyStream = 0, number: int = 0) -> Iterator[None]:
    """Hold back work that is enqueued on a stream until the block ends."""
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
    """Allocate all of a device's memory within the block, except for `but_bytes`."""
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
    """Make a device work again after a kernel has failed; real GPUs cannot do this."""
    device(number).reset_failure()


def counts(number: int = 0) -> dict[str, int]:
    """Return counts: streams and bytes are the device's, all others the process's."""
    return device(number).counts()
