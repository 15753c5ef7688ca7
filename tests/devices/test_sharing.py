"""Memory of other processes, page-locked host memory, and streams that wait for words.

Over the doubles of both drivers; the calls that they get are looked at one by one.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
from typing import Any

import numpy as np
import pytest

from gpucoll import devices
from gpucoll.devices import cuda
from gpucoll.errors import BackendError

pytestmark = pytest.mark.parametrize("vendor", ["nccl", "rccl"])

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def on_ranks(gpu_ranks, doubles, vendor):
    """Return what calls ``function(device, control, comm)`` in processes with the doubles.

    Each rank has GPU `number`, its own if that is None.
    """
    double = doubles.double(vendor)

    def call(world_size, function, *args, number=1):
        return gpu_ranks.call(
            world_size,
            inside,
            double,
            function,
            args,
            number,
            gives="seat",
            environment=double.variables,
        )

    return call


def inside(seat, double, function, args, number):
    control = double.load()
    device = devices.open_device(double.kind, seat.rank if number is None else number)
    if seat.world_size == 1:
        return function(device, control, *args)
    with seat.init() as comm:
        return function(device, control, comm, *args)


def view(address, count, dtype=np.uint8):
    kind: Any = ctypes.c_char * (count * np.dtype(dtype).itemsize)
    return np.frombuffer(kind.from_address(address), dtype)


def shared_segment():
    """Return memory that may be shared, and where it lies."""
    segment = mmap.mmap(-1, SIZE)
    return segment, np.frombuffer(segment, np.uint8).ctypes.data


# --- memory of other processes --------------------------------------------------------------------


def pass_around(device, control, comm):
    """Each rank writes through a stream into the next one's memory; what it opened is counted."""
    address, stream = device.allocate(1000), device.create_stream()
    exported = device.export_memory(address + 24)
    everyone = comm.all_gather_object(exported)
    nxt = everyone[(comm.rank + 1) % comm.world_size]
    base = device.open_exported(nxt.handle)
    again = device.open_exported(nxt.handle)
    owner = device.device_of(base)
    with device:
        device.fill(base + nxt.offset, bytes([comm.rank + 1]), 8, stream)
        device.synchronize_stream(stream)
    comm.barrier()
    found = view(address, 1000).tolist()
    device.close_exported(base)
    device.close_exported(again)
    with pytest.raises(BackendError, match="cannot close another process's memory: invalid arg"):
        device.close_exported(base)
    comm.barrier()
    device.free(address)
    device.destroy_stream(stream)
    return (
        found[20:36],
        exported.offset,
        exported.size_bytes,
        len(exported.handle),
        base == again,
        owner,
    )


@pytest.mark.parametrize("number", [1, None], ids=["one GPU", "own GPUs"])
def test_processes_write_each_others_memory(on_ranks, number):
    for rank, (found, offset, size, length, is_same, owner) in enumerate(
        on_ranks(2, pass_around, number=number)
    ):
        assert found == [0xA5] * 4 + [2 - rank] * 8 + [0xA5] * 4
        assert (offset, size, length, is_same) == (24, 1000, 64, True)
        assert owner == (1 - rank if number is None else 1)


def use_what_is_freed(device, control, comm):
    address = device.allocate(64)
    exported = comm.all_gather_object(device.export_memory(address))[1 - comm.rank]
    base = device.open_exported(exported.handle)
    comm.barrier()
    device.free(address)
    comm.barrier()
    found = view(base, 64).tolist()
    device.close_exported(base)
    return found


def test_freed_memory_is_found_out(on_ranks):
    assert on_ranks(2, use_what_is_freed) == [[0xDD] * 64] * 2


def calls_of_exporting(device, control):
    address = device.allocate(4096)
    with control.driver_calls() as calls:
        device.export_memory(address + 100)
    exported = device.export_memory(address)
    with (
        control.driver_calls() as own,
        pytest.raises(BackendError, match="cannot open another process's memory: invalid device c"),
    ):
        device.open_exported(exported.handle)
    with pytest.raises(ValueError, match="has 64 bytes; got 3"):
        device.open_exported(b"abc")
    device.free(address)
    return address, calls, own


def test_calls_of_exporting(on_ranks, vendor):
    ((address, calls, own),) = on_ranks(1, calls_of_exporting)
    names = ("cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2")
    if vendor == "rccl":
        names = ("hipMemGetAddressRange", "hipIpcGetMemHandle", "hipIpcOpenMemHandle")
    assert calls == [(names[0], [address + 100]), (names[1], [address])]
    assert own == [(names[2], [1])]  # with access to peers, when needed


