"""Memory of a Host device: how much there is, whose it is, other processes, faults."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpucoll import devices
from gpucoll.devices.host.device import HostDevice
from gpucoll.devices.host.memory import ALIGNMENT_BYTES, Ranges
from gpucoll.errors import ArgumentError, BackendError, BackendUnavailableError


def test_memory_is_the_device_s_until_it_is_freed(device):
    address = device.allocate(1000)

    assert address % ALIGNMENT_BYTES == 0
    assert device.device_of(address) == device.device_of(address + 999) == 0
    assert devices.device_of("host", address) == 0
    assert not device.is_managed(address)
    device.free(address)
    assert device.device_of(address) is None
    assert device.device_of(id(device)) is None
    with pytest.raises(BackendError, match="none begins at"):
        device.free(address)
    with pytest.raises(BackendError, match="none begins at"):
        device.free(address + 1)


@pytest.fixture
def own_device(device):
    """One of whose memory nobody else has or had any, as earlier tests may of the others'."""
    return HostDevice(62)


def test_memory_runs_out_and_comes_back_whole(own_device):
    device = own_device
    free, total = device.memory_bytes()
    assert free == total
    half = device.allocate(total // 2)
    with pytest.raises(MemoryError, match=rf"{free - total // 2} of {total} bytes are free"):
        device.allocate(total // 2 + ALIGNMENT_BYTES)
    device.free(half)
    parts = [device.allocate(total // 8) for _ in range(8)]
    for part in parts[::2] + parts[1::2]:
        device.free(part)
    whole = device.allocate(total)
    assert device.memory_bytes() == (0, total)
    device.free(whole)


def test_freed_memory_goes_back_to_the_system(own_device):
    device = own_device

    def pages():
        return os.fstat(device._arena.file).st_blocks * 512

    before, size = pages(), 8 << 20
    address = device.allocate(size)
    ctypes.memset(address, 1, size)
    assert pages() >= before + size
    device.free(address)
    assert pages() < before + size


def test_free_waits_for_the_work_that_uses_it(device):
    device.faults.delays_ns["copy"] = 100_000_000
    address, other = device.allocate(4), device.allocate(4)
    device.fill(address, b"\x01", 4, 0)
    event = device.create_event()
    device.record_event(event, 0)
    assert not device.is_event_done(event)
    device.free(other)
    assert device.is_event_done(event)
    device.free(address)
    device.destroy_event(event)


def test_managed_pinned_and_registered_memory(device):
    managed, pinned = device.allocate_managed(100), device.allocate_pinned(100)
    mine = np.zeros(100, np.uint8)

    assert device.is_managed(managed + 50)
    assert device.device_of(managed) == 0
    assert device.export_memory(managed) is None
    assert not device.is_managed(pinned)
    assert device.device_of(pinned) is None
    assert device.register_host(mine.ctypes.data, 100) == mine.ctypes.data
    with pytest.raises(BackendError, match="registered already"):
        device.register_host(mine.ctypes.data + 50, 100)
    with pytest.raises(BackendError, match="argument is invalid"):
        device.register_host(0, 100)
    device.fill(mine.ctypes.data, b"\x08", 100, 0)
    device.copy(pinned, mine.ctypes.data, 100, 0)
    device.copy(managed, pinned, 100, 0)
    device.synchronize()
    assert ctypes.string_at(managed, 100) == b"\x08" * 100
    device.unregister_host(mine.ctypes.data)
    with pytest.raises(BackendError, match="not registered"):
        device.unregister_host(mine.ctypes.data)
    device.free_pinned(pinned)
    with pytest.raises(BackendError, match="none begins at"):
        device.free_pinned(pinned)
    device.free(managed)
    assert device.device_of(managed) is None


def test_ranges():
    ranges = Ranges()
    ranges.add(100, 10)
    ranges.add(50, 10)
    assert [ranges.start_of(at) for at in (49, 50, 59, 60, 100, 110)] == [
        None, 50, 50, None, 100, None,
    ]  # fmt: skip
    assert ranges.overlaps(55, 1)
    assert ranges.overlaps(0, 51)
    assert not ranges.overlaps(60, 40)
    assert ranges.overlaps(60, 41)
    assert ranges.remove(50) == 10
    assert ranges.remove(50) is None


# --- other processes ------------------------------------------------------------------------------

_OTHER = """
import ctypes, sys
from gpucoll.devices import open_device
device = open_device("host", 0)
handle, offset = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
base = device.open_exported(handle)
assert device.open_exported(handle) == base
device.close_exported(base)
with device:
    stream = device.create_stream()
    mine = device.allocate(4)
    # The values that come from there release what goes back.
    assert device.stream_wait_value(stream, base + offset, 3) == 0
    device.copy(mine, base + offset + 8, 4, stream)
    device.copy(base + offset + 12, mine, 4, stream)
    assert device.stream_write_value(stream, base + offset + 4, 4) == 0
    device.synchronize_stream(stream)
    assert ctypes.string_at(mine, 4) == b"abcd"
    device.destroy_stream(stream)
device.close_exported(base)
try:
    device.close_exported(base)
except Exception as error:
    print(type(error).__name__)
"""


def other_process(program, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("GPUCOLL_CPU_ONLY", None)
    environment.update(options)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_two_processes_order_their_streams_by_values(device, stream):
    memory = device.allocate(64)
    ctypes.memset(memory, 0, 64)
    ctypes.memmove(memory + 8, b"abcd", 4)
    exported = device.export_memory(memory + 4)
    assert exported.offset == device.export_memory(memory).offset + 4
    assert exported.offset + 60 <= exported.size_bytes
    handle, offset = exported.handle.hex(), exported.offset - 4
    with other_process(_OTHER, handle, offset) as process:
        assert device.stream_wait_value(stream, memory + 4, 4) == 0
        assert not device.is_stream_done(stream)  # nobody has written it
        device.stream_write_value(0, memory, 3)
        code, out, err = result_of(process)
        assert (code, out) == (0, "BackendError\n"), err
    device.synchronize_stream(stream)
    assert ctypes.string_at(memory + 12, 4) == b"abcd"
    with pytest.raises(BackendError, match="this very process"):
        device.open_exported(exported.handle)
    with pytest.raises(BackendError, match="no handle"):
        device.open_exported(b"nonsense")
    device.free(memory)


_EXPORTER = """
from gpucoll.devices import open_device
device = open_device("host", 0)
memory = device.allocate(1 << 20)
device.stream_wait_value(0, memory, 1)
exported = device.export_memory(memory)
print(exported.handle.hex(), exported.offset, flush=True)
input()
"""


def named():
    """Return gpucoll's shared memory that has a name: other programs' may come and go."""
    return sorted(Path("/dev/shm").glob("*gpucoll*"))


def test_nothing_is_left_of_a_killed_process(device):
    before = named()
    with other_process(_EXPORTER) as process:
        handle, offset = process.stdout.readline().split()
        base = device.open_exported(bytes.fromhex(handle))
        process.kill()
        process.wait(10)
    ctypes.memset(base + int(offset), 5, 100)  # what is mapped here stays good
    device.close_exported(base)
    with pytest.raises(BackendError, match="has ended"):
        device.open_exported(bytes.fromhex(handle))
    assert named() == before


_ENDING = """
import sys
from pathlib import Path
from gpucoll.devices import open_device
device = open_device("host", 0)
word = device.allocate_pinned(4)
for _ in range(5):
    assert device.stream_wait_value(device.create_stream(), word, 1) == 0
if sys.argv[1] == "raise":
    raise SystemExit(3)
if sys.argv[1] == "wait":
    print("waiting", flush=True)
    device.synchronize()
"""


def test_a_process_ends_with_streams_that_never_would():
    with other_process(_ENDING, "raise") as process:
        assert result_of(process) == (3, "", "")


def test_ctrl_c_comes_out_of_a_wait():
    with other_process(_ENDING, "wait") as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        code, _, err = result_of(process)
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in err


_FORKING = """
import os
from gpucoll.devices import open_device
device = open_device("host", 0)
word = device.allocate_pinned(4)
event = device.create_event()
device.stream_wait_value(0, word, 1)
device.record_event(event, 0)
child = os.fork()
if not child:
    refused = 0
    for attempt in (
        device.create_stream, device.create_event, device.synchronize, device.__enter__,
        lambda: device.allocate(1), lambda: device.is_event_done(event),
        lambda: device.synchronize_event(event), lambda: device.synchronize_stream(0),
        lambda: device.copy(word, word, 1, 0),
        lambda: device.check(device.record_event(event, 0), "record"),
    ):
        try:
            attempt()
        except Exception as error:
            refused += "fork" in str(error)
    os._exit(refused)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
assert not device.is_event_done(event)
device.stream_write_value(device.create_stream(), word, 1)
device.synchronize_event(event)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_devices():
    with other_process(_FORKING) as process:
        assert result_of(process) == (0, "10\n", "")


# --- variables ------------------------------------------------------------------------------------


def test_how_many_there_are_and_how_large(device, monkeypatch):
    monkeypatch.setenv("GPUCOLL_HOST_DEVICES", "2")
    assert devices.device_count("host") == 2
    with pytest.raises(BackendUnavailableError, match=r"host:7 is not there: .* says 2 devices"):
        HostDevice(7)
    monkeypatch.setenv("GPUCOLL_HOST_DEVICES", "1000")
    with pytest.raises(ArgumentError, match="must be 1 to 64"):
        devices.device_count("host")
    monkeypatch.delenv("GPUCOLL_HOST_DEVICES")
    monkeypatch.setenv("GPUCOLL_HOST_DEVICE_MEMORY", "1e6")
    assert HostDevice(63).memory_bytes() == (999424, 999424)
    assert device.identity != HostDevice(63).identity
    assert device.identity.uuid.startswith("HOST-")


# --- faults ---------------------------------------------------------------------------------------


def test_allocations_copies_and_exports_fail_when_asked_to(device):
    address = device.allocate(16)
    device.faults.failing.update(allocation=1, copy=2, ipc=0)
    with pytest.raises(BackendError, match="export"):
        device.export_memory(address)
    assert device.export_memory(address) is not None  # once
    device.copy(address, address, 4, 0)
    device.fill(address, b"\0", 4, 0)
    with pytest.raises(BackendError, match="as a test has requested"):
        device.copy(address, address, 4, 0)
    device.copy(address, address, 4, 0)
    device.free(device.allocate(16))
    with pytest.raises(MemoryError):
        device.allocate(16)
    device.free(address)
