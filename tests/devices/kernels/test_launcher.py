"""Loading and launching by the driver: what is done once, what goes wrong, and tables' memory."""

from __future__ import annotations

import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.devices.kernels.memory import Memory
from tests.dtypes import assert_same
from tests.guarded import POISON

from gpucoll import devices
from gpucoll.devices.kernels import driver_launcher
from gpucoll.devices.kernels.driver_launcher import DriverLauncher, TableMemory
from gpucoll.devices.kernels.images import Image, image_of
from gpucoll.errors import ArgumentTypeError, BackendError
from gpucoll.kernels.gpu import reduce
from gpucoll.kernels.gpu.launch import launcher_of
from gpucoll.kernels.gpu.launch import struct as struct_of
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.reduce import reduce_arrays

KERNEL = reduce.reduce_kernel("sum", "float32")[0]


def copies(memory: Memory, x: np.ndarray) -> tuple[Any, Any, list[Any]]:
    """Return an array, where a reduction of it alone goes, and that kernel's arguments."""
    given, made = memory.array(x), memory.empty(x.size, x.dtype.name)
    arguments = struct_of(
        reduce.ARGUMENTS,
        count=x.size,
        n_sources=1,
        n_destinations=1,
        sources=[given.buffer.address],
        destinations=[made.buffer.address],
    )
    return given, made, [arguments]


def once(device, control):
    launcher = DriverLauncher(device.kind)
    other = devices.open_device(device.kind, 2)
    modules = control.count("modules")
    with Memory(device) as memory, Memory(other) as elsewhere:
        x = np.arange(1000, dtype=np.float32)
        _, made, arguments = copies(memory, x)
        with ThreadPoolExecutor(4) as pool:  # threads that never entered the device
            for _ in pool.map(
                lambda _: launcher.launch(KERNEL, 1, arguments, 1, memory.stream), range(8)
            ):
                pass
        loaded = control.count("modules") - modules
        _, there, arguments = copies(elsewhere, x)
        launcher.launch(KERNEL, 1, arguments, 2, elsewhere.stream)
        memory.wait()
        elsewhere.wait()
        assert_same(made.read(), x)
        assert_same(there.read(), x)
    assert launcher.multiprocessors(1) == 132
    return loaded, control.count("modules") - modules


def test_a_kernel_is_loaded_once_on_each_device(on_device):
    assert on_device(once) == (1, 2)


def capabilities(device, control):
    launcher = DriverLauncher(device.kind)
    if device.kind == "cuda":
        return launcher.compute_capability(1)
    with pytest.raises(ArgumentTypeError, match="cannot run on AMD GPUs: Numba compiles for NV"):
        launcher.compute_capability(1)
    return None


def test_compute_capability(on_device, double):
    assert on_device(capabilities) == ((9, 9) if double.kind == "cuda" else None)


def wrong(device, control):
    launcher = DriverLauncher(device.kind)
    texts: list[str] = []

    def refused(stream, kernel=KERNEL):
        with pytest.raises(BackendError) as error:
            launcher.launch(kernel, 1, arguments, 1, stream)
        texts.append(str(error.value))

    with Memory(device) as memory:
        _, made, arguments = copies(memory, np.ones(10, np.float32))
        control.driver_set("module_error", 2)
        refused(memory.stream)
        control.driver_set("module_error", 0)
        control.driver_set("fail_launch", 1)
        refused(memory.stream)
        refused(12345)
        with pytest.MonkeyPatch.context() as patch:
            image = image_of(KERNEL, device.target)
            other = reduce.reduce_kernel("max", "float32")[0]
            wrong_one = Image((other,), image.content, "somebody")
            patch.setattr(f"{DriverLauncher.__module__}.image_of", lambda *_: wrong_one)
            refused(memory.stream, other)
        refused(memory.stream, CompiledKernel("entry", ".version 8.0 and more"))
        launcher.launch(KERNEL, 1, arguments, 1, memory.stream)
        memory.wait()
        assert_same(made.read(), np.ones(10, np.float32))
    return texts


