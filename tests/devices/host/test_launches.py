"""Kernels of a Host device: modules, launches, tables, and what tests have go wrong."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from llvmlite import ir

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentTypeError, BackendError
from gpucoll.kernels.cpu.addresses import PACK
from gpucoll.kernels.cpu.codegen import I64, VOID, pointer
from gpucoll.kernels.cpu.linking import linked_kernel
from gpucoll.kernels.gpu.launch import LAUNCHERS, launcher_of
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.pack import prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.reduce import reduce_arrays


@pytest.fixture
def memory(device):
    address = device.allocate(8192)
    ctypes.memset(address, 0, 8192)
    yield address
    device.free(address)


def buffer(address, count, stream, dtype="float32", item_bytes=4):
    return Buffer(address, (count,), dtype, item_bytes, None, "host:0", stream)


def floats(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def multiply_module():
    """Return a shared library whose kernel stores ``blocks * threads * a`` at `to`."""
    module = ir.Module(name="multiply")
    kind = ir.FunctionType(VOID, [I64] * 3)
    function = ir.Function(module, kind, name="multiply")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    blocks, threads, arguments = function.args

    def argument(place):
        address = b.load(pointer(b, b.add(arguments, I64(8 * place)), I64), typ=I64)
        return b.load(pointer(b, address, I64), typ=I64)

    product = b.mul(b.mul(blocks, threads), argument(1))
    b.store(product, pointer(b, argument(0), I64))
    b.ret_void()
    return linked_kernel("multiply", function)


def test_a_module_is_loaded_and_its_kernel_launched(device, gate, stream, memory):
    module = device.load_module(multiply_module())
    function = device.function_of(module, "multiply")
    gate.hold(stream)
    given = bytearray(np.int64(7).tobytes())
    device.launch(function, 3, 2, [np.int64(memory).tobytes(), given], stream)
    given[:] = bytes(8)  # they were copied
    assert ctypes.c_int64.from_address(memory).value == 0
    gate.open()
    device.synchronize_stream(stream)
    assert ctypes.c_int64.from_address(memory).value == 42
    with pytest.raises(BackendError, match="no kernel nothing"):
        device.function_of(module, "nothing")
    with pytest.raises(BackendError, match="argument is invalid"):
        device.launch(function, 0, 1, [], stream)
    device.unload_module(module)
    with pytest.raises(BackendError, match="there is no module"):
        device.function_of(module, "multiply")
    with pytest.raises(BackendError, match="cannot load a module"):
        device.load_module(b"not a library")
    assert device.target == "host"


def test_a_kernel_s_arguments_outlive_its_launch(device, gate, stream, memory):
    gate.hold(stream)
    floats(memory, 8)[:] = 2
    for _ in range(20):
        reduce_arrays(
            "sum", [buffer(memory, 8, stream)], [buffer(memory, 8, stream) for _ in range(2)]
        )
    gc.collect()
    np.zeros(100_000)  # what was freed is used anew
    gate.open()
    device.synchronize_stream(stream)
    assert (floats(memory, 8) == 2.0**21).all()


def test_tables_live_as_long_as_what_uses_them_and_no_longer(device, gate, stream, memory):
    before = device.counts()["bytes"]
    arrays = [buffer(memory + 64 * place, 4, stream) for place in range(3)]
    for place in range(3):
        floats(memory + 64 * place, 4)[:] = place + 1
    whole = buffer(memory + 4096, 64, stream, "uint8", 1)
    offsets = [0, 16, 32, 64]
    gate.hold(stream)
    pack = prepare_pack(arrays, whole, offsets, scale=2.0, stream=stream)
    pack()
    assert device.counts()["bytes"] > before
    del pack
    gc.collect()
    prepare_unpack(arrays, whole, offsets, stream=stream)()
    gate.open()
    device.synchronize_stream(stream)
    assert floats(memory + 4096, 16).tolist() == [2] * 4 + [4] * 4 + [6] * 4 + [0] * 4
    assert floats(memory + 128, 4).tolist() == [6] * 4
    device.fill(memory, b"\0", 1, stream)  # lets go of what is done
    device.synchronize_stream(stream)
    gc.collect()
    assert device.counts()["bytes"] == before


def test_what_cannot_be_launched(device, stream, memory):
    launcher = launcher_of("host")
    with pytest.raises(ArgumentTypeError, match="PTX"):
        launcher.launch(CompiledKernel("k", ""), 1, [], 0, stream)
    with pytest.raises(ArgumentTypeError, match="no compute capability"):
        launcher.compute_capability(0)
    assert launcher.multiprocessors(0) > 0
    assert "host" in LAUNCHERS
    assert PACK.name


def test_a_launch_that_fails_and_one_that_fails_later(device, gate, stream, memory):
    arrays = [buffer(memory, 4, stream)]
    device.faults.failing["launch"] = 1
    reduce_arrays("sum", arrays, arrays)
    with pytest.raises(BackendError, match="as a test has requested"):
        reduce_arrays("sum", arrays, arrays)
    reduce_arrays("sum", arrays, arrays)
    device.synchronize_stream(stream)
    floats(memory, 4)[:] = 1
    device.faults.failing["run"] = 0
    event = device.create_event()
    gate.hold(stream)
    reduce_arrays("sum", arrays, [*arrays, *arrays])  # no error here
    assert device.record_event(event, stream) == 0
    gate.open()
    while device.query_event(event) == device.not_ready:
        pass
    with pytest.raises(BackendError, match="a kernel has failed"):
        device.is_event_done(event)
    with pytest.raises(BackendError, match="a kernel has failed"):
        device.allocate(1)
    with pytest.raises(BackendError, match="a kernel has failed"):
        device.synchronize()
    assert floats(memory, 4).tolist() == [1] * 4  # it did not run
    device.reset_failure()
    device.destroy_event(event)


def test_a_delay_comes_before_the_work(device, stream, memory):
    device.faults.delays_ns["launch"] = 50_000_000
    reduce_arrays("sum", [buffer(memory, 4, stream)], [buffer(memory, 4, stream)])
    assert not device.is_stream_done(stream)
    device.synchronize_stream(stream)