def not_exportable(device, control):
    answers: list[Any] = []
    for setting in ("managed", "private"):
        control.driver_set(setting, 1)
        address = device.allocate(64)
        control.driver_set(setting, 0)
        answers.append((device.is_managed(address), device.export_memory(address)))
        device.free(address)
    answers.append((device.is_managed(8), device.export_memory(8)))
    address = device.allocate(64)
    for code in (801, 2):
        control.driver_set("export_error", code)
        try:
            answers.append(device.export_memory(address))
        except BackendError as error:
            answers.append(str(error).split(" (")[0])
    control.driver_set("export_error", 0)
    device.free(address)
    return answers


def test_memory_that_cannot_be_exported(on_ranks, vendor):
    label = "cuda:1" if vendor == "nccl" else "rocm:1"
    (answers,) = on_ranks(1, not_exportable)
    assert answers == [
        (True, None),
        (False, None),
        (False, None),
        None,
        f"{label}: cannot export memory to other processes: out of memory",
    ]


def opening_fails(device, control, comm):
    address = device.allocate(64)
    exported = comm.all_gather_object(device.export_memory(address))[1 - comm.rank]
    control.driver_set("open_error", 205)
    with pytest.raises(BackendError, match="cannot open another process's memory"):
        device.open_exported(exported.handle)
    control.driver_set("open_error", 0)
    base = device.open_exported(exported.handle)
    device.close_exported(base)
    comm.barrier()
    device.free(address)
    return True


def test_opening_fails(on_ranks):
    assert on_ranks(2, opening_fails) == [True, True]


def whom_it_reaches(device, control):
    answers = [device.can_access(number) for number in (1, 2)]
    control.driver_set("peers", 0)
    answers += [device.can_access(number) for number in (1, 2)]
    control.driver_set("peers", 1)
    with pytest.raises(BackendError, match=r"cannot tell whether it reads \w+:99's memory"):
        device.can_access(99)
    return answers


def test_whom_it_reaches(on_ranks):
    assert on_ranks(1, whom_it_reaches) == [[True, True, True, False]]


# --- host memory ----------------------------------------------------------------------------------


def host_memory(device, control):
    stream, memory = device.create_stream(), device.allocate(64)
    segment, host = shared_segment()
    with control.driver_calls() as calls:
        pinned = device.allocate_pinned(64)
        seen = device.register_host(host, SIZE)
    with device:
        device.fill(memory, b"\7", 64, stream)
        device.copy(pinned, memory, 64, stream)
        device.copy(seen, memory, 8, stream)
        device.synchronize_stream(stream)
    found = view(pinned, 64).tolist() == [7] * 64, segment[:9]
    with pytest.raises(BackendError, match="cannot page-lock 12288 bytes of host memory"):
        device.register_host(host, SIZE)
    with control.driver_calls() as ends:
        device.unregister_host(host)
        device.free_pinned(pinned)
    device.free(memory)
    device.destroy_stream(stream)
    return host, pinned, found, calls, ends


def test_host_memory(on_ranks, vendor):
    names = ("cuMemHostAlloc", "cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2")
    ends = ("cuMemHostUnregister", "cuMemFreeHost")
    if vendor == "rccl":
        names = ("hipHostMalloc", "hipHostRegister", "hipHostGetDevicePointer")
        ends = ("hipHostUnregister", "hipHostFree")
    ((host, pinned, found, calls, ended),) = on_ranks(1, host_memory)
    assert found == (True, b"\7" * 8 + b"\0")
    flags = 3  # portable, mapped
    assert calls == [
        (names[0], [64, flags]),
        (names[1], [host, SIZE, flags]),
        (names[2], [host, 0]),
    ]
    assert ended == [(ends[0], [host]), (ends[1], [pinned])]


def host_memory_fails(device, control):
    _segment, host = shared_segment()
    control.driver_set("pinned_error", 2)
    with pytest.raises(MemoryError, match="no 64 bytes of page-locked host memory"):
        device.allocate_pinned(64)
    control.driver_set("pinned_error", 0)
    control.driver_set("register_error", 2)
    with pytest.raises(BackendError, match="cannot page-lock 12288 bytes"):
        device.register_host(host, SIZE)
    control.driver_set("register_error", 0)
    return True


def test_host_memory_fails(on_ranks):
    assert on_ranks(1, host_memory_fails) == [True]


# --- words ----------------------------------------------------------------------------------------


def words(device, control):
    """A stream waits for another one's write; then for the host's."""
    _segment, host = shared_segment()
    seen = device.register_host(host, SIZE)
    word = view(host, 1, np.uint32)
    first, second = device.create_stream(), device.create_stream()
    memory = device.allocate(8)
    with device, control.driver_calls() as calls:
        device.check(device.stream_wait_value(first, seen, 5), "wait")
        device.fill(memory, b"\1", 8, first)
        device.check(device.stream_write_value(second, seen, 4), "write")
        device.synchronize_stream(second)
        early = device.is_stream_done(first), int(word[0])
        device.check(device.stream_write_value(second, seen, 6), "write")
        device.synchronize_stream(first)
        late = view(memory, 8).tolist(), int(word[0])
        device.check(device.stream_wait_value(first, seen + 4, 1), "wait")
        assert not device.is_stream_done(first)
        view(host + 4, 1, np.uint32)[0] = 1
        device.synchronize_stream(first)
    device.unregister_host(host)
    device.free(memory)
    for stream in (first, second):
        device.destroy_stream(stream)
    return seen, first, second, early, late, calls


