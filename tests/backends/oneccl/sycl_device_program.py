"""Run by tests where there are dpctl and a SYCL device: each call of `SyclDevice`, for real."""

from __future__ import annotations

import ctypes
import json

import dpctl
import dpctl.memory
import numpy as np

from gpucoll.arrays import foreign_arrays, streams
from gpucoll.devices import device_of, open_device, sycl
from gpucoll.errors import BackendUnavailableError

sycl.DEVICES[0] = sycl.ALL_CPUS


def read(device, address, size_bytes, stream=0):
    """Return bytes of the device's memory."""
    pinned = device.allocate_pinned(size_bytes)
    device.copy(pinned, address, size_bytes, stream)
    device.synchronize_stream(stream)
    got = ctypes.string_at(pinned, size_bytes)
    device.free_pinned(pinned)
    return got


def main() -> dict[str, object]:
    """Return what was seen."""
    device = open_device("sycl", 0)
    memory = device.allocate(1 << 20)
    seen: dict[str, object] = {"name": device.identity.name, "uuid": device.identity.uuid}
    seen["patterns"] = [
        _filled(device, memory, bytes(range(1, size + 1))) for size in (1, 2, 4, 8, 16)
    ]
    seen["owner"] = device_of("sycl", memory)
    seen["not ours"] = device_of("sycl", np.zeros(9).ctypes.data)
    stream, event = device.create_stream(), device.create_event()
    seen["new event"] = device.query_event(event)
    device.fill(memory, b"\x05", 1 << 20, stream)
    device.check(device.record_event(event, stream), "record")
    device.check(device.stream_wait_event(0, event, 0), "wait")
    seen["ordered"] = read(device, memory, 1 << 20) == b"\x05" * (1 << 20)
    device.synchronize_event(event)
    seen["event is done"] = device.is_event_done(event)
    seen["stream is done"] = device.is_stream_done(stream)
    seen["owns"] = [device.owns_stream(stream), device.owns_stream(0)]
    queue = dpctl.SyclQueue("cpu")  # not in order
    address = streams.address_of(queue)
    seen["owns dpctl's"] = device.owns_stream(address)
    x = dpctl.memory.MemoryUSMDevice(64, queue=queue)
    x.copy_from_host(np.arange(64, dtype=np.uint8))
    view = foreign_arrays.look(x, "x")
    seen["view"] = [view.template.device, view.template.dtype, view.template.stream == address]
    device.check(device.record_event(event, address), "record")
    device.check(device.stream_wait_event(stream, event, 0), "wait")
    seen["dpctl's memory"] = read(device, view.address, 64, stream) == bytes(range(64))
    missing = []
    for name, arguments in (
        ("stream_wait_value", (0, memory, 1)),
        ("open_exported", (b"",)),
        ("load_module", (b"",)),
    ):
        try:
            getattr(device, name)(*arguments)
        except BackendUnavailableError as error:
            missing.append(str(error))
    seen["missing"] = missing
    device.destroy_event(event)
    device.destroy_stream(stream)
    device.free(memory)
    return seen


def _filled(device, memory, pattern):
    device.fill(memory, pattern, 40, 0)
    return read(device, memory, 40 * len(pattern)) == pattern * 40


if __name__ == "__main__":
    print(json.dumps(main()))