def test_what_goes_wrong_names_the_kernel_and_the_device(on_device, double):
    load, launch, stream, missing, text = on_device(wrong)
    label = f"{double.kind}:1"
    compiler = "NVRTC 12." if double.kind == "cuda" else "hipRTC 6."
    assert load.startswith(f"{KERNEL.name}, made for ")
    assert f" by {compiler}" in load
    assert f"{label}: cannot load a module of kernels: out of memory" in load
    assert "a compiler that is newer may make what it does not load" in load
    assert launch.startswith(
        f"{KERNEL.name}: {label}: cannot launch a kernel of 1 blocks of 256 threads: unspecified"
    )
    assert stream.startswith(f"{KERNEL.name}: {label}: cannot launch")
    assert "invalid resource handle" in stream
    assert f"{label}: cannot find the kernel reduce_max_float32 in its module: named" in missing
    assert text.startswith("entry, made for ")
    assert " by Numba: " in text


USERS = r"""
extern const unsigned users_sizes[];
const unsigned users_sizes[] = {4, 8, 8, 8, 8};
void users(const unsigned long long *given, unsigned blocks)
{
    float *to = (float *)given[1], *a = (float *)given[2], *b = (float *)given[3];
    for (unsigned long long i = 0; i < given[0]; i++)
        to[i] = a[i] - 2 * b[i];
}
"""


class Text(str):
    """Machine code where PTX is expected: the double compiles none."""

    content: bytes

    def encode(self, *_: Any) -> bytes:
        return self.content


def users(device, control, image):
    text = Text("a user's operation")
    text.content = image
    launcher = DriverLauncher(device.kind)
    x, y = np.arange(9, dtype=np.float32), np.full(9, 3, np.float32)
    with Memory(device) as memory:
        a, b, to = memory.array(x), memory.array(y), memory.empty(9, "float32")
        words = [9, *(each.buffer.address for each in (to, a, b))]
        launcher.launch(CompiledKernel("users", text), 1, words, 1, memory.stream)
        memory.wait()
        assert_same(to.read(), x - 2 * y)


def test_a_users_operation_takes_words(on_device, tmp_path):
    made = tmp_path / "users.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
    subprocess.run(command, input=USERS, text=True, check=True, timeout=60)
    on_device(users, made.read_bytes())


def tables(device, control):
    memory = TableMemory(device)
    before = control.count("memory")
    with Memory(device) as arrays, Memory(device) as others:
        out = arrays.empty(64, "uint8")
        for value in (1, 2):
            with control.held():  # it comes when the stream is there
                table = memory.upload(np.full(64, value, np.uint8), arrays.stream)
                with device:
                    device.copy(out.buffer.address, table.address, 64, arrays.stream)
                assert out.now()[0] == (POISON if value == 1 else 1)
            arrays.wait()
            assert (out.read() == value).all()
            addresses = {table.address}
            del table
        larger = memory.upload(np.full(5000, 3, np.uint8), arrays.stream)
        elsewhere = memory.upload(np.full(64, 3, np.uint8), others.stream)
        addresses |= {larger.address, elsewhere.address}
        assert len(addresses) == 3
        arrays.wait()
        others.wait()
    return control.count("memory") - before


def test_a_tables_memory_serves_the_next_one_on_its_stream(on_device):
    assert on_device(tables) == 2 * 4096 + 8192


def many_tables(device, control):
    memory = TableMemory(device)
    before = control.count("memory")
    with Memory(device) as arrays, pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_launcher, "_MOST_UNUSED_BYTES", 3 * 4096)
        held = [memory.upload(np.zeros(10, np.uint8), arrays.stream) for _ in range(10)]
        most = control.count("memory") - before
        del held
        large = memory.upload(np.zeros(5000, np.uint8), arrays.stream)
        left = control.count("memory") - before
        del large
    return most, left


def test_unused_memory_of_tables_is_bounded(on_device):
    assert on_device(many_tables) == (10 * 4096, 3 * 4096 + 8192)


def no_memory(device, control):
    memory = TableMemory(device)
    with Memory(device) as arrays:
        control.driver_set("memory", control.count("memory") + 100)
        try:
            with pytest.raises(MemoryError):
                memory.upload(np.zeros(10, np.uint8), arrays.stream)
        finally:
            control.driver_set("memory", 1 << 32)
        return memory.upload(np.zeros(10, np.uint8), arrays.stream).address != 0


def test_tables_without_memory(on_device):
    assert on_device(no_memory)


def unknown_stream(device, control):
    with Memory(device) as memory:
        x = memory.array(np.ones(8, np.float32))
        with pytest.raises(BackendError, match="invalid resource handle"):
            reduce_arrays("sum", [x.buffer], [x.buffer], stream=999)
        assert isinstance(launcher_of(device.kind), DriverLauncher)
        assert struct.calcsize("=Q") == 8


def test_a_stream_that_is_not_there(on_device):
    on_device(unknown_stream)
