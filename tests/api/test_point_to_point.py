"""Send, recv, send_recv, probe: every dtype, size, shape and way; bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import any_values, assert_same
from tests.messages import WAYS, choose_way, eager_bytes, pattern, place, sizes, sleeps
from tests.waiting import until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError, MismatchError

STRUCTURED = [("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")]
DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "float32", "float64", "complex128"]
SHAPES = [
    (),
    (1,),
    (0,),
    (3, 0, 2),
    (2, 3, 4),
    (1, 2, 1, 2, 1, 2, 1, 2),
    (1, 2, 1, 2, 1, 2, 1, 2, 2),
]


def shift(comm):
    """Return the ranks that this one sends to and receives from, in a ring."""
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


def is_sender(comm):
    return comm.rank == 0


# --- data ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_every_dtype(comm):
    for turn, name in enumerate(DTYPES * 2):
        x = any_values(name, 3000, turn)
        if is_sender(comm):
            comm.send(x, 1, turn)
            continue
        assert_same(comm.recv(np.empty_like(x), 0, turn), x, name)
    for description in (STRUCTURED, "S5", "datetime64[us]", "U3"):
        dtype: np.dtype = np.dtype(description)
        x = np.frombuffer(pattern(10 * dtype.itemsize, 1) & 0x3F, np.uint8).view(dtype)
        for _ in range(2):
            if is_sender(comm):
                comm.send(x, 1)
            else:
                assert comm.recv(np.empty_like(x), 0).tobytes() == x.tobytes()


@pytest.mark.ranks(2)
def test_every_shape(comm):
    for shape in SHAPES:
        x = np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape)
        for _ in range(3):
            if is_sender(comm):
                comm.send(x, 1)
                continue
            found = comm.probe(0)
            assert found.shape == (shape if len(shape) <= 8 else None)
            assert (found.dtype, found.size_bytes, found.tag) == ("int64", x.nbytes, 0)
            if len(shape) <= 8:
                got = comm.recv()
            else:
                with pytest.raises(ArgumentError, match="cannot tell what rank 0 has sent"):
                    comm.recv()
                got = comm.recv(shape=shape, dtype="int64", source=0)
            assert got.shape == shape
            assert (got == x).all()


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_every_size_both_ways_at_once(comm, way):
    choose_way(comm, way)
    peer = 1 - comm.rank
    for turn, size in enumerate([*sizes(comm), 20_000_001]):
        x, out = place(comm, way, size, np.uint8), place(comm, way, size + 2, np.uint8)
        x[:] = pattern(size, comm.rank)
        out[:] = 0xA5
        if turn % 2:
            comm.send_recv(x, peer, peer, out[1:-1])
        elif is_sender(comm):
            comm.send(x, peer)
            comm.recv(out[1:-1], peer)
        else:
            comm.recv(out[1:-1], peer)
            comm.send(x, peer)
        assert (out[1:-1] == pattern(size, peer)).all(), size
        assert out[0] == out[-1] == 0xA5
        assert (x == pattern(size, comm.rank)).all()


@pytest.mark.ranks(2)
def test_strided_arrays_and_numbers(comm):
    grid = np.arange(10_000.0).reshape(100, 100)
    if is_sender(comm):
        comm.send(grid[::3, ::-2], 1)
        comm.send(2.5, 1)
        comm.send(np.int16(-3), 1)
        comm.send(7, 1)
        return
    out = np.zeros((100, 100))
    view = out[1:35, ::2]
    assert comm.recv(view, 0) is view
    assert (view == grid[::3, ::-2]).all()
    assert out[::2, 1::2].sum() == out[0].sum() == 0
    assert comm.recv(like=0.0) == 2.5
    assert comm.recv(shape=(), dtype="int16") == -3
    got = comm.recv()
    assert (got, type(got)) == (7, int)


SENT = [
    5,
    -(2**63),
    2**64 - 1,
    True,
    2.5,
    1 - 2j,
    np.int16(-3),
    np.bool_(True),
    np.float32(0.5),
    np.float64(0.5),
    np.complex64(2j),
    ml_dtypes.bfloat16(1.5),
    np.array(3),
    np.array(True),
    np.array(2.5, np.float32),
    np.ones(1),
]


def is_alike(got, sent):
    same_array = getattr(got, "shape", None) == getattr(sent, "shape", None)
    same_dtype = getattr(got, "dtype", None) == getattr(sent, "dtype", None)
    return type(got) is type(sent) and got == sent and same_array and same_dtype


@pytest.mark.ranks(2)
def test_what_was_sent_as_a_number_arrives_as_one(comm):
    if is_sender(comm):
        for tag, number in enumerate(SENT):
            comm.send(number, 1, tag)
        comm.send(7, 1, 100)
        comm.send_recv(8, 1, 1, tag=101)
        return
    held = [3, *range(3), *range(4, len(SENT))]  # one that came before others was kept aside
    for tag in held:
        found = comm.probe(0, tag)
        of_numbers = None if isinstance(SENT[tag], np.ndarray) else type(SENT[tag])
        assert (found.number, found.shape) == (of_numbers, np.shape(SENT[tag]))
        got = comm.recv(source=0, tag=tag)
        assert is_alike(got, SENT[tag]), (got, SENT[tag])
    out = np.zeros((), int)
    assert comm.recv(out, 0, 100) is out
    assert out == 7
    assert comm.send_recv(np.array(9), 0, 0, tag=101) == 8


@pytest.mark.ranks(2)
def test_70_000_small_messages(comm):
    """More than any 16-bit counter holds, and both ends often find the ring full or empty."""
    x = np.zeros(1, np.int64)
    if is_sender(comm):
        for number in range(70_000):
            x[0] = number
            comm.send(x, 1)
    else:
        wrong = [number for number in range(70_000) if comm.recv(x, 0)[0] != number]
        assert not wrong, wrong[:5]


# --- send_recv, and to itself -------------------------------------------------------------------


@pytest.mark.soak(quick=8)
@pytest.mark.ranks(2, 3, 4, 7)
def test_a_ring(comm):
    right, left = shift(comm)
    for count in (0, 3, 2000, 50_000):
        x = np.full(count, comm.rank)
        for turn in range(3):
            assert (comm.send_recv(x, right, left) == left).all()
            out = np.empty(count, int)
            assert comm.send_recv(x, right, left, out, tag=turn) is out
            assert (out == left).all()
    # As much as the other one sends, which may differ.
    mine, theirs = np.full(10 + comm.rank, 1.5), np.empty(10 + left)
    for _ in range(3):
        comm.send_recv(mine, right, left, theirs)
        assert (theirs == 1.5).all()


@pytest.mark.ranks(2)
def test_send_recv_that_meets_other_messages(comm):
    """One that has to be kept stands before; one that does not fit: nothing is sent twice."""
    peer, x, out = 1 - comm.rank, np.full(4, comm.rank), np.empty(4, int)
    for turn in range(4):
        comm.send(x + 10, peer, 9)
        assert (comm.send_recv(x, peer, peer, out, tag=turn) == peer).all()
        assert (comm.recv(out, peer, 9) == peer + 10).all()
    with pytest.raises(MismatchError):
        comm.send_recv(x, peer, peer, np.empty(3, int))
    assert (comm.recv(out, peer) == peer).all()
    comm.barrier()
    assert comm.probe(wait=False) is None


@pytest.mark.ranks(1, 2)
def test_to_itself(comm):
    me, x = comm.rank, np.arange(100.0)
    for count in (5, 100, 10_000, 1_000_000):
        x = np.arange(float(count))
        assert (comm.send_recv(x, me, me) == x).all()
        assert (comm.send_recv(x, me, me, np.empty(count), tag=3) == x).all()
        work = comm.send(x, me, async_op=True)
        assert (comm.recv(np.empty(count), me) == x).all()
        work.wait()
    comm.send(x[:5], me)
    assert comm.recv(np.empty(5))[4] == 4
    comm.barrier()  # what follows breaks the communicator of all
    with pytest.raises(DeadlineError, match=r"send\(float64, 8000000 bytes, dest=\d, tag=8\)"):
        comm.send(x, me, 8, timeout_s=0.1)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_bad_input(comm):
    x, out = np.zeros(4), np.zeros(4)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    for _ in range(2):  # before the compiled entry knows the dtype, and after
        for peer in (2, -1, -2, 2**70, -(2**70)):
            with pytest.raises(ArgumentError, match=r"dest must be in 0\.\.1"):
                comm.send(x, peer)
            with pytest.raises(ArgumentError, match=r"dest must be in 0\.\.1"):
                comm.send_recv(x, peer, 0, out)
            if peer != ANY_SOURCE:
                with pytest.raises(ArgumentError, match=r"source must be in 0\.\.1 or ANY_SOURCE"):
                    comm.recv(out, peer)
                with pytest.raises(ArgumentError, match=r"source must be in 0\.\.1 or ANY_SOURCE"):
                    comm.probe(peer)
        for tag in (-1, -2, 2**31, 2**70):
            with pytest.raises(ArgumentError, match="tag must be in"):
                comm.send(x, 1, tag)
            with pytest.raises(ArgumentError, match="tag must be in"):
                comm.send_recv(x, 1, 1, out, tag=tag)
            if tag != ANY_TAG:
                with pytest.raises(ArgumentError, match="or ANY_TAG"):
                    comm.recv(out, 1, tag)
        for odd in (True, 1.0, "1", None):
            with pytest.raises(ArgumentTypeError, match="dest must be a rank"):
                comm.send(x, odd)
            with pytest.raises(ArgumentTypeError, match="source must be a rank"):
                comm.recv(out, odd)
            with pytest.raises(ArgumentTypeError, match="tag must be an int"):
                comm.send(x, 1, odd)
            with pytest.raises(ArgumentTypeError, match="tag must be an int"):
                comm.recv(out, 1, odd)
        with pytest.raises(ArgumentError, match=r"read-only|writ"):
            comm.recv(read_only, 1)
        for target in (x, x[:3], x[1:]):
            with pytest.raises(ArgumentError, match="overlaps"):
                comm.send_recv(x, 1, 1, target)
        for number in (5, 2.5, np.float32(1)):
            with pytest.raises(ArgumentTypeError, match="a number has no memory"):
                comm.recv(number, 1)
        for no_array in ([1.0], "out"):
            with pytest.raises(ArgumentTypeError):
                comm.recv(no_array, 1)
            with pytest.raises(ArgumentTypeError):
                comm.send(no_array, 1)
        with pytest.raises(ArgumentTypeError):
            comm.send(np.zeros(2, object), 1)
        with pytest.raises(ArgumentError, match="give shape= and dtype="):
            comm.recv(shape=3)
        with pytest.raises(ArgumentError, match="give shape= and dtype="):
            comm.recv(dtype="f8")
        for timeout_s in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="timeout_s must be positive"):
                comm.send(x, 1, timeout_s=timeout_s)
            with pytest.raises(ValueError, match="timeout_s must be positive"):
                comm.recv(x, 1, timeout_s=timeout_s, async_op=True)
        assert comm.send_recv(x, 1 - comm.rank, 1 - comm.rank, out) is out
        comm.send(x, np.int64(1 - comm.rank), np.uint8(3))
        comm.recv(out, 1 - comm.rank, 3)
    comm.barrier()
    assert comm.probe(wait=False) is None


@pytest.mark.ranks(2)
def test_bad_timeouts_behind_pending_messages(comm):
    peer = 1 - comm.rank
    work = comm.recv(np.zeros(3), peer, async_op=True)
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be positive"):
            comm.send(np.zeros(3), peer, timeout_s=timeout_s)
    comm.send(np.zeros(3), peer)
    work.wait()


@pytest.mark.ranks(2)
def test_eager_sends_do_not_wait_while_there_is_room(comm):
    peer = 1 - comm.rank
    x = pattern(eager_bytes(comm), comm.rank)
    for _ in range(5):
        for number in range(100):  # 8 KiB each
            comm.send(x, peer, number)
        for number in range(100):
            assert (comm.recv(np.empty_like(x), peer, number) == pattern(x.size, peer)).all()


@pytest.mark.ranks(2)
def test_a_message_behind_an_unwanted_one_wakes_who_sleeps(comm):
    """It comes while the receiver sleeps, behind another that has to be taken aside first."""
    for _ in range(10):
        if is_sender(comm):
            until(lambda: sleeps(comm, 1))
            comm.send(np.zeros(2), 1, 1)
            comm.send(np.ones(2), 1, 2)
        else:
            assert comm.recv(np.zeros(2), 0, 2)[0] == 1
            assert comm.recv(np.zeros(2), 0, 1)[0] == 0
