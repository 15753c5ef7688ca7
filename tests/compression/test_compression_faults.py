"""Compressed all_reduce: bad input, ranks that differ, are late, or are interrupted."""

from __future__ import annotations

import contextlib
import re
import time
from typing import ClassVar
from unittest import mock

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests.waiting import is_broken, until

import gpucoll
from gpucoll import Compression, config
from gpucoll.calls.compressed_exchange import CompressedExchange
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    DeadlineError,
    MismatchError,
    StateError,
)

# --- bad input ----------------------------------------------------------------------------


def ones(*shape, dtype="float32"):
    return np.ones(shape or (4,), dtype)


def bad_rows():
    shared, gapped = ones(8), ones(8)[::2]
    fixed = ones()
    fixed.flags.writeable = False
    plain = {"compression": "int8_block"}
    usage, kind = ArgumentError, ArgumentTypeError
    yield "unknown", ones(), {"compression": "int4"}, usage, "compression must be one of float16,"
    yield "no name", ones(), {"compression": 8}, kind, "compression must be one of"
    yield "dtype float64", ones(dtype="f8"), plain, kind, "convert it to float32 first"
    yield "integers", ones(dtype="i4"), plain, kind, "got int32"
    yield "complex", ones(dtype="c8"), plain, kind, "got complex64"
    for half in ("float16", "bfloat16"):
        for name in ("float16", "bfloat16"):
            yield f"{half} as {name}", ones(dtype=half), {"compression": name}, kind, f"got {half}"
    for op in ("max", "prod", "land"):
        yield op, ones(), {"op": op, **plain}, kind, f"op must be sum or avg; got {op}"
    scaled = gpucoll.ReduceOp.scaled_sum(2)
    yield "scaled_sum", ones(), {"op": scaled, **plain}, kind, "op must be sum or avg"
    yield "op unknown", ones(), {"op": "add", **plain}, usage, "got 'add'"
    yield "residual alone", ones(), {"residual": ones()}, kind, "residual needs compression"
    for label, residual, error, text in (
        ("dtype", ones(dtype="f8"), kind, "residual must be a float32 array on the host"),
        ("size", ones(5), usage, "residual has 5 elements"),
        ("strides", gapped, usage, "residual must be C-contiguous"),
        ("read-only", fixed, usage, "read-only"),
        ("number", 0.0, kind, "residual must be a"),
        ("list", [ones()], kind, "residual must be a"),
    ):
        yield f"residual {label}", ones(), {"residual": residual, **plain}, error, text
    yield "residual is x", shared, {"residual": shared, **plain}, usage, "residual shares memory"
    out = ones()
    given = {"residual": out, "out": out, **plain}
    yield "residual is out", ones(), given, usage, "residual shares memory"
    yield "one residual of two", [ones()] * 1, {"residual": ones(), **plain}, kind, "list of 1"
    yield "out too small", ones(), {"out": ones(3), **plain}, usage, "4 elements"
    yield "out overlaps", shared[:4], {"out": shared[1:5], **plain}, usage, "out overlaps x"
    yield "one dtype of a list", [ones(), ones(dtype="i8")], plain, kind, "got int64"


