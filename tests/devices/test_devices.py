"""Devices over the doubles of both drivers: what each method does, and what misuse leads to."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from tests.doubles import run_python

from gpucoll import devices
from gpucoll.devices.device import ATTRIBUTES
from gpucoll.errors import BackendError, BackendUnavailableError

pytestmark = pytest.mark.parametrize("vendor", ["nccl", "rccl"])


@pytest.fixture
def on_device(gpu_ranks, doubles, vendor):
    """Return what calls ``function(device, control)`` in a process with the doubles."""
    double = doubles.double(vendor)

    def call(function, *args):
        (answer,) = gpu_ranks.call(
            1, inside, double, function, args, gives="seat", environment=double.variables
        )
        return answer

    return call


def inside(_seat, double, function, args):
    control = double.load()
    return function(devices.open_device(double.kind, 1), control, *args)


def view(address, count, dtype=np.uint8):
    kind: Any = ctypes.c_char * (count * np.dtype(dtype).itemsize)
    return np.frombuffer(kind.from_address(address), dtype)


def facts(device, control):
    assert devices.open_device(control.double.kind, 1) is device
    assert devices.device_count(control.double.kind) == 8
    return (
        device.label,
        device.identity,
        device.driver_version(),
        {name: device.attribute(name) for name in ATTRIBUTES},
        device.attribute("colour"),
    )


def test_facts(on_device, vendor):
    kind = "cuda" if vendor == "nccl" else "rocm"
    label, identity, version, attributes, unknown = on_device(facts)

    assert label == f"{kind}:1"
    assert identity.name == "Double of a GPU"
    assert identity.uuid == "GPU-d0000000-0000-0000-0000-000000000001"
    assert identity.pci_bus_id == "0000:1c:00.0"
    assert version == ("12.8" if vendor == "nccl" else "6.4")
    assert attributes["multiprocessor_count"] == 132
    assert attributes["dma_buf"] == 1
    assert unknown is None


def not_there(device, control):
    messages = []
    for number in (-1, 8):
        with pytest.raises(BackendUnavailableError) as error:
            devices.open_device(control.double.kind, number)
        messages.append(str(error.value))
    return messages


def test_a_gpu_that_is_not_there(on_device, vendor):
    for message in on_device(not_there):
        assert "sees 8 GPUs" in message
        assert ":0 to " in message


def identify_others(device, control):
    """A GPU that is only looked at gets no context, which takes memory there."""
    assert "_context" not in vars(devices.open_device(control.double.kind, 5))
    with control.driver_calls() as calls:
        other = devices.open_device(control.double.kind, 6)
        known = other.identity.uuid, other.target
        assert device.can_access(6)
    with control.driver_calls() as entered, other, other:
        pass
    return known, calls, [call for call in entered if "Ctx" in call[0]]


def test_a_gpu_that_is_only_looked_at(on_device, vendor):
    (uuid, target), looked, entered = on_device(identify_others)

    assert uuid.endswith("06")
    assert target == ("sm_99" if vendor == "nccl" else "gfx9ff:sramecc+:xnack-")
    assert not any("Retain" in name for name, _ in looked)
    assert entered == ([("cuDevicePrimaryCtxRetain", [6])] if vendor == "nccl" else [])


def streams_and_events(device, control):
    before = control.count("streams"), control.count("events")
    stream, other, event = device.create_stream(), device.create_stream(True), device.create_event()
    address = device.allocate(8)
    x = view(address, 8)
    with device:
        assert device.query_event(event) == 0  # never recorded
        with control.held():
            device.fill(address, b"\1", 8, stream)
            device.check(device.record_event(event, stream), "record")
            device.check(device.stream_wait_event(other, event, 0), "wait")
            device.fill(address, b"\2", 4, other)
            assert device.query_event(event) == device.not_ready
            assert not device.is_event_done(event)
            assert not device.is_stream_done(other)
            assert x[0] == 0xA5
        device.synchronize_stream(other)
        assert device.is_event_done(event)
        assert device.is_stream_done(stream)
        device.synchronize_event(event)
    assert x.tolist() == [2] * 4 + [1] * 4
    assert device.device_of(address) == 1
    device.free(address)
    assert device.device_of(address) is None
    device.destroy_event(event)
    device.destroy_stream(stream)
    device.destroy_stream(other)
    return before == (control.count("streams"), control.count("events"))


def test_streams_and_events(on_device):
    assert on_device(streams_and_events)


def fill_all(device, control):
    stream, address = device.create_stream(), device.allocate(4096)
    wrong = []
    with device:
        for size in (1, 2, 4, 8, 16):
            for pattern in (bytes(range(1, size + 1)), b"\7" * size, (b"\1\2" * size)[:size]):
                for count in (0, 1, 3, 64, 65):
                    device.fill(address, b"\0", 4096, stream)
                    device.fill(address, pattern, count, stream)
                    device.synchronize_stream(stream)
                    expected = pattern * count
                    found = view(address, 4096).tobytes()
                    if found != expected + bytes(4096 - len(expected)):
                        wrong.append((pattern, count))
    device.free(address)
    device.destroy_stream(stream)
    return wrong


def test_fill(on_device):
    assert on_device(fill_all) == []


def copy_across(device, control):
    stream = device.create_stream()
    one, two = device.allocate(64), device.allocate(64)
    host = np.arange(64, dtype=np.uint8)
    with device:
        device.copy(one, host.ctypes.data, 64, stream)
        device.copy(two, one, 64, stream)
        device.synchronize_stream(stream)
        result = view(two, 64).tolist() == host.tolist()
    device.free(one)
    device.free(two)
    device.destroy_stream(stream)
    return result


def test_copy(on_device):
    assert on_device(copy_across)


def no_memory(device, control):
    used = control.count("memory")
    free, total = device.memory_bytes()
    assert free == total - used
    with pytest.raises(MemoryError, match=r"no 10995116277760 bytes: \d+ of 4294967296 bytes"):
        device.allocate(10 << 40)
    return control.count("memory") == used


def test_no_memory(on_device):
    assert on_device(no_memory)


def current_devices(device, control):
    """Entering nests, and each thread has its own."""
    other = devices.open_device(device.kind, 2)
    seen = []

    def look():
        seen.append(control.driver.double_current_device())

    look()
    with device:
        look()
        with other:
            look()
            with device:
                look()
            look()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        look()
    look()
    return seen


def test_current_device(on_device, vendor):
    none = -1 if vendor == "nccl" else 0  # HIP always has one
    assert on_device(current_devices) == [none, 1, 2, 1, 2, none, 1, none]


def whose_memory(device, control):
    address = device.allocate(16)
    before = [devices.device_of(device.kind, place) for place in (address + 15, 8)]
    with devices.open_device(device.kind, 2):  # whichever is current
        during = [devices.device_of(device.kind, place) for place in (address + 15, 8)]
    device.free(address)
    return before, during, device.device_of(address)


def test_whose_memory(on_device, vendor):
    # Without a current context CUDA cannot tell.
    before = [None, None] if vendor == "nccl" else [1, None]
    assert on_device(whose_memory) == (before, [1, None], None)


def whose_stream(device, control):
    other = devices.open_device(device.kind, 2)
    mine, theirs = device.create_stream(), other.create_stream()
    with device:
        answers = [device.owns_stream(stream) for stream in (mine, theirs, 0, 1, 2)]
        event = other.create_event()
        code = device.record_event(event, mine)
    with pytest.raises(BackendError, match="cannot record: invalid resource handle"):
        device.check(code, "record")
    return answers


def test_whose_stream(on_device):
    assert on_device(whose_stream) == [True, False, True, True, True]


def no_context(device, control):
    event, stream = device.create_event(), device.create_stream()
    return device.record_event(event, stream)


def test_a_thread_without_the_device(on_device, vendor):
    # CUDA needs a context in the thread; HIP takes device 0, and finds both handles of device 1.
    assert on_device(no_context) == (201 if vendor == "nccl" else 0)


def gpu_failed(device, control):
    event = device.create_event()
    control.driver_set("error", 700)
    try:
        with pytest.raises(BackendError, match="illegal memory access") as error:
            device.is_event_done(event)
    finally:
        control.driver_set("error", 0)
    return str(error.value)


def test_a_gpu_that_failed(on_device, vendor):
    label, driver = ("cuda:1", "CUDA driver") if vendor == "nccl" else ("rocm:1", "HIP")
    message = on_device(gpu_failed)
    assert message.startswith(f"{label}: cannot go on: work on it has failed: an illegal memory")
    assert message.endswith(f"({driver} code 700)")


def capturing(device, control, relaxes):
    stream, event = device.create_stream(), device.create_event()
    codes = []

    def watch():
        with device.relaxed_capture() if relaxes else nullcontext(), device:
            codes.append(device.query_event(event))

    with device:
        before = device.is_capturing(stream)
        with control.captured(stream) as graph:
            during = device.is_capturing(stream)
            thread = threading.Thread(target=watch)
            thread.start()
            thread.join()
        graph.close()
        after = device.is_capturing(stream)
    return before, during, after, codes, graph.code


def test_capture(on_device):
    assert on_device(capturing, False) == (False, True, False, [906], 901)
    assert on_device(capturing, True) == (False, True, False, [0], 0)


def test_no_driver(vendor):
    kind, name = ("cuda", "libcuda.so.1") if vendor == "nccl" else ("rocm", "libamdhip64.so")
    code = f"""
