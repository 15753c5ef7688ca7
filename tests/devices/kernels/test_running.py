"""Kernels through the whole way: compiled, kept, loaded, launched on a stream; against references.

As host code, by doubles of the compiler and the driver: nothing here has run on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.devices.kernels.memory import Memory
from tests.dtypes import any_values, assert_same
from tests.guarded import POISON

from gpucoll.kernels import reference, reference_compression
from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.gpu.pack import cast, prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.quantise import dequantise, quantise, requantise
from gpucoll.kernels.gpu.reduce import reduce_arrays, ring_step


def reduced(device, control, dtype, op, n_sources):
    with Memory(device) as memory:
        inputs = [any_values(dtype, 10_007, seed) for seed in range(n_sources)]
        sources = [memory.array(x, 8) for x in inputs]
        outputs = [memory.empty(10_007, dtype, 8) for _ in range(2)]
        with control.held():
            reduce_arrays(op, [x.buffer for x in outputs], [x.buffer for x in sources], divisor=3)
            before = outputs[0].now().tobytes()
        memory.wait()
        assert before != outputs[0].now().tobytes()
        expected = reference.reduce(op, inputs, 3)
        for output in outputs:
            assert_same(output.read(), expected, f"{dtype} {op}")
        for source, x in zip(sources, inputs, strict=True):
            assert_same(source.read(), x)


@pytest.mark.parametrize(
    ("dtype", "op", "n_sources"),
    [
        ("float32", "sum", 2),
        ("bfloat16", "sum", 5),
        ("int16", "max", 3),
        ("uint8", "bxor", 2),
        ("float64", "avg", 3),
        ("float8_e4m3fn", "prod", 16),
    ],
)
def test_reduce(on_device, dtype, op, n_sources):
    on_device(reduced, dtype, op, n_sources)


def ring(device, control):
    received, mine = any_values("float16", 5000, 1), any_values("float16", 5000, 2)
    with Memory(device) as memory:
        given = [memory.array(received), memory.array(mine)]
        made = [memory.empty(5000, "float16") for _ in range(2)]
        ring_step("sum", [x.buffer for x in made], *(x.buffer for x in given))
        memory.wait()
        for x in made:
            assert_same(x.read(), reference.reduce("sum", [received, mine]))


def test_ring_step(on_device):
    on_device(ring)


def packed(device, control, dtype, scale):
    names = ("float32", "float16", "bfloat16") if dtype else ("int8", "float64", "bool", "uint16")
    counts = (0, 1, 3, 4097, 20_000, 17, 250, 1)
    inputs = [any_values(names[i % len(names)], count, i) for i, count in enumerate(counts)]
    held = [x if dtype is None else reference_compression.convert(x, dtype, scale) for x in inputs]
    offsets = reference_compression.layout([x.nbytes for x in held])
    with Memory(device) as memory:
        arrays = [memory.array(x, x.dtype.itemsize) for x in inputs]
        outputs = [memory.empty(x.size, x.dtype.name) for x in inputs]
        buffer = memory.empty(offsets[-1], "uint8")
        options = {"dtype": dtype, "scale": scale}
        with control.held():  # the tables, too, come in the stream's order
            pack = prepare_pack([x.buffer for x in arrays], buffer.buffer, offsets, **options)
            pack()
            unpack = prepare_unpack(
                [x.buffer for x in outputs], buffer.buffer, offsets, dtype=dtype
            )
            unpack()
        memory.wait()
        content = buffer.read()
        for x, output, start, end in zip(held, outputs, offsets[:-1], offsets[1:], strict=True):
            assert_same(content[start : start + x.nbytes].view(x.dtype), x)
            assert not content[start + x.nbytes : end].any()
            back = output.read()
            expected = x if dtype is None else reference_compression.convert(x, back.dtype.name)
            assert_same(back, expected)


@pytest.mark.parametrize(("dtype", "scale"), [(None, None), ("bfloat16", None), ("float16", 0.5)])
def test_pack(on_device, dtype, scale):
    on_device(packed, dtype, scale)


def casts(device, control):
    x = any_values("float32", 9000, 3)
    with Memory(device) as memory:
        given, made = memory.array(x), memory.empty(x.size, "float8_e5m2")
        cast(given.buffer, made.buffer)
        memory.wait()
        with np.errstate(over="ignore", invalid="ignore"):
            assert_same(made.read(), reference_compression.convert(x, "float8_e5m2"))


def test_cast(on_device):
    on_device(casts)


def quantised(device, control, block_format, seed):
    blocks = 20
    x = np.random.default_rng(4).normal(0, 3, 5000).astype(np.float32)
    options = {"seed": seed, "sequence": 9, "first_block": 5}
    message = reference_compression.quantise(x, block_format, blocks, **options)
    total = reference_compression.dequantise_reduce([message] * 2, block_format, blocks, x.size, 2)
    padded = np.zeros(256 * blocks, np.float32)
    padded[: x.size] = total
    again = reference_compression.quantise(padded, block_format, blocks, **options)
    with Memory(device) as memory:
        size_bytes = message_bytes(blocks)
        given, made = memory.array(x), memory.empty(size_bytes, "uint8")
        two, back = memory.array(np.concatenate([message] * 2)), memory.empty(x.size, "float32")
        result = memory.empty(size_bytes, "uint8")
        of = {"blocks": blocks, "sources": 2, "divisor": 2}
        quantise(given.buffer, made.buffer, block_format, blocks=blocks, **options)
        dequantise(two.buffer, back.buffer, block_format, **of)
        requantise(two.buffer, result.buffer, block_format, **of, **options)
        memory.wait()
        assert_same(made.read(), message)
        assert_same(back.read(), total)
        assert_same(result.read(), again)


@pytest.mark.parametrize(("block_format", "seed"), [("int8", None), ("float8_e4m3fn", 1 << 40)])
def test_quantise(on_device, block_format, seed):
    on_device(quantised, block_format, seed)


def captured(device, control):
    """Kernels are compiled, and a table is copied, while a graph is captured."""
    counts = (100, 5000, 3)
    offsets = reference_compression.layout([4 * count for count in counts])
    with Memory(device) as memory:
        arrays = [memory.array(any_values("float32", n, n)) for n in counts]
        buffer = memory.empty(offsets[-1], "uint8")
        whole = [memory.empty(offsets[-1] // 4, "float32") for _ in range(2)]
        buffer_of_floats = memory.array(np.zeros(offsets[-1] // 4, np.float32))
        with device, control.captured(memory.stream) as graph:
            pack = prepare_pack([x.buffer for x in arrays], buffer.buffer, offsets)
            pack()
            cast(buffer_of_floats.buffer, whole[0].buffer)
            reduce_arrays("sum", [whole[1].buffer], [buffer_of_floats.buffer] * 2)
        assert graph.code == 0
        assert (buffer.now() == POISON).all()
        others = [
            prepare_pack([x.buffer for x in arrays[:2]], buffer.buffer, [0, 400, 20_400])
            for _ in range(3)
        ]
        for _ in range(2):
            graph.launch(memory.stream)
        memory.wait()
        content = buffer.read()
        for x, start in zip(arrays, offsets, strict=False):
            expected = x.read()
            assert_same(content[start : start + expected.nbytes].view("f4"), expected)
        assert not whole[1].read().any()
        del others
        graph.close()


def test_captured(on_device):
    on_device(captured)
