"""Streams and events of a Host device: order, asynchrony, waits, misuse."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from gpucoll.devices.host.device import HostDevice
from gpucoll.devices.host.words import ROWS
from gpucoll.errors import BackendError


@pytest.fixture
def memory(device):
    address = device.allocate(4096)
    yield address
    device.free(address)


def numbers(address, count, dtype=np.uint32):
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def ended(device, n_before):
    """Wait until as many threads are left as there were."""
    while device._streams.running() > n_before:
        device.synchronize()


def test_nothing_runs_before_what_is_before_it(device, gate, stream, memory):
    numbers(memory, 4)[:] = 7
    gate.hold(stream)
    device.fill(memory, b"\x05\0\0\0", 4, stream)
    event = device.create_event()
    assert device.record_event(event, stream) == 0

    assert device.query_event(event) == device.not_ready
    assert not device.is_event_done(event)
    assert not device.is_stream_done(stream)
    assert numbers(memory, 4).tolist() == [7] * 4

    gate.open()
    device.synchronize_event(event)
    assert numbers(memory, 4).tolist() == [5] * 4
    assert device.is_event_done(event)
    device.synchronize_stream(stream)
    assert device.is_stream_done(stream)
    device.destroy_event(event)


def test_an_event_orders_two_streams_and_is_recorded_anew(device, gate, stream, memory):
    other, event = device.create_stream(), device.create_event()
    gate.hold(stream)
    device.fill(memory, b"\x01", 16, stream)
    assert device.record_event(event, stream) == 0
    assert device.stream_wait_event(other, event, 0) == 0
    assert device.record_event(event, other) == 0  # the wait is for what was recorded before
    device.copy(memory + 16, memory, 16, other)

    assert not device.is_stream_done(other)
    assert not device.is_event_done(event)
    gate.open()
    device.synchronize_stream(other)
    assert numbers(memory, 32, np.uint8).tolist() == [1] * 32
    device.destroy_event(event)
    n_threads = device._streams.running()
    device.destroy_stream(other)
    ended(device, n_threads - 1)


def test_a_new_event_is_reached_and_holds_nobody(device, stream):
    event = device.create_event()

    assert device.is_event_done(event)
    device.synchronize_event(event)
    assert device.stream_wait_event(stream, event, 0) == 0
    device.synchronize_stream(stream)
    device.destroy_event(event)


@pytest.mark.parametrize(
    ("stored", "wanted", "goes_on"),
    [
        (5, 5, True),
        (6, 5, True),
        (4, 5, False),
        (2, 2**32 - 2, True),
        (2**32 - 2, 2, False),
        (0, 2**31, False),
        (1, 2**31 + 2, True),
    ],
)
def test_values_are_compared_modulo_2_to_32(device, gate, stream, stored, wanted, goes_on):
    gate.word.value = stored
    assert device.stream_wait_value(stream, gate.address, wanted) == 0
    if not goes_on:
        assert not device.is_stream_done(stream)
        gate.open(wanted)
    device.synchronize_stream(stream)


def test_a_value_is_written_when_all_before_is_done(device, gate, stream, memory):
    numbers(memory, 1)[0] = 0
    gate.hold(stream)
    assert device.stream_write_value(stream, memory, 2**32 - 1) == 0
    assert numbers(memory, 1)[0] == 0
    gate.open()
    device.synchronize_stream(stream)
    assert numbers(memory, 1)[0] == 2**32 - 1


def test_streams_wake_each_other_by_values(device, stream, memory):
    other = device.create_stream()
    words = numbers(memory, 2)
    words[:] = 0
    for turn in range(1, 101):
        assert device.stream_write_value(stream, memory, turn) == 0
        assert device.stream_wait_value(stream, memory + 4, turn) == 0
        assert device.stream_wait_value(other, memory, turn) == 0
        assert device.stream_write_value(other, memory + 4, turn) == 0
    device.synchronize()
    assert words.tolist() == [100, 100]
    n_threads = device._streams.running()
    device.destroy_stream(other)
    ended(device, n_threads - 1)


def test_more_commands_than_the_ring_holds(device, gate, stream, memory):
    numbers(memory, 1)[0] = 0
    gate.hold(stream)
    done = threading.Event()

    def fill():
        with device:
            for _ in range(ROWS + 100):
                device.fill(memory, b"\x09", 4, stream)
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not done.wait(0.2)  # the ring is full: who brings more waits
    with device:  # other streams of the process go on meanwhile
        device.fill(memory + 64, b"\x03", 1, 0)
        device.synchronize_stream(0)
    gate.open()
    thread.join()
    device.synchronize_stream(stream)
    assert numbers(memory, 1)[0] == 0x09090909


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_patterns(device, stream, memory, size):
    pattern = bytes(range(1, size + 1))
    for count in (0, 1, 3, 7):
        numbers(memory, 4096, np.uint8)[:] = 0xEE
        device.fill(memory + 1, pattern, count, stream)
        device.synchronize_stream(stream)
        found = numbers(memory, 4096, np.uint8).tobytes()
        assert found == b"\xee" + pattern * count + b"\xee" * (4095 - size * count)


def test_pageable_memory_is_read_before_copy_returns_and_written_when_it_does(
    device, gate, stream, memory
):
    gate.hold(stream)
    given = np.full(64, 3, np.uint8)
    device.copy(memory, given.ctypes.data, 64, stream)
    given[:] = 4  # too late to matter, as with a driver that has staged it
    gate.open()
    taken = np.zeros(64, np.uint8)
    device.copy(taken.ctypes.data, memory, 64, stream)
    assert taken.tolist() == [3] * 64


def test_a_destroyed_stream_does_what_is_on_it_and_its_thread_ends(device, gate, memory):
    before = device._streams.running()
    stream = device.create_stream()
    event = device.create_event()
    gate.hold(stream)
    device.fill(memory, b"\x07", 4, stream)
    device.record_event(event, stream)
    device.destroy_stream(stream)
    assert not device.is_event_done(event)
    gate.open()
    device.synchronize_event(event)
    assert numbers(memory, 1)[0] == 0x07070707
    ended(device, before)
    again = device.create_stream()  # in its place; the event stands for what was
    assert device.is_event_done(event)
    device.destroy_stream(again)
    ended(device, before)
    device.destroy_event(event)


def test_misuse_gives_the_errors_of_a_gpu(device, stream, memory):
    event = device.create_event()
    wrong = 12345
    for code in (
        device.record_event(event, wrong),
        device.record_event(wrong, stream),
        device.stream_wait_event(stream, wrong, 0),
        device.query_event(wrong),
        device.stream_write_value(wrong, memory, 1),
    ):
        assert code == 400
        with pytest.raises(BackendError, match="no such stream or event"):
            device.check(code, "try")
    assert device.stream_wait_value(stream, memory + 2, 1) == 1  # not aligned
    device.destroy_event(event)
    assert device.query_event(event) == 400
    with pytest.raises(BackendError, match="there is none"):
        device.destroy_event(event)
    with pytest.raises(BackendError, match="there is no stream"):
        device.destroy_stream(wrong)
    with pytest.raises(BackendError, match="default stream cannot be destroyed"):
        device.destroy_stream(0)
    gone = device.create_stream()
    n_threads = device._streams.running()
    device.destroy_stream(gone)
    ended(device, n_threads - 1)
    with pytest.raises(BackendError, match="no such stream"):
        device.fill(memory, b"\0", 1, gone)


def test_streams_belong_to_a_device(device, memory):
    other = HostDevice(1)
    stream = other.create_stream()
    event = device.create_event()
    assert other.owns_stream(stream)
    assert not device.owns_stream(stream)
    assert device.owns_stream(0)
    assert device.record_event(event, stream) == 400  # device 0 is current
    with pytest.raises(BackendError, match="another device"):
        device.fill(memory, b"\0", 1, stream)
    with other:
        assert other.record_event(event, stream) == 0
        with device:
            assert device.stream_wait_event(0, event, 0) == 0
            device.synchronize_stream(0)
        assert other.record_event(event, stream) == 0  # which is current again
    device.synchronize_event(event)
    device.destroy_event(event)
    n_threads = device._streams.running()
    other.destroy_stream(stream)
    ended(device, n_threads - 1)


def test_each_thread_has_its_own_current_device(device):
    other, seen = HostDevice(1), []

    def look():
        seen.append(other._entries.current_device())
        with other:
            seen.append(other._entries.current_device())
        seen.append(other._entries.current_device())

    with other:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert device._entries.current_device() == 1
    assert seen == [0, 1, 0]
    with pytest.raises(BackendError, match="left more often"):
        other.__exit__()