def test_words(on_ranks, vendor):
    ((seen, first, second, early, late, calls),) = on_ranks(1, words)
    assert early == (False, 4)
    assert late == ([1] * 8, 6)
    write = "cuStreamWriteValue32_v2" if vendor == "nccl" else "hipStreamWriteValue32"
    wait, at_least = "cuStreamWaitValue32_v2", [0]
    if vendor == "rccl":
        wait, at_least = "hipStreamWaitValue32", [0, 0xFFFFFFFF]  # with a mask
    assert [call for call in calls if "Value32" in call[0]] == [
        (wait, [first, seen, 5, *at_least]),
        (write, [second, seen, 4, 0]),
        (write, [second, seen, 6, 0]),
        (wait, [first, seen + 4, 1, *at_least]),
    ]


def words_that_cannot_be(device, control):
    stream, memory = device.create_stream(), device.allocate(8)
    _segment, host = shared_segment()
    control.driver_set("managed", 1)
    managed = device.allocate(8)
    control.driver_set("managed", 0)
    with device:
        codes = [device.stream_wait_value(stream, at, 1) for at in (host, managed, memory + 2)]
        control.driver_set("wait_error", 801)
        codes.append(device.stream_write_value(stream, memory, 1))
        control.driver_set("wait_error", 0)
        codes.append(device.stream_write_value(stream, memory, -1))
        device.synchronize_stream(stream)
    last = int(view(memory, 1, np.uint32)[0])
    device.destroy_stream(stream)
    device.free(memory)
    device.free(managed)
    return codes, last


def test_words_that_cannot_be(on_ranks):
    # Memory that the GPU does not see, managed, unaligned; a driver that refuses.
    assert on_ranks(1, words_that_cannot_be) == [([1, 1, 1, 801, 0], 0xFFFFFFFF)]


def can_wait(device, control):
    module = importlib.import_module(devices.KINDS[device.kind])
    answers = []
    for value in (1, 0):
        control.driver_set("wait_values", value)
        answers.append(module.open_device(1).can_wait_for_values)
    control.driver_set("wait_values", 1)
    return answers


def test_whether_streams_can_wait(on_ranks, vendor):
    # CUDA's newer function is there whatever the attribute of the older one says.
    assert on_ranks(1, can_wait) == [[True, vendor == "nccl"]]


def flush(device, control):
    """Return, by what the driver says, why streams cannot be made to see, and how often it did."""
    module, found = importlib.import_module(devices.KINDS[device.kind]), []
    if device.kind == "rocm":
        return [device.remote_writes_problem]
    for ordering, options in ((0, 1), (0, 2), (100, 0), (200, 1)):
        control.driver_set("remote_ordering", ordering)
        control.driver_set("remote_flush", options)
        made, before = module.open_device(1), control.driver.double_get(b"flushes")
        problem = made.remote_writes_problem
        if not problem:
            with made:
                made.flush_remote_writes()
        found.append((problem, control.driver.double_get(b"flushes") - before))
    control.driver_set("remote_ordering", 0)
    control.driver_set("remote_flush", 1)
    return found


def test_what_nics_have_written(on_ranks, vendor):
    unknown = "its driver does not tell when streams see what a NIC has written"
    expected = [("", 1), (unknown, 0), ("", 0), ("", 0)]
    assert on_ranks(1, flush) == [expected if vendor == "nccl" else [unknown]]


def older_driver(device, control):
    symbols = {**cuda.VENDOR.symbols, "stream_wait_value": ("cuStreamWaitValue32",)}
    driver = cuda.CudaDriver(cuda.VENDOR._replace(symbols=symbols))
    answers = []
    for value in (1, 0):
        control.driver_set("wait_values", value)
        answers.append(cuda.CudaDevice(driver, 1).can_wait_for_values)
    control.driver_set("wait_values", 1)
    symbols = {**symbols, "stream_wait_value": ("none",)}
    without = cuda.CudaDevice(cuda.CudaDriver(cuda.VENDOR._replace(symbols=symbols)), 1)
    return answers, without.can_wait_for_values, without.stream_wait_value(0, 8, 1)


def test_an_older_driver(on_ranks, vendor):
    if vendor == "rccl":
        pytest.skip("AMD's runtime has one function")
    assert on_ranks(1, older_driver) == [([True, False], False, 801)]
