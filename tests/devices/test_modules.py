"""Kernels loaded and launched through a driver's double: as host code, on the stream's thread."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from typing import Any

import numpy as np
import pytest

from gpucoll import devices
from gpucoll.devices import hip
from gpucoll.errors import BackendError

pytestmark = pytest.mark.parametrize("vendor", ["nccl", "rccl"])

SOURCE = r"""
struct numbers { unsigned long long to; unsigned count; unsigned char first; };

const unsigned fill_sizes[] = {1, sizeof(struct numbers)};
void fill(const struct numbers *given, unsigned blocks)
{
    for (unsigned i = 0; i < given->count; i++)
        ((unsigned char *)given->to)[i] = (unsigned char)(given->first + i * blocks);
}

const unsigned add_sizes[] = {3, 8, 8, 1};
void add(const unsigned long long *given, unsigned blocks)
{
    for (unsigned long long i = 0; i < given[1]; i++)
        ((unsigned char *)given[0])[i] += ((unsigned char *)given)[16] * blocks;
}
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> bytes:
    """A module of two kernels, as the double wants it."""
    made = tmp_path_factory.mktemp("module") / "kernels.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
    subprocess.run(command, input=SOURCE, text=True, check=True, timeout=60)
    return made.read_bytes()


@pytest.fixture
def on_device(gpu_ranks, doubles, vendor):
    """Return what calls ``function(device, control, ...)`` in a process with the doubles."""
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


def view(address: int, count: int) -> np.ndarray:
    kind: Any = ctypes.c_char * count
    return np.frombuffer(kind.from_address(address), np.uint8)


def filling(address: int, count: int, first: int) -> list[bytes]:
    return [struct.pack("=QIB3x", address, count, first)]


def launches(device, control, image):
    before = control.count("launches"), control.count("modules")  # this process has had others
    module = device.load_module(image)
    fill, add = (device.function_of(module, name) for name in ("fill", "add"))
    stream, address = device.create_stream(), device.allocate(16)
    with device:
        with control.held():
            device.launch(fill, 3, 256, filling(address, 5, 7), stream)
            three = [struct.pack("=Q", address), struct.pack("=Q", 2), b"\x0a"]
            device.launch(add, 2, 64, three, stream)
            waited = view(address, 16)[0] == 0xA5  # on the stream, not at once
        device.synchronize_stream(stream)
    seen = view(address, 7).tolist(), waited
    counts = [control.count("launches") - before[0], control.count("modules") - before[1]]
    device.unload_module(module)
    with pytest.raises(BackendError, match="launch a kernel of 1 blocks of 1 threads"), device:
        device.launch(fill, 1, 1, filling(address, 1, 1), stream)
    device.free(address)
    device.destroy_stream(stream)
    return *seen, [*counts, control.count("modules") - before[1]]


def test_launches_are_ordered_on_the_stream(on_device, image):
    content, waited, counts = on_device(launches, image)
    assert content == [27, 30, 13, 16, 19, 0xA5, 0xA5]
    assert waited
    assert counts == [2, 1, 0]


def capture(device, control, image):
    stream, address = device.create_stream(), device.allocate(4)
    with device:
        with control.captured(stream) as graph:
            module = device.load_module(image)  # a capture goes on meanwhile
            arguments = filling(address, 4, 1)
            device.launch(device.function_of(module, "fill"), 1, 32, arguments, stream)
            device.launch(
                device.function_of(module, "add"),
                1,
                32,
                [struct.pack("=Q", address), struct.pack("=Q", 4), b"\1"],
                stream,
            )
        assert graph.code == 0
        before = view(address, 4).tolist()
        results = []
        for _ in range(2):
            graph.launch(stream)
            device.synchronize_stream(stream)
            results.append(view(address, 4).tolist())
            view(address, 4)
        graph.close()
    return before, results


def test_launches_are_captured(on_device, image):
    before, results = on_device(capture, image)
    assert before == [0xA5] * 4
    assert results == [[2, 3, 4, 5]] * 2


def wrong(device, control, image):
    texts = []

    def refused(function, *given):
        with pytest.raises(BackendError) as error:
            function(*given)
        texts.append(str(error.value))

    refused(device.load_module, b"not an image at all, but long enough")
    refused(device.load_module, b".version 8.0\n.target sm_90\n" + b" " * 64)
    module = device.load_module(image)
    refused(device.function_of, module, "missing")
    refused(device.unload_module, 12345)
    stream, address = device.create_stream(), device.allocate(4)
    fill = device.function_of(module, "fill")
    with device:
        arguments = filling(address, 4, 1)
        refused(device.launch, fill, 0, 32, arguments, stream)
        control.driver_set("fail_launch", 2)
        device.launch(fill, 1, 32, arguments, stream)
        refused(device.launch, fill, 1, 32, arguments, stream)
        device.launch(fill, 1, 32, arguments, stream)
        other = devices.open_device(device.kind, 2)
        elsewhere = other.create_stream()
        refused(device.launch, fill, 1, 32, arguments, elsewhere)
        device.synchronize_stream(stream)
    control.driver_set("module_error", 2)
    refused(device.load_module, image)
    control.driver_set("module_error", 0)
    return texts


def test_what_goes_wrong_is_said(on_device, image, vendor):
    kind = "cuda" if vendor == "nccl" else "rocm"
    texts = on_device(wrong, image)
    expected = [
        "cannot load a module of kernels: device kernel image is invalid",
        "cannot load a module of kernels: a PTX JIT compilation failed",
        "cannot find the kernel missing in its module: named symbol not found",
        "cannot unload a module of kernels: invalid resource handle",
        "cannot launch a kernel of 0 blocks of 32 threads: invalid argument",
        "cannot launch a kernel of 1 blocks of 32 threads: unspecified launch failure",
        "cannot launch a kernel of 1 blocks of 32 threads: invalid resource handle",
        "cannot load a module of kernels: out of memory",
    ]
    assert [text.partition(" (")[0] for text in texts] == [f"{kind}:1: {x}" for x in expected]


def target(device, control):
    return device.target


def test_what_kernels_are_compiled_for(on_device, vendor):
    assert on_device(target) == ("sm_99" if vendor == "nccl" else "gfx9ff:sramecc+:xnack-")


def strange_target(device, control):
    fresh = hip.open_device(1)
    fresh._functions = {**fresh._functions, "device_properties": lambda properties, number: 0}
    with pytest.raises(BackendError) as error:
        _ = fresh.target
    return str(error.value)


def test_an_architecture_that_is_not_understood(on_device, vendor):
    if vendor == "nccl":
        pytest.skip("CUDA's target is made of two numbers")
    assert "the HIP runtime 6.4 names its architecture ''" in on_device(strange_target)
