"""Schedules over connections: what comes out, whatever is in whose way."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
import pytest
from tests.transport.tcp import schedules
from tests.transport.tcp.schedules import each, row
from tests.transport.tcp.stream_ends import (
    HEADER,
    HEADER_SENT,
    SMALL,
    Ends,
    combined_as,
    modelled,
    reduction,
)

from gpucoll.transport.tcp.streams import Outcome, StreamStatus

KIB = 1024
SIZES = [0, 1, 2, 3, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 5 << 20]
"""Counts of items of 4 bytes: none, fewer than ends, around the scratch memory, and 20 MiB."""


def inputs(dtype: str, count: int, size: int) -> list[np.ndarray]:
    """Return arrays whose sums are exact."""
    rng = np.random.default_rng(count + size)
    low = 0 if dtype.startswith("uint") else -2
    return [rng.integers(low, 3, count).astype(dtype) for _ in range(size)]


def noise(count: int, size: int) -> list[np.ndarray]:
    """Return float32 whose sums depend on their order."""
    rng = np.random.default_rng(count * 31 + size)
    return [rng.standard_normal(count).astype(np.float32) for _ in range(size)]


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("count", SIZES)
def test_ring(size, count):
    arrays = noise(count, size)
    rows = each(schedules.ring_all_reduce, size, count, 4)
    expected = modelled(rows, arrays, combined_as("float32", np.add))
    with Ends(size, "tcp") as ends:
        ends.complete(rows, arrays, reduction=reduction("float32"))
    for array in arrays:
        assert array.tobytes() == expected[0].tobytes()


@pytest.mark.soak(quick=5)
@pytest.mark.parametrize("schedule", ["recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", SIZES)
def test_in_place_with_partners(schedule, size, count):
    arrays = noise(count, size)
    rows = each(getattr(schedules, schedule), size, count, 4)
    expected = modelled(rows, arrays, combined_as("float32", np.add))
    with Ends(size, "tcp") as ends:
        ends.complete(rows, arrays, reduction=reduction("float32"))
    for array in arrays:
        assert array.tobytes() == expected[0].tobytes()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("dtype", ["int8", "uint16", "bfloat16", "float32", "int64", "complex128"])
@pytest.mark.parametrize("count", [1, 2, 5, 1001, 5003])
def test_items_that_are_split(dtype, count):
    size = 3
    arrays = inputs(dtype, count, size)
    expected = sum(array.astype(np.complex128) for array in arrays)
    item_bytes = np.dtype(dtype).itemsize
    rows = each(schedules.ring_all_reduce, size, count, item_bytes)
    with Ends(size, "tcp", SMALL) as ends:
        ends.complete(rows, arrays, reduction=reduction(dtype))
    for array in arrays:
        np.testing.assert_array_equal(array.astype(np.complex128), expected)


def test_each_byte_by_itself():
    """Whatever recv returns: here a byte, with the header split, too."""
    arrays = noise(9, 2)
    sent = noise(9, 3)[0]
    expected = arrays[0] + sent
    with Ends(2) as ends:
        streams, peer = ends.streams[0], ends.sockets[1][0]
        rows = ends.rows(0, [row(0, receive=(1, 0, 36), reduces=1)])
        how, address = reduction("float32"), arrays[0].ctypes.data
        streams.begin(rows, address, 36, HEADER, reduction=how, slice_ns=1)
        for byte in HEADER_SENT + sent.tobytes():
            assert streams.proceed() == Outcome(StreamStatus.AGAIN)
            peer.send(bytes([byte]))
        outcome = streams.proceed()
        while outcome.status == StreamStatus.AGAIN:
            outcome = streams.proceed()
    assert outcome == Outcome(StreamStatus.DONE)
    assert arrays[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("block_bytes", [0, 1, 8, 300_001])
def test_bruck(size, block_bytes):
    rng = np.random.default_rng(size)
    blocks = [rng.integers(0, 256, block_bytes, np.uint8) for _ in range(size)]
    arrays = [np.zeros(size * block_bytes, np.uint8) for _ in range(size)]
    for array, block in zip(arrays, blocks, strict=True):
        array[:block_bytes] = block
    with Ends(size, "tcp", SMALL if block_bytes < 10 else 0) as ends:
        ends.complete(each(schedules.bruck_all_gather, size, block_bytes), arrays)
    for rank, array in enumerate(arrays):
        expected = [blocks[(rank + place) % size] for place in range(size)]
        np.testing.assert_array_equal(array, np.concatenate(expected))


@pytest.mark.parametrize("size_bytes", [0, 1, 65_537, 20 << 20])
@pytest.mark.parametrize("n_pieces", [1, 7])
@pytest.mark.parametrize("forwards", [0, 1])
def test_chain(size_bytes, n_pieces, forwards):
    size = 4
    arrays = [np.zeros(size_bytes, np.uint8) for _ in range(size)]
    arrays[0][:] = expected = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    rows = each(schedules.chain_broadcast, size, size_bytes, n_pieces, forwards)
    with Ends(size, "tcp") as ends:
        ends.complete(rows, arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_what_forwards_may_stand_in_the_same_step():
    size_bytes = 3 << 20
    arrays = [np.full(size_bytes, rank, np.uint8) for rank in range(3)]
    there = (0, size_bytes)
    rows = [
        [row(0, (1, *there))],
        [row(0, receive=(0, *there)), row(0, (2, *there), forwards=1)],
        [row(0, receive=(1, *there))],
    ]
    with Ends(3, "tcp") as ends:
        ends.complete(rows, arrays)
    assert not np.any(arrays)


def test_bytes_of_later_rows_and_calls_are_left_in_the_connection():
    """One end is two calls ahead of the other."""
    array = np.arange(100, dtype=np.uint8)
    taken = np.zeros(100, np.uint8)
    with Ends(2, "tcp") as ends:
        sends = [row(0, (1, 0, 10)), row(0, (1, 10, 90))]
        receives = [row(0, receive=(0, 0, 10)), row(0, receive=(0, 10, 90))]
        for call in range(3):
            assert ends.run_one(0, sends, array, header=(0, call, 0)).status == StreamStatus.DONE
        for call in range(3):
            taken[:] = 0
            outcome = ends.run_one(1, receives, taken, header=(0, call, 0))
            assert outcome.status == StreamStatus.DONE
            np.testing.assert_array_equal(taken, array)


def test_a_header_in_pieces_with_more_behind_it():
    array = np.zeros(10, np.uint8)
    with Ends(2) as ends:
        peer, streams = ends.sockets[1][0], ends.streams[0]
        rows = ends.rows(0, [row(0, receive=(1, 0, 10))])
        streams.begin(rows, array.ctypes.data, 10, HEADER, slice_ns=0)
        peer.send(HEADER_SENT[:20])
        assert streams.proceed().status == StreamStatus.AGAIN
        peer.send(HEADER_SENT[20:] + b"\1" * 10 + b"next")
        outcome = streams.proceed()
        while outcome.status == StreamStatus.AGAIN:
            outcome = streams.proceed()
        assert outcome.status == StreamStatus.DONE
        assert ends.sockets[0][1].recv(100) == b"next"
    assert array.tolist() == [1] * 10


def test_what_forwards_does_not_wait_for_all_of_it():
    """The first end has sent half, and the last end has that: the one between passes it on."""
    size_bytes = 1 << 20
    array = np.zeros(size_bytes, np.uint8)
    half = np.ones(size_bytes // 2, np.uint8)
    with Ends(3) as ends:
        rows = ends.rows(
            1, [row(0, receive=(0, 0, size_bytes)), row(1, (2, 0, size_bytes), forwards=1)]
        )
        streams, first, last = ends.streams[1], ends.sockets[0][1], ends.sockets[2][1]
        streams.begin(rows, array.ctypes.data, size_bytes, HEADER, slice_ns=10_000_000)
        to_send, came = memoryview(HEADER_SENT + half.tobytes()), 0
        while came < len(HEADER_SENT) + len(half):
            if to_send:
                try:
                    to_send = to_send[first.send(to_send) :]
                except BlockingIOError:
                    pass
            assert streams.proceed() == Outcome(StreamStatus.AGAIN)
            try:
                came += len(last.recv(size_bytes))
            except BlockingIOError:
                pass
    assert array.sum() == len(half)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("block_bytes", [0, 3, 5 << 20])
def test_pairwise_exchange_in_place(kind, size, block_bytes):
    rng = np.random.default_rng(size)
    arrays = [rng.integers(0, 256, size * block_bytes, np.uint8) for _ in range(size)]
    rows = each(schedules.pairwise_exchange, size, block_bytes)
    expected = modelled(rows, arrays)
    with Ends(size, kind) as ends:
        ends.complete(rows, arrays)
    for array, right in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, right)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("buffer_bytes", [0, SMALL])
def test_rotation_in_place(kind, size, buffer_bytes):
    """Each end receives where it sends: nothing is overwritten before it was sent."""
    size_bytes = 60_001 if buffer_bytes else 20 << 20
    rng = np.random.default_rng(size)
    arrays = [rng.integers(0, 256, size_bytes, np.uint8) for _ in range(size)]
    before = [array.copy() for array in arrays]
    with Ends(size, kind, buffer_bytes) as ends:
        ends.complete(each(schedules.rotation, size, size_bytes), arrays)
    for rank, array in enumerate(arrays):
        np.testing.assert_array_equal(array, before[rank - 1])


def test_a_slow_receiver_keeps_a_later_receive_from_what_it_gets():
    """Step 1 receives where step 0 still sends, to somebody who does not take it."""
    size_bytes = 8 << 20
    array = np.ones(size_bytes, np.uint8)
    with Ends(3) as ends:
        slow, other = ends.sockets[1][0], ends.sockets[2][0]
        rows = ends.rows(0, [row(0, (1, 0, size_bytes)), row(1, receive=(2, 0, size_bytes))])
        streams = ends.streams[0]
        streams.begin(rows, array.ctypes.data, size_bytes, HEADER, slice_ns=5_000_000)
        to_send, came = memoryview(HEADER_SENT + bytes(size_bytes)), bytearray()
        for _ in range(5):  # nobody takes anything from the slow link
            to_send = to_send[_send_some(other, to_send) :]
            assert streams.proceed() == Outcome(StreamStatus.AGAIN)
        outcome = Outcome(StreamStatus.AGAIN)
        while len(came) < len(HEADER_SENT) + size_bytes or outcome.status == StreamStatus.AGAIN:
            to_send = to_send[_send_some(other, to_send) :]
            outcome = streams.proceed()
            try:
                came += slow.recv(1 << 20)
            except BlockingIOError:
                pass
    assert outcome == Outcome(StreamStatus.DONE)
    assert came[len(HEADER_SENT) :] == b"\1" * size_bytes
    assert not array.any()


def _send_some(connection, data) -> int:
    try:
        return connection.send(data) if len(data) else 0
    except BlockingIOError:
        return 0


@pytest.mark.parametrize("size", [3, 5])
def test_several_into_one_place_in_the_order_of_rows(size):
    arrays = noise(300_000, size)
    rows = each(schedules.star_reduce, size, arrays[0].nbytes)
    expected = arrays[0].copy()
    for array in arrays[1:]:
        expected += array
    with Ends(size, "tcp") as ends:
        ends.complete(rows, arrays, reduction=reduction("float32"))
    assert arrays[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("theirs_first", [0, 1])
def test_which_operand_is_the_left_one(theirs_first):
    """Of two equal values min takes the left one: the zeros differ in their sign."""
    arrays = [np.full(1000, 0.0, np.float32), np.full(1000, -0.0, np.float32)]
    there = (0, 4000)
    rows = [
        [row(0, receive=(1, *there), reduces=1, theirs_first=theirs_first)],
        [row(0, (0, *there))],
    ]
    with Ends(2) as ends:
        ends.complete(rows, arrays, reduction=reduction("float32", "min"))
    assert np.signbit(arrays[0]).all() == bool(theirs_first)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_barrier(size):
    array = np.zeros(1, np.uint8)
    with Ends(size) as ends:
        for _ in range(20):
            ends.complete(each(schedules.barrier, size), [array] * size)


def test_nobody_passes_a_barrier_alone():
    array = np.zeros(1, np.uint8)
    rows = each(schedules.barrier, 3)
    with Ends(3) as ends:
        for rank in (1, 2):
            table = ends.rows(rank, rows[rank])
            ends.streams[rank].begin(table, array.ctypes.data, 1, HEADER, slice_ns=2_000_000)
        for _ in range(3):
            for rank in (1, 2):
                assert ends.streams[rank].proceed().status == StreamStatus.AGAIN


def test_no_rows_and_rows_without_anybody():
    array = np.zeros(4, np.uint8)
    with Ends(2) as ends:
        ends.complete([[], [row(0), row(3)]], [array] * 2)


def test_sends_alone():
    arrays = [np.arange(1_000_000, dtype=np.int64), np.zeros(1_000_000, np.int64)]
    whole = (0, 8_000_000)
    rows = [[row(0, (1, *whole))], [row(0, receive=(0, *whole))]]
    with Ends(2, "tcp") as ends:
        ends.complete(rows, arrays)
    np.testing.assert_array_equal(arrays[0], arrays[1])


def test_offsets_behind_4_gib():
    import mmap

    size_bytes = 5 << 30
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    arrays = [np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8) for _ in range(2)]
    offset, count = (4 << 30) + 12_345, 1_000_000
    arrays[0][offset : offset + count] = 7
    rows = [[row(0, (1, offset, count))], [row(0, receive=(0, offset + 1, count))]]
    with Ends(2) as ends:
        ends.complete(rows, arrays)
    np.testing.assert_array_equal(arrays[1][offset : offset + count + 2], [0] + [7] * count + [0])


@pytest.mark.parametrize("seed", range(60))
def test_drawn_schedules(seed):
    size = 2 + seed % 4
    dtype = ("float32", "int8", "float64")[seed % 3]
    item_bytes = np.dtype(dtype).itemsize
    rng = np.random.default_rng(seed)
    count = (100, 20_000, 60_000)[seed % 5 % 3] // item_bytes
    arrays = [(rng.standard_normal(count) * 50).astype(dtype) for _ in range(size)]
    rows = schedules.drawn(seed, size, count * item_bytes, item_bytes)
    with np.errstate(all="ignore"):
        expected = modelled(rows, arrays, combined_as(dtype, np.add))
    kind, buffer_bytes = [("unix", 0), ("tcp", 0), ("tcp", SMALL)][seed // 4 % 3]
    with Ends(size, kind, buffer_bytes) as ends:
        ends.complete(rows, arrays, reduction=reduction(dtype))
    for array, right in zip(arrays, expected, strict=True):
        assert array.tobytes() == right.tobytes()


def test_many_calls_over_the_same_connections():
    size = 3
    with Ends(size, "tcp") as ends:
        for call in range(50):
            count = (call * 977) % 5000
            arrays = inputs("int32", count, size)
            expected = np.sum(arrays, axis=0, dtype=np.int32)
            rows = each(schedules.ring_all_reduce, size, count, 4)
            header = (1, call, call * 7)
            ends.complete(rows, arrays, header=header, reduction=reduction("int32"))
            for array in arrays:
                np.testing.assert_array_equal(array, expected)