@pytest.mark.ranks(1)
def test_bad_input(comm):
    for label, x, given, error, text in bad_rows():
        try:
            comm.all_reduce(x, **given)
        except error as caught:
            assert text in str(caught), label  # noqa: PT017  (pytest.raises would not say which)
        else:
            raise AssertionError(label)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("int8",), ArgumentError, "got 'int8'"),
        (("float16", 1), ArgumentError, "takes no seed"),
        (("int8_block", -1), ArgumentError, "0..2**64-1; got -1"),
        (("int8_block", 1 << 64), ArgumentError, "0..2**64-1"),
        (("int8_block", 1.5), ArgumentTypeError, "must be an int; got 1.5"),
        (("int8_block", True), ArgumentTypeError, "must be an int"),
    ],
)
def test_bad_compressions(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Compression(*given)


def differ(comm, odd, usual):
    out, residual = np.full(1000, 7, np.float32), np.full(1000, 0.5, np.float32)
    x = np.ones(1000, np.float32)
    call = odd if comm.rank == 1 else usual
    with pytest.raises(MismatchError) as caught:
        call(comm, x, out, residual)
    assert (out == 7).all()
    assert (residual == 0.5).all()
    return str(caught.value), comm.all_reduce(1)


def compressed(name="int8_block", op="sum", shape=(1000,)):
    def call(comm, x, out, residual):
        like = x.reshape(shape)
        comm.all_reduce(like, op, out=out, compression=name, residual=residual)

    return call


DIFFERENCES = {
    "compression": (compressed("float8_block"), "compression=float8_block"),
    "message size too": (compressed("float16"), "compression=float16"),
    "op": (compressed(op="avg"), "op=avg"),
    "shape": (compressed(shape=(10, 100)), "shape (10, 100)"),
    "none": (lambda comm, x, out, residual: comm.all_reduce(x, out=out), "shape (1000,))"),
    "a list": (
        lambda comm, x, out, residual: comm.all_reduce([x[1:], x[:1]], compression="int8_block"),
        "compression=int8_block",
    ),
    "all_to_all": (
        lambda comm, x, out, residual: comm.all_to_all(np.zeros(3 * 528, np.uint8)),
        "all_to_all(uint8",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_told_and_nothing_is_written(ranks, name):
    odd, text = DIFFERENCES[name]
    for message, total in ranks.call(3, differ, odd, compressed()):
        assert total == 3
        assert re.search(rf"rank 1 called [^;]*{re.escape(text)}", message), message
        usual = "all_reduce(op=sum, float32, shape (1000,), compression=int8_block)"
        assert f"ranks 0, 2 called {usual}" in message


def come_late(comm):
    if comm.rank == 1:
        comm.recv(np.empty(1), 0, timeout_s=20)
    else:
        comm.all_reduce(np.ones(10, np.float32), compression="int8_block", timeout_s=0.2)


def test_the_deadline_is_the_whole_calls(ranks):
    replies = ranks.replies(2, come_late)

    assert {type(reply.error) for reply in replies} == {DeadlineError}
    assert "all_reduce(op=sum, float32, shape (10,), compression=int8_block)" in str(
        replies[0].error
    )


def late_between(comm):
    """Rank 1 has all messages, and goes on when the others have given up."""
    if comm.rank == 1:
        reduce = CompressedExchange._add_up

        def wait_and_reduce(self):
            until(lambda: is_broken(comm))
            reduce(self)

        with mock.patch.object(CompressedExchange, "_add_up", wait_and_reduce):
            comm.all_reduce(np.ones(10, np.float32), compression="int8_block")
    comm.all_reduce(np.ones(10, np.float32), compression="int8_block", timeout_s=0.3)


def test_the_second_exchange_keeps_the_deadline(ranks):
    start = time.monotonic()
    replies = ranks.replies(2, late_between)

    assert time.monotonic() - start < 10  # the communicator's own is 20 s
    assert {type(reply.error) for reply in replies} == {DeadlineError}
    assert "all_reduce(op=sum, float32, shape (10,), compression=int8_block)" in str(
        replies[0].error
    )


def interrupted_between(comm):
    """Rank 1 is interrupted when it has all messages, and the others wait for its share."""
    effect = KeyboardInterrupt if comm.rank == 1 else None
    with mock.patch.object(CompressedExchange, "_add_up", side_effect=effect):
        comm.all_reduce(np.ones(10, np.float32), compression="int8_block")


def test_ctrl_c_between_the_exchanges_ends_all_ranks(ranks):
    first, second, third = ranks.replies(3, interrupted_between)

    assert isinstance(second.error, KeyboardInterrupt)
    for reply in (first, third):
        assert isinstance(reply.error, AbortedError)
        assert "rank 1 was interrupted in all_reduce(op=sum, float32" in str(reply.error)
    assert ranks.call(3, lambda comm: comm.all_reduce(1)) == [3] * 3


def closed(comm):
    comm.close()
    with pytest.raises(StateError, match="is closed"):
        comm.all_reduce(np.ones(10, np.float32), compression="int8_block")


def test_after_close(ranks):
    ranks.call(2, closed)


class OnGpu:
    """What an array of a library unknown to us says of itself."""

    __cuda_array_interface__: ClassVar = {
        "shape": (4,),
        "typestr": "<f4",
        "data": (1 << 40, False),
        "version": 3,
    }


@pytest.mark.ranks(1)
def test_gpu_arrays_need_a_backend_as_without_compression(comm):
    x = OnGpu()
    for given, out in ((x, x), ([x], [x])):
        with pytest.raises(BackendUnavailableError, match=r"x lies on cuda.* no GPU"):
            comm.all_reduce(given, out=out, compression="int8_block")


def without_room(comm):
    """Messages that find no room in the arena travel as other arrays do."""
    x = np.arange(100_000, dtype=np.float32)
    kept = []
    for size_bytes in (1 << 20, 1 << 16, 1 << 12):
        with contextlib.suppress(MemoryError):
            while True:
                kept.append(comm.empty(size_bytes, "uint8"))
    return comm.all_reduce(x, compression="int8_block")[-1]


def test_a_full_arena(ranks):
    got = ranks.call(2, without_room, environment={config.ARENA_BYTES: str(1 << 20)})

    assert got == pytest.approx([2 * 99_999] * 2, rel=1 / 126)