from gpucoll import devices
from gpucoll.devices.foreign_library import loaded_copies
print(devices.device_count({kind!r}), devices.unavailable({kind!r}))
"""
    said = run_python(code, GPUCOLL_CPU_ONLY="0", LD_LIBRARY_PATH="")
    if said.startswith("0 "):
        assert f"{name}" in said
        assert "cannot open shared object file" in said
    else:
        pytest.skip("this machine has the driver")


def test_cpu_only(vendor, monkeypatch):
    kind = "cuda" if vendor == "nccl" else "rocm"
    monkeypatch.setenv("GPUCOLL_CPU_ONLY", "1")

    with pytest.raises(BackendUnavailableError, match="GPUCOLL_CPU_ONLY keeps this process"):
        devices.open_device(kind, 0)
    assert devices.device_count(kind) == 0
    assert devices.device_of(kind, 8) is None
    assert "GPUCOLL_CPU_ONLY" in devices.unavailable(kind)


@pytest.mark.parametrize(
    ("given", "found"), [({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1")]
)
def test_how_many_work_queues_streams_share(doubles, vendor, given, found, monkeypatch):
    """It is said before the driver starts; what the user says stands."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    double = doubles.double(vendor)
    code = f"""
import ctypes, os
from gpucoll import devices
ctypes.CDLL({str(double.driver)!r}, mode=ctypes.RTLD_GLOBAL)
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
devices.open_device({double.kind!r}, 0)
print(getenv(b"CUDA_DEVICE_MAX_CONNECTIONS"))
"""
    said = run_python(code, GPUCOLL_CPU_ONLY="0", **given)
    expected = found.encode() if vendor == "nccl" or given else None
    assert said.strip() == repr(expected)


def test_no_gpus(doubles, vendor):
    double = doubles.double(vendor)
    code = f"""
from gpucoll import devices
import ctypes
ctypes.CDLL({str(double.driver)!r}, mode=ctypes.RTLD_GLOBAL)
print(devices.unavailable({double.kind!r}))
"""
    said = run_python(code, GPUCOLL_CPU_ONLY="0", DOUBLE_DEVICES="0")
    assert "does not start: no GPU is detected" in said
