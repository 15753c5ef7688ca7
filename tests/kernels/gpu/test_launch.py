"""What is launched, by a double of CuPy: grid, block, arguments, device, stream."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels import gpu
from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.gpu import launch
from gpucoll.kernels.gpu.launch import BLOCKS_PER_MULTIPROCESSOR
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.pack import cast, prepare_pack
from gpucoll.kernels.gpu.quantise import quantise
from gpucoll.kernels.gpu.reduce import reduce_arrays, ring_step
from gpucoll.kernels.gpu.source import MAX_RANKS, THREADS, TILE_BYTES, source_of
from gpucoll.types import ReduceOp

MULTIPROCESSORS = 132
STREAM = 0x5EED


class Double:
    """A CuPy that launches nothing."""

    def __init__(self, is_hip: bool) -> None:
        self.launches: list[SimpleNamespace] = []
        self.modules: list[SimpleNamespace] = []
        self.uploaded: list[np.ndarray] = []
        self.device, self.stream = 0, 0
        module: Any = ModuleType("cupy")
        module.RawModule = self._raw_module
        module.asarray = self._asarray
        stream = SimpleNamespace(null=self._current("stream", 0))
        module.cuda = SimpleNamespace(
            Device=self._device,
            ExternalStream=lambda address, number: self._current("stream", address),
            Stream=stream,
            runtime=SimpleNamespace(is_hip=is_hip),
        )
        self.module = module

    def _device(self, number: int) -> Any:
        current: Any = self._current("device", number)
        current.attributes = {"MultiProcessorCount": MULTIPROCESSORS}
        current.compute_capability = "90"
        return current

    def _current(self, name: str, value: int) -> Any:
        @contextlib.contextmanager
        def use():
            before = getattr(self, name)
            setattr(self, name, value)
            yield
            setattr(self, name, before)

        class Current:
            def __enter__(self):
                self.entered = use()
                return self.entered.__enter__()

            def __exit__(self, *error):
                return self.entered.__exit__(*error)

        return Current()

    def _raw_module(self, code=None, path=None, options=()):
        text = code if path is None else Path(path).read_text()
        self.modules.append(SimpleNamespace(text=text, options=options))
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        def run(grid, block, arguments):
            self.launches.append(
                SimpleNamespace(
                    name=name,
                    blocks=grid[0],
                    threads=block[0],
                    arguments=arguments,
                    device=self.device,
                    stream=self.stream,
                )
            )

        run.compile = lambda: None  # type: ignore[attr-defined]
        return run

    def _asarray(self, table: np.ndarray) -> Any:
        self.uploaded.append(table.copy())
        return SimpleNamespace(data=SimpleNamespace(ptr=0xCAFE00))


@pytest.fixture(params=["cuda", "rocm"])
def cupy(request, monkeypatch):
    double = Double(request.param == "rocm")
    monkeypatch.setitem(sys.modules, "cupy", double.module)
    monkeypatch.delitem(sys.modules, "gpucoll.kernels.gpu.cupy_launcher", raising=False)
    launch.launcher_of.cache_clear()
    yield SimpleNamespace(kind=request.param, double=double)
    launch.launcher_of.cache_clear()
    sys.modules.pop("gpucoll.kernels.gpu.cupy_launcher", None)
    if hasattr(gpu, "cupy_launcher"):
        del gpu.cupy_launcher


def buffer(cupy, address: int, count: int, dtype="float32", number=1) -> Buffer:
    item_bytes = {"float32": 4, "uint8": 1, "complex64": 8, "bfloat16": 2, "int64": 8}[dtype]
    return Buffer(address, (count,), dtype, item_bytes, None, f"{cupy.kind}:{number}", STREAM)


def test_reduce(cupy):
    sources = [buffer(cupy, 0x1000 * (place + 1), 10_000) for place in range(3)]
    destination = buffer(cupy, 0x9000, 10_000)

    reduce_arrays(ReduceOp.scaled_sum(0.5), [destination], sources)

    (made,) = cupy.double.launches
    assert (made.name, made.threads) == ("reduce_scaled_sum_float32", THREADS)
    assert made.blocks == -(-40_000 // TILE_BYTES)
    assert (made.device, made.stream) == (1, STREAM)
    (struct,) = made.arguments
    assert struct.size == 1  # CuPy passes such an array by value
    assert struct.itemsize == 8 + 8 + 4 + 4 + 2 * 8 * MAX_RANKS
    assert struct["count"] == 10_000
    assert struct["parameter"] == np.float32(0.5).view(np.uint32)
    assert (struct["n_sources"], struct["n_destinations"]) == (3, 1)
    assert list(struct["sources"][0][:4]) == [0x1000, 0x2000, 0x3000, 0]
    assert list(struct["destinations"][0][:2]) == [0x9000, 0]
    (module,) = cupy.double.modules
    assert "-std=c++17" in module.options
    assert ("--fmad=false" if cupy.kind == "cuda" else "-ffp-contract=off") in module.options


def test_compiled_once_and_launched_again(cupy):
    x = buffer(cupy, 0x1000, 100)
    for _ in range(3):
        reduce_arrays("sum", [x], [x, x])
    assert len(cupy.double.launches) == 3
    assert len(cupy.double.modules) == 1
    reduce_arrays(
        "sum", [buffer(cupy, 0x1000, 100, number=0)], [buffer(cupy, 0x1000, 100, number=0)]
    )
    assert len(cupy.double.modules) == 2  # for another device
    assert cupy.double.launches[-1].device == 0


def test_a_grid_is_no_larger_than_the_device(cupy):
    x = buffer(cupy, 0x1000, 1 << 30, "int64")
    reduce_arrays("sum", [x], [x])
    assert cupy.double.launches[0].blocks == BLOCKS_PER_MULTIPROCESSOR * MULTIPROCESSORS


def test_complex_numbers_are_pairs(cupy):
    x = buffer(cupy, 0x1000, 50, "complex64")
    reduce_arrays("avg", [x], [x], divisor=4)
    reduce_arrays("prod", [x], [x])
    pairs, whole = cupy.double.launches
    assert (pairs.name, int(pairs.arguments[0]["count"][0])) == ("reduce_avg_float32", 100)
    assert (whole.name, int(whole.arguments[0]["count"][0])) == ("reduce_prod_complex64", 50)


def test_ring_step(cupy):
    received, mine, slot = (buffer(cupy, address, 7) for address in (0x100, 0x200, 0x300))
    ring_step("sum", received, mine, slot)
    ring_step("avg", received, mine, None, divisor=4)
    first, last = (each.arguments[0] for each in cupy.double.launches)
    assert list(first["sources"][0][:2]) == list(last["sources"][0][:2]) == [0x100, 0x200]
    assert list(first["destinations"][0][:2]) == [0x200, 0x300]
    assert list(last["destinations"][0][:2]) == [0x200, 0]


def test_nothing_is_launched_for_nothing(cupy):
    empty = buffer(cupy, 0, 0)
    reduce_arrays("sum", [empty], [empty])
    cast(empty, buffer(cupy, 0, 0, "bfloat16"))
    prepare_pack([], buffer(cupy, 0x1000, 0, "uint8"), [0])()
    quantise(empty, buffer(cupy, 0x1000, 0, "uint8"), "int8", blocks=0)
    assert not cupy.double.launches


def test_pack(cupy):
    arrays = [buffer(cupy, 0x1000, 5), buffer(cupy, 0x2000, 0), buffer(cupy, 0x3004, 9000)]
    whole = buffer(cupy, 0x10000, 36_064, "uint8")
    run = prepare_pack(arrays, whole, [0, 32, 32, 36_064], stream=77)
    assert len(cupy.double.uploaded) == 1
    run()
    run()
    assert len(cupy.double.uploaded) == 1
    rows = cupy.double.uploaded[0].reshape(-1, 6).tolist()
    assert rows == [[0x1000, 0, 20, 0, 0, 12], [0x3004, 32, 36_000, 1, 0, 32]]
    first, _ = cupy.double.launches
    assert (first.name, first.blocks, first.stream) == ("copy_segments", 4, 77)
    struct = first.arguments[0]
    names = ("buffer", "table", "n_segments", "tiles", "share", "options")
    assert [int(struct[name][0]) for name in names] == [0x10000, 0xCAFE00, 2, 4, 1, 1]


def test_one_array_needs_no_table(cupy):
    cast(buffer(cupy, 0x1000, 9000), buffer(cupy, 0x2000, 9000, "bfloat16"), scale=2.0)
    (made,) = cupy.double.launches
    assert not cupy.double.uploaded
    struct = made.arguments[0]
    assert (made.name, made.blocks) == ("pack_bfloat16", 3)
    assert (int(struct["table"][0]), int(struct["options"][0])) == (0, 3)
    assert struct["scale"] == np.float32(2).view(np.uint32)
    assert struct["only"][0].tolist() == (0x1000, 0, 9000, 0, 0, 0)


def test_quantise(cupy):
    x, message = buffer(cupy, 0x1004, 1000), buffer(cupy, 0x2000, message_bytes(20), "uint8")
    quantise(x, message, "float8_e5m2", blocks=20, seed=-1, sequence=5, first_block=6)
    (made,) = cupy.double.launches
    assert (made.name, made.blocks) == ("quantise_float8_e5m2_stochastic", 3)
    struct = made.arguments[0]
    assert struct["seed"] == (1 << 64) - 1
    assert [int(struct[name][0]) for name in ("array", "message", "count", "blocks")] == [
        0x1004,
        0x2000,
        1000,
        20,
    ]


def test_a_users_operation(cupy, monkeypatch):
    op = ReduceOp.custom(lambda a, b: a + b)
    x, y = buffer(cupy, 0x1000, 5000), buffer(cupy, 0x2002, 5000)
    asked = []

    def compile_nothing(*arguments):
        asked.append(arguments)
        return CompiledKernel("entry", "the PTX")

    monkeypatch.setattr("gpucoll.kernels.gpu.custom.custom_kernel", compile_nothing)
    if cupy.kind == "rocm":
        with pytest.raises(
            ArgumentTypeError, match="cannot run on AMD GPUs: Numba compiles for NVIDIA"
        ):
            reduce_arrays(op, [x], [x, y])
        return
    reduce_arrays(op, [x], [x, y])
    assert asked == [(op, "float32", 1, 2, False, (9, 0))]
    (made,) = cupy.double.launches
    assert (made.name, made.arguments) == ("entry", (5000, 0x1000, 0x1000, 0x2002))
    assert (made.blocks, made.threads, made.stream) == (2, THREADS, STREAM)
    assert cupy.double.modules[0].text == "the PTX"


def test_arrays_of_two_devices_are_refused(cupy):
    x, y = buffer(cupy, 0x1000, 5), buffer(cupy, 0x2000, 5, number=3)
    with pytest.raises(
        ArgumentError, match=f"one device; they are on {cupy.kind}:1, {cupy.kind}:3"
    ):
        reduce_arrays("sum", [x], [y])


def test_host_arrays_are_refused():
    x = np.zeros(3)
    with pytest.raises(ArgumentTypeError, match="arrays of a GPU; got one on cpu"):
        reduce_arrays("sum", [x], [x])


def test_sources_include_nothing():
    from tests.kernels.gpu.host import all_kernels

    names = [kernel.name for kernel in all_kernels()]
    assert len(set(names)) == len(names)
    for kernel in all_kernels():
        text = source_of([kernel])
        assert '#include "' not in text
        assert text.count("#ifndef GPUCOLL_PORTABLE_H") == 1
        assert text.rstrip().endswith(kernel.definition)
