"""What is launched, on a GPU that runs nothing: grid, block, arguments, device, stream."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpucoll import devices
from gpucoll.arrays.buffer import Buffer
from gpucoll.devices.kernels import driver_launcher
from gpucoll.devices.kernels.images import Image
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.gpu import launch, pack, reduce
from gpucoll.kernels.gpu import quantise as kernel_quantise
from gpucoll.kernels.gpu.catalogue import all_kernels, group_of, groups
from gpucoll.kernels.gpu.launch import BLOCKS_PER_MULTIPROCESSOR
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.pack import cast, prepare_pack
from gpucoll.kernels.gpu.quantise import quantise
from gpucoll.kernels.gpu.reduce import prepare_reduce, reduce_arrays, ring_step
from gpucoll.kernels.gpu.source import MAX_RANKS, THREADS, TILE_BYTES, source_of
from gpucoll.types import ReduceOp

MULTIPROCESSORS = 132
STREAM = 0x5EED


class Double:
    """A GPU that launches nothing."""

    def __init__(self, kind: str, number: int, seen: SimpleNamespace) -> None:
        self.kind, self.number, self.label = kind, number, f"{kind}:{number}"
        self.target = "sm_90" if kind == "cuda" else "gfx942"
        self._seen = seen
        self._names: list[str] = []
        self._entered = 0

    def __enter__(self) -> Double:
        self._entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1

    def attribute(self, name: str) -> int:
        capability = {"compute_capability_major": 9, "compute_capability_minor": 0}
        return {"multiprocessor_count": MULTIPROCESSORS, **capability}[name]

    def driver_version(self) -> str:
        return "12.8"

    def load_module(self, image: bytes) -> int:
        self._seen.modules.append(image)
        return len(self._seen.modules)

    def function_of(self, module: int, name: str) -> int:
        self._names.append(name)
        return len(self._names)

    def launch(self, function, blocks, threads, arguments, stream):
        assert self._entered, "the device is not current"
        made = SimpleNamespace(name=self._names[function - 1], blocks=blocks, threads=threads)
        made.arguments, made.device, made.stream = arguments, self.number, stream
        self._seen.launches.append(made)


class Tables:
    """Their memory, which is nowhere."""

    def __init__(self, device: Any, seen: SimpleNamespace) -> None:
        self._seen = seen

    def upload(self, table: np.ndarray, stream: int) -> Any:
        self._seen.uploaded.append((table.copy(), stream))
        return SimpleNamespace(address=0xCAFE00)


@pytest.fixture(params=["cuda", "rocm"])
def gpu(request, monkeypatch):
    """What was launched on GPUs of a kind: ``launches``, ``modules``, ``uploaded``."""
    seen = SimpleNamespace(kind=request.param, launches=[], modules=[], uploaded=[])
    open_device = functools.cache(lambda kind, number: Double(kind, number, seen))
    monkeypatch.setattr(devices, "open_device", open_device)
    monkeypatch.setattr(driver_launcher, "TableMemory", lambda device: Tables(device, seen))

    def image_of(kernel, target, most_major):
        return Image((kernel,), f"{kernel.name} for {target}, {most_major}".encode(), "a compiler")

    monkeypatch.setattr(driver_launcher, "image_of", image_of)
    launch.launcher_of.cache_clear()
    yield seen
    launch.launcher_of.cache_clear()


def arguments_of(made: SimpleNamespace, layout: np.dtype[Any]) -> Any:
    """Return the one struct that a kernel was launched with."""
    (struct,) = made.arguments
    assert len(struct) == layout.itemsize
    return np.frombuffer(struct, layout)


def buffer(gpu, address: int, count: int, dtype="float32", number=1) -> Buffer:
    item_bytes = {"float32": 4, "uint8": 1, "complex64": 8, "bfloat16": 2, "int64": 8}[dtype]
    return Buffer(address, (count,), dtype, item_bytes, None, f"{gpu.kind}:{number}", STREAM)


def test_reduce(gpu):
    sources = [buffer(gpu, 0x1000 * (place + 1), 10_000) for place in range(3)]
    destination = buffer(gpu, 0x9000, 10_000)

    reduce_arrays(ReduceOp.scaled_sum(0.5), [destination], sources)

    (made,) = gpu.launches
    assert (made.name, made.threads) == ("reduce_scaled_sum_float32", THREADS)
    assert made.blocks == -(-40_000 // TILE_BYTES)
    assert (made.device, made.stream) == (1, STREAM)
    struct = arguments_of(made, reduce.ARGUMENTS)
    assert struct.itemsize == 8 + 8 + 4 + 4 + 2 * 8 * MAX_RANKS
    assert struct["count"] == 10_000
    assert struct["parameter"] == np.float32(0.5).view(np.uint32)
    assert (struct["n_sources"], struct["n_destinations"]) == (3, 1)
    assert list(struct["sources"][0][:4]) == [0x1000, 0x2000, 0x3000, 0]
    assert list(struct["destinations"][0][:2]) == [0x9000, 0]
    target = "sm_90" if gpu.kind == "cuda" else "gfx942"
    assert gpu.modules == [f"reduce_scaled_sum_float32 for {target}, 12".encode()]


def test_compiled_once_and_launched_again(gpu):
    x = buffer(gpu, 0x1000, 100)
    for _ in range(3):
        reduce_arrays("sum", [x], [x, x])
    assert len(gpu.launches) == 3
    assert len(gpu.modules) == 1
    reduce_arrays("sum", [buffer(gpu, 0x1000, 100, number=0)], [buffer(gpu, 0x1000, 100, number=0)])
    assert len(gpu.modules) == 2  # for another device
    assert gpu.launches[-1].device == 0


def test_a_grid_is_no_larger_than_the_device(gpu):
    x = buffer(gpu, 0x1000, 1 << 30, "int64")
    reduce_arrays("sum", [x], [x])
    assert gpu.launches[0].blocks == BLOCKS_PER_MULTIPROCESSOR * MULTIPROCESSORS


def test_complex_numbers_are_pairs(gpu):
    x = buffer(gpu, 0x1000, 50, "complex64")
    reduce_arrays("avg", [x], [x], divisor=4)
    reduce_arrays("prod", [x], [x])
    pairs, whole = gpu.launches
    assert (pairs.name, int(arguments_of(pairs, reduce.ARGUMENTS)["count"][0])) == (
        "reduce_avg_float32",
        100,
    )
    assert (whole.name, int(arguments_of(whole, reduce.ARGUMENTS)["count"][0])) == (
        "reduce_prod_complex64",
        50,
    )


def test_ring_step(gpu):
    received, mine, slot = (buffer(gpu, address, 7) for address in (0x100, 0x200, 0x300))
    ring_step("avg", [slot], received, mine, divisor=4)
    ring_step("avg", [mine, slot], received, mine, is_last=True, divisor=4)
    ring_step(ReduceOp.scaled_sum(3), [slot], received, mine, is_last=True)
    names = [each.name for each in gpu.launches]
    assert names == ["reduce_sum_float32", "reduce_avg_float32", "reduce_sum_float32"]
    first, last, _ = (arguments_of(each, reduce.ARGUMENTS) for each in gpu.launches)
    assert list(first["sources"][0][:2]) == list(last["sources"][0][:2]) == [0x100, 0x200]
    assert list(first["destinations"][0][:2]) == [0x300, 0]
    assert list(last["destinations"][0][:2]) == [0x200, 0x300]


def test_prepared_once_and_enqueued_on_any_stream(gpu):
    x, y = buffer(gpu, 0x1000, 9000), buffer(gpu, 0x9000, 9000)
    enqueue = prepare_reduce("avg", [x], [x, y], divisor=2)
    assert not gpu.launches
    enqueue(7)
    enqueue(8)
    first, second = gpu.launches
    assert (first.stream, second.stream) == (7, 8)
    assert first.arguments == second.arguments
    reduce_arrays("avg", [x], [x, y], divisor=2)
    assert gpu.launches[2].arguments == first.arguments
    assert gpu.launches[2].stream == STREAM
    with pytest.raises(ArgumentError, match="one dtype and count"):
        prepare_reduce("avg", [x], [buffer(gpu, 0x1000, 8999)])


def test_nothing_is_launched_for_nothing(gpu):
    empty = buffer(gpu, 0, 0)
    reduce_arrays("sum", [empty], [empty])
    prepare_reduce("sum", [empty], [empty])(STREAM)
    cast(empty, buffer(gpu, 0, 0, "bfloat16"))
    prepare_pack([], buffer(gpu, 0x1000, 0, "uint8"), [0])()
    quantise(empty, buffer(gpu, 0x1000, 0, "uint8"), "int8", blocks=0)
    assert not gpu.launches


def test_pack(gpu):
    arrays = [buffer(gpu, 0x1000, 5), buffer(gpu, 0x2000, 0), buffer(gpu, 0x3004, 9000)]
    whole = buffer(gpu, 0x10000, 36_064, "uint8")
    run = prepare_pack(arrays, whole, [0, 32, 32, 36_064], stream=77)
    assert len(gpu.uploaded) == 1
    run()
    run()
    assert len(gpu.uploaded) == 1
    rows = gpu.uploaded[0][0].view("u8").reshape(-1, 6).tolist()
    assert rows == [[0x1000, 0, 20, 0, 0, 12], [0x3004, 32, 36_000, 1, 0, 32]]
    first, _ = gpu.launches
    assert (first.name, first.blocks, first.stream) == ("copy_segments", 4, 77)
    struct = arguments_of(first, pack.ARGUMENTS)
    assert gpu.uploaded[0][1] == 77
    names = ("buffer", "table", "n_segments", "tiles", "share", "options")
    assert [int(struct[name][0]) for name in names] == [0x10000, 0xCAFE00, 2, 4, 1, 1]


def test_one_array_needs_no_table(gpu):
    cast(buffer(gpu, 0x1000, 9000), buffer(gpu, 0x2000, 9000, "bfloat16"), scale=2.0)
    (made,) = gpu.launches
    assert not gpu.uploaded
    struct = arguments_of(made, pack.ARGUMENTS)
    assert (made.name, made.blocks) == ("pack_bfloat16", 3)
    assert (int(struct["table"][0]), int(struct["options"][0])) == (0, 3)
    assert struct["scale"] == np.float32(2).view(np.uint32)
    assert struct["only"][0].tolist() == (0x1000, 0, 9000, 0, 0, 0)


def test_quantise(gpu):
    x, message = buffer(gpu, 0x1004, 1000), buffer(gpu, 0x2000, message_bytes(20), "uint8")
    quantise(x, message, "float8_e5m2", blocks=20, seed=-1, sequence=5, first_block=6)
    (made,) = gpu.launches
    assert (made.name, made.blocks) == ("quantise_float8_e5m2_stochastic", 3)
    struct = arguments_of(made, kernel_quantise.ARGUMENTS)
    assert struct["seed"] == (1 << 64) - 1
    assert [int(struct[name][0]) for name in ("array", "message", "count", "blocks")] == [
        0x1004,
        0x2000,
        1000,
        20,
    ]


def test_a_users_operation(gpu, monkeypatch):
    op = ReduceOp.custom(lambda a, b: a + b)
    x, y = buffer(gpu, 0x1000, 5000), buffer(gpu, 0x2002, 5000)
    asked = []

    def compile_nothing(*arguments):
        asked.append(arguments)
        return CompiledKernel("entry", "the PTX")

    monkeypatch.setattr("gpucoll.kernels.gpu.custom.custom_kernel", compile_nothing)
    if gpu.kind == "rocm":
        with pytest.raises(
            ArgumentTypeError, match="cannot run on AMD GPUs: Numba compiles for NVIDIA"
        ):
            reduce_arrays(op, [x], [x, y])
        return
    reduce_arrays(op, [x], [x, y])
    assert asked == [(op, "float32", 1, 2, False, (9, 0))]
    (made,) = gpu.launches
    words = [int.from_bytes(word, sys.byteorder) for word in made.arguments]
    assert (made.name, words) == ("entry", [5000, 0x1000, 0x1000, 0x2002])
    assert [len(word) for word in made.arguments] == [8] * 4
    assert (made.blocks, made.threads, made.stream) == (2, THREADS, STREAM)
    assert gpu.modules == [b"the PTX"]


def test_arrays_of_two_devices_are_refused(gpu):
    x, y = buffer(gpu, 0x1000, 5), buffer(gpu, 0x2000, 5, number=3)
    with pytest.raises(ArgumentError, match=f"one device; they are on {gpu.kind}:1, {gpu.kind}:3"):
        reduce_arrays("sum", [x], [y])


def test_host_arrays_are_refused():
    x = np.zeros(3)
    with pytest.raises(ArgumentTypeError, match="arrays of a GPU; got one on cpu"):
        reduce_arrays("sum", [x], [x])


def test_sources_include_nothing():
    names = [kernel.name for kernel in all_kernels()]
    assert len(set(names)) == len(names)
    assert [kernel for group in groups() for kernel in group] == list(all_kernels())
    assert all(len({kernel.file for kernel in group}) == 1 for group in groups())
    assert all(kernel in group_of(kernel) for kernel in all_kernels())
    for kernel in all_kernels():
        text = source_of([kernel])
        assert '#include "' not in text
        assert text.count("#ifndef GPUCOLL_PORTABLE_H") == 1
        assert text.rstrip().endswith(kernel.definition)
