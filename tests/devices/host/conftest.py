"""A Host device in the tests' own process, and what must be left of it afterwards: nothing."""

from __future__ import annotations

import ctypes
import gc

import pytest

from gpucoll.devices.host.device import HostDevice


class Gate:
    """A word in pinned memory that streams wait for."""

    def __init__(self, device) -> None:
        self.device = device
        self.address = device.allocate_pinned(4)
        self.word = ctypes.c_uint32.from_address(self.address)

    def hold(self, stream: int, value: int = 1) -> None:
        """Let a stream not go on until the word is `value`."""
        with self.device:
            assert self.device.stream_wait_value(stream, self.address, value) == 0

    def open(self, value: int = 1) -> None:
        self.word.value = value


@pytest.fixture
def device(monkeypatch):
    monkeypatch.delenv("GPUCOLL_CPU_ONLY", raising=False)
    device = HostDevice(0)
    gc.collect()  # arrays of earlier tests shall not go while memory is counted
    before = device.counts()
    with device:
        yield device
    assert device.counts() == before
    device.faults.failing.clear()
    device.faults.delays_ns.clear()


@pytest.fixture
def gate(device):
    gate = Gate(device)
    yield gate
    gate.open(gate.word.value + 1000)
    device.free_pinned(gate.address)


@pytest.fixture
def stream(device, gate):
    n_threads = device._streams.running()
    stream = device.create_stream()
    yield stream
    gate.open(gate.word.value + 1000)  # a test that failed may have left it shut
    device.destroy_stream(stream)
    while device._streams.running() > n_threads:
        device.synchronize()
